"""The decoder: embedding, blocks, norm and head; parameters are named, shaped and ordered as in spec/inventory.py."""

import torch
from torch import Tensor, nn

from shoal.model.attention import visible
from shoal.model.block import Block
from shoal.model.dropout import DropoutKey, dropped
from shoal.model.linear import Linear, linear
from shoal.model.loss import head_loss
from shoal.model.norm import norm
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
            self.embedding = nn.Embedding(spec.vocab, spec.hidden)
            if spec.positions == "learned":
                self.positions = nn.Embedding(spec.positions_max, spec.hidden)
            self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
            self.norm = norm(spec)
            if not spec.tied:
                self.head = Linear(spec.hidden, spec.vocab, bias=False)
        self.to(dtype).to_empty(device=device)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        dropout: DropoutKey | None = None,
    ) -> Tensor:
        """The hidden states that the head reads: (b, s, h), after the last norm."""
        spec, sequence = self.spec, tokens.shape[1]
        if positions is None:
            positions = torch.arange(sequence, device=tokens.device)[None]
        mask = visible(sequence, spec.window, documents, tokens.device)
        turn, noise = None, None
        x = self.embedding(tokens)
        if spec.positions == "learned":
            x = x + self.positions(positions)
        else:
            turn = rotation(spec.rope, spec.head_size, positions, torch.promote_types(x.dtype, torch.float32))
        if dropout is not None and spec.dropout:
            rows, features = noise = dropout.noise(1 + 2 * spec.layers, spec.hidden)
            x = dropped(x, spec.dropout, rows[0], features)
        for layer, block in enumerate(self.blocks):
            sites = None if noise is None else (noise[0][1 + 2 * layer : 3 + 2 * layer], noise[1])
            x = block(x, turn, mask, sites)
        return self.norm(x)

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
        return head_loss(self(tokens, positions, documents, dropout), self.head_weight, targets)

    def logits(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Scores of every next token: (b, s, V) in the model's dtype."""
        return linear(self(tokens, positions, documents), self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """(V, h), the embedding's own when tied."""
        return self.embedding.weight if self.spec.tied else self.head.weight

    def units(self) -> list[tuple[str, nn.Module]]:
        """The inventory's units in order, each with the modules whose parameters it holds."""
        inputs = [self.embedding, self.positions] if self.spec.positions == "learned" else [self.embedding]
        outputs = [self.norm] if self.spec.tied else [self.norm, self.head]
        blocks = [(f"blocks.{layer}", block) for layer, block in enumerate(self.blocks)]
        return [("embedding", nn.ModuleList(inputs)), *blocks, ("head", nn.ModuleList(outputs))]

    def compile_blocks(self) -> None:
        """Compiles each block and the last norm in place; equal blocks share one compilation, and names stay."""
        for module in (*self.blocks, self.norm):
            module.compile()
