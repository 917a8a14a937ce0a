"""The two ends of the decoder: token ids to hidden states, and hidden states to logits or to the loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.kernels.linear import linear
from shoal.kernels.norm import norm
from shoal.model.loss import head_loss
from shoal.spec.model import ModelSpec


class Embedding(nn.Module):
    """tokens and positions, int64 (b or 1, s) -> (b, s, h): a row per token, plus one per place where those are learned."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.vocab, spec.hidden))
        learned = spec.positions == "learned"
        self.positions = nn.Parameter(torch.empty(spec.positions_max, spec.hidden)) if learned else None

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = F.embedding(tokens, self.weight)
        return x if self.positions is None else x + F.embedding(positions, self.positions)


class Head(nn.Module):
    """The last norm and the product with the vocabulary's vectors, which a tied model passes in as `tied` (V, h)."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.norm = norm(spec)
        self.weight = None if spec.tied else nn.Parameter(torch.empty(spec.vocab, spec.hidden))

    def forward(self, x: Tensor, tied: Tensor | None, targets: Tensor | None = None) -> Tensor:
        """x (..., h) -> logits (..., V); with targets (...) the sum of their cross-entropies, logits never whole."""
        weight = self.weight if tied is None else tied
        assert weight is not None
        x = self.norm(x)
        return linear(x, weight) if targets is None else head_loss(x, weight, targets)
