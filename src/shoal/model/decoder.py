"""The decoder: embedding, blocks, norm and head; parameters are named, shaped and ordered as in spec/inventory.py."""

import torch
from torch import Tensor, nn

from shoal.kernels.dropout import DropoutKey, dropped
from shoal.model.attention import visible
from shoal.model.block import Block
from shoal.model.ends import Embedding, Head
from shoal.model.rope import rotation
from shoal.spec.model import ModelSpec


class Decoder(nn.Module):
    """A dense decoder. Its weights are memory as found until `initialise` or a checkpoint fills them.

    Everywhere: tokens int64 (b, s); positions int64 (b, s), the place of each token, by default 0 to s - 1; documents
    int64 (b, s), where tokens see only tokens of the same number; dropout None switches dropout off.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        super().__init__()
        self.spec = spec
        with torch.device("meta"):  # torch's layers would spend seconds on random weights that are replaced anyway
            self.embedding = Embedding(spec)
            self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
            self.head = Head(spec)
        self.to(dtype).to_empty(device=device)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        dropout: DropoutKey | None = None,
    ) -> Tensor:
        """Scores of every next token: (b, s, V) in the model's dtype."""
        return self.head(self.hidden(tokens, positions, documents, dropout), self._tied())

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        dropout: DropoutKey | None = None,
    ) -> Tensor:
        """Sum of the cross-entropies in nats over targets (b, s) that are not -100; a float32 or float64 scalar.

        Logits never exist whole; 0 with zero gradients when no target counts.
        """
        return self.head(self.hidden(tokens, positions, documents, dropout), self._tied(), targets)

    def next_logits(self, tokens: Tensor) -> Tensor:
        """Scores of the one token that follows each row: (b, V)."""
        return self.head(self.hidden(tokens)[:, -1], self._tied())

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        dropout: DropoutKey | None = None,
    ) -> Tensor:
        """What the blocks make of the tokens: (b, s, h), before the last norm."""
        spec, sequence = self.spec, tokens.shape[1]
        if positions is None:
            positions = torch.arange(sequence, device=tokens.device)[None]
        mask = visible(sequence, spec.window, documents, tokens.device)
        turn, noise = None, None
        x = self.embedding(tokens, positions)
        if spec.positions == "rope":
            turn = rotation(spec.rope, spec.head_size, positions, torch.promote_types(x.dtype, torch.float32))
        if dropout is not None and spec.dropout:
            rows, features = noise = dropout.noise(1 + 2 * spec.layers, spec.hidden)
            x = dropped(x, spec.dropout, rows[0], features)
        for layer, block in enumerate(self.blocks):
            sites = None if noise is None else (noise[0][1 + 2 * layer : 3 + 2 * layer], noise[1])
            x = block(x, turn, mask, sites)
        return x

    def units(self) -> list[tuple[str, nn.Module]]:
        """The inventory's units in forward order, each with the module whose parameters it holds."""
        blocks = [(f"blocks.{layer}", block) for layer, block in enumerate(self.blocks)]
        return [("embedding", self.embedding), *blocks, ("head", self.head)]

    def _tied(self) -> Tensor | None:
        return self.embedding.weight if self.spec.tied else None

    def compile_blocks(self) -> None:
        """Compiles each block and the last norm in place; equal blocks share one compilation, and names stay."""
        for module in (*self.blocks, self.head.norm):
            module.compile()
