"""A mixture of experts as a block's feed-forward: its auxiliary losses ride along with the activations.

A block hands on activations alone, to the next block or the next stage of a pipeline. So the gradient of the auxiliary
losses starts where they arise, as soon as backward comes by, from the same d total / d loss as that of the loss itself.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.axes.expert.run import MixtureOfExperts


class Tokens(NamedTuple):
    """What routing must know of the tokens as they lie on this rank between layer pairs.

    counted (b, s) bool: whether their targets count; None: all do. order (b, s) int64: grows with a token's global place
    in its sequence, and with the sequence's in the batch. seed: d total / d loss, a scalar.
    """

    counted: Tensor | None
    order: Tensor
    seed: Tensor


@torch.compiler.disable
def routed(x: Tensor, mixture: MixtureOfExperts, tokens: Tokens) -> Tensor:
    """What the experts make of x (b, s, h), with the layer's auxiliary losses attached."""
    y, auxiliary = mixture(x, tokens.counted, tokens.order)
    return attached(y, auxiliary, tokens.seed) if mixture.spec.losses else y


def attached(y: Tensor, auxiliary: Tensor, seed: Tensor) -> Tensor:
    """y, whose backward also starts one from the scalar `auxiliary`, with the gradient `seed`."""
    return _Attached.apply(y, auxiliary, seed)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, auxiliary: Tensor, seed: Tensor) -> Tensor:
        ctx.gradient = seed.to(auxiliary)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.gradient, None
