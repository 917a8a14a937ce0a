"""The decoder: embedding, blocks, norm and head; parameters are named, shaped and ordered as in spec/inventory.py."""

import torch
from torch import Tensor, nn

from shoal.axes.tensor.run import TensorLayers
from shoal.comm.world import World
from shoal.kernels.dropout import DropoutKey, dropped
from shoal.model.attention import visible
from shoal.model.block import Block
from shoal.model.layers import Layers
from shoal.model.rope import rotation
from shoal.spec.model import ModelSpec


class Decoder(nn.Module):
    """A dense decoder. Its weights are memory as found until `initialise` or a checkpoint fills them.

    layers: this rank's pieces of the layers, by default whole ones; then every rank of their group calls the decoder
    with the same tokens and gets the same loss.
    Everywhere: tokens int64 (b, s); positions int64 (b, s), the place of each token, by default 0 to s - 1; documents
    int64 (b, s), where tokens see only tokens of the same number; dropout None switches dropout off.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        layers: Layers | None = None,
    ):
        super().__init__()
        self.spec = spec
        self.layers = layers or TensorLayers(spec, World.single(device=device).group("tp"))
        with torch.device("meta"):  # torch's layers would spend seconds on random weights that are replaced anyway
            self.embedding = self.layers.embedding()
            self.blocks = nn.ModuleList(Block(spec, self.layers) for _ in range(spec.layers))
            self.head = self.layers.head()
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
        """What the blocks make of the tokens: (b, s, h) or this rank's part of it, before the last norm."""
        spec, layers, sequence = self.spec, self.layers, tokens.shape[1]
        if positions is None:
            positions = torch.arange(sequence, device=tokens.device)[None]
        if documents is not None:
            documents = layers.own_samples(documents)
        mask = visible(sequence, spec.window, documents, tokens.device)
        turn, noise = None, None
        x = self.embedding(tokens, positions)
        if spec.positions == "rope":
            places = layers.own_samples(positions)
            turn = rotation(spec.rope, spec.head_size, places, torch.promote_types(x.dtype, torch.float32))
        if dropout is not None and spec.dropout:
            rows, features = noise = layers.noise_key(dropout).noise(1 + 2 * spec.layers, layers.width)
            x = dropped(x, spec.dropout, rows[0], features)
        for layer, block in enumerate(self.blocks):
            sites = None if noise is None else (noise[0][1 + 2 * layer : 3 + 2 * layer], noise[1])
            with layers.ledger.at(layer=layer):
                x = block(x, turn, mask, sites)
        return x

    def units(self) -> list[tuple[str, nn.Module]]:
        """The inventory's units in forward order, each with the module whose parameters it holds."""
        blocks = [(f"blocks.{layer}", block) for layer, block in enumerate(self.blocks)]
        return [("embedding", self.embedding), *blocks, ("head", self.head)]

    def _tied(self) -> Tensor | None:
        weight = self.embedding.weight
        assert isinstance(weight, Tensor)
        return weight if self.spec.tied else None

    def compile_blocks(self) -> None:
        """Compiles each block and the last norm in place; equal blocks share one compilation, and names stay."""
        for module in (*self.blocks, self.head.norm):
            module.compile()
