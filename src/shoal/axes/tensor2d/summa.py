"""SUMMA (van de Geijn & Watts 1997): a linear layer whose input, weight and output are all cut into q x q blocks.

Rank (i, j) keeps X_ij, block i of the tokens and j of the features, and of the weight (out, in) the block of outputs j
and inputs i, W_ij. Its output is Y_ij = sum over k of X_ik W_kj^T: in step k the ranks of a row pass X_ik along, those of
a column W_kj. Backward goes through the same steps twice: dX_ik sums dY_ij W_kj over the row, dW_kj sums dY_ij^T X_ik
over the column; dY stays where it is. A block that arrived is dropped before the next one does.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.comm.collectives import broadcast, reduce
from shoal.comm.world import Group
from shoal.kernels.linear import PutOff, bias_gradient, input_gradient, linear, weight_gradient


class SummaLinear(nn.Linear):
    """x (..., in / q), block (i, j) of the whole x -> (..., out / q), block (i, j) of x W^T + bias.

    inputs, outputs: of this rank's blocks. row: the ranks of the same tokens; column: those of the same features.
    put_off: where backward leaves the gradients of weight and bias, and the messages they need, for later; every rank of
    the grid then runs its queue, in the same order.
    """

    put_off: PutOff | None = None

    def __init__(self, inputs: int, outputs: int, bias: bool, row: Group, column: Group):
        super().__init__(inputs, outputs, bias)
        self.row, self.column = row, column

    def forward(self, x: Tensor) -> Tensor:
        return summa(x, self.weight, self.bias, self.row, self.column, self.put_off)


@torch.compiler.disable
def summa(
    x: Tensor, weight: Tensor, bias: Tensor | None, row: Group, column: Group, put_off: PutOff | None = None
) -> Tensor:
    """SummaLinear as a function."""
    return _Summa.apply(x, weight, bias, row, column, put_off)


class _Summa(torch.autograd.Function):
    """Keeps this rank's own blocks alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, row: Group, column: Group, put_off: PutOff | None
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.row, ctx.column = (weight, bias), row, column
        ctx.put_off, ctx.place = put_off, row.ledger.place
        y = None
        for x_k, weight_k in zip(blocks(x, row), blocks(weight, column), strict=True):
            y = linear(x_k, weight_k) if y is None else y.add_(linear(x_k, weight_k))
        assert y is not None
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        row, column, queue, (parameter, bias) = ctx.row, ctx.column, ctx.put_off, ctx.parameters
        x_needs, weight_needs, bias_needs = ctx.needs_input_grad[:3]

        def in_backward(compute: Callable[[], Tensor]) -> Tensor:
            with row.ledger.at(phase="backward", layer=ctx.place.layer, micro_batch=ctx.place.micro_batch):
                return compute()

        def of_weight(gradient: Tensor, x: Tensor) -> Tensor:
            return in_backward(lambda: summed(gradient, x, weight_gradient, row, column))

        d_x = d_weight = d_bias = None
        if x_needs:
            d_x = in_backward(lambda: summed(gradient, weight, input_gradient, column, row))
        if weight_needs and queue is None:
            d_weight = of_weight(gradient, x)
        elif weight_needs:
            queue.add(parameter, of_weight, gradient, x)
        if bias_needs and queue is None:
            d_bias = bias_gradient(gradient)
        elif bias_needs:
            queue.add(bias, bias_gradient, gradient)
        return d_x, d_weight, d_bias, None, None, None


def blocks(own: Tensor, group: Group) -> Iterator[Tensor]:
    """The block of every rank of the group in turn, from the first on. One buffer takes all that arrive: use each at once."""
    arriving = torch.empty_like(own) if group.size > 1 else own
    for root in range(group.size):
        yield broadcast(own if root == group.index else arriving, group, root)


def summed(
    gradient: Tensor, own: Tensor, product: Callable[[Tensor, Tensor], Tensor], along: Group, over: Group
) -> Tensor:
    """This rank's block of a gradient: product(gradient, block k of the ranks `along`), summed on rank k of those `over`.

    One product is alive at a time, and given away before the next is formed.
    """
    kept = None
    for root, block in enumerate(blocks(own, along)):
        part = reduce(product(gradient, block), over, root, overwrite=True)
        if root == over.index:
            kept = part
        del part
    assert kept is not None
    return kept
