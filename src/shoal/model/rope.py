"""Rotary position embedding (Su et al. 2021), half-split pairing: feature i turns with feature i + d/2, as in Llama.

Its three frequency rules: plain, llama3 (Llama 3.1's, by wave length) and yarn (Peng et al. 2023, sec. 3.2, by turns).
"""

import math

import torch
from torch import Tensor

from shoal.spec.model import RopeSpec

Rotation = tuple[Tensor, Tensor]  # factors of a feature and of its partner, cos and -+sin, each (b or 1, s, 1, d)


def frequencies(rope: RopeSpec, head_size: int) -> Tensor:
    """Angle per position of each of the d/2 pairs, float64 (d/2,)."""
    plain = rope.theta ** -(torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    if rope.scaling == "none":
        return plain
    kept = _kept_by_llama3(rope, plain) if rope.scaling == "llama3" else _kept_by_yarn(rope, head_size)
    return kept * plain + (1 - kept) * plain / rope.factor


def _kept_by_llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """How much of each frequency stays, 0 to 1: linear in the number of its waves in the original context."""
    waves = rope.original_positions * plain / (2 * math.pi)
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    return ((waves - low) / (high - low)).clamp(0, 1)


def _kept_by_yarn(rope: RopeSpec, head_size: int) -> Tensor:
    """How much of each frequency stays, 0 to 1: a ramp over pairs, from those of beta_fast turns to those of beta_slow.

    The ends are rounded outwards to whole pairs and clamped as in the authors' code, so published models fit.
    """

    def pair_that_turns(turns: float) -> float:
        return head_size * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(rope.beta_slow)), head_size - 1)
    width = high - low or 0.001  # a ramp without width is a step
    pairs = torch.arange(head_size // 2, dtype=torch.float64)
    return 1 - ((pairs - low) / width).clamp(0, 1)


def rotation(rope: RopeSpec, head_size: int, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """Factors of the rotation at positions (b or 1, s), in `dtype`, times rope.attention_factor.

    The angles are formed in float64: a float32 angle at position 100,000 is wrong in its third digit.
    """
    angles = positions.double()[..., None, None] * frequencies(rope, head_size).to(positions.device)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotated(x: Tensor, turn: Rotation) -> Tensor:
    """x (b, s, n, d) turned by the rotation, computed in the rotation's dtype."""
    return _Rotated.apply(x, *turn)


class _Rotated(torch.autograd.Function):
    """Keeps only the angles, since backward turns the other way, and walks the tensor as seldom as it can."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    partners = torch.cat((second, first), dim=-1).to(cos.dtype)
    return partners.mul_(sin).addcmul_(x, cos).to(x.dtype)
