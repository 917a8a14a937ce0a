"""Sum of token cross-entropies on a tensor grid: hidden states and the head's weight in q x q blocks, logits never whole.

Rank (i, j) is to compute the logits of tokens i for ids j. It gathers the hidden states of its tokens from its row and
goes through its ids a slice at a time: the slice's weights, gathered from the column, give logits that turn into softmax
statistics at once (in backward, into gradients) and are gone before the next. A logit needs all hidden features, so while
the head runs a rank holds the q blocks of its tokens, where other layers hold two; of weights never more than two.
Messages are those of any layer of the grid, (q - 1) / q^2 (|X| + |W|) forward and twice that backward, and three numbers
per token along the row. Slicing tokens instead would bring every weight anew for each slice.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.axes.tensor.loss import IGNORED
from shoal.axes.tensor2d.cost import slice_rows
from shoal.comm.collectives import all_gather, all_reduce, reduce_scatter
from shoal.comm.conjugate import all_reduce_identity
from shoal.comm.world import Group
from shoal.kernels.linear import input_gradient, linear, weight_gradient


@torch.compiler.disable
def grid_head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, row: Group, column: Group, first: int, real: int
) -> Tensor:
    """Sum over the counted targets of the whole micro-batch of -log softmax(hidden W^T)[target]; equal on all ranks.

    hidden (..., h / q); weight (ids, h / q), of which the first `real` rows are those of ids from `first` on, the rest
    is padding; targets (...) int64, of this rank's tokens, IGNORED where one does not count. Statistics and sums are
    float32 at least, and so is the scalar. Differentiable once.
    """
    loss = _HeadLoss.apply(hidden.flatten(0, -2), weight, targets.flatten(), row, column, first, real)
    return all_reduce_identity(loss, column)


class _HeadLoss(torch.autograd.Function):
    """Of this rank's tokens n: the sum of their losses. Keeps its own blocks and one number per token."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, row: Group, column: Group, first: int, real: int
    ) -> Tensor:
        accurate = torch.promote_types(hidden.dtype, torch.float32)
        x = _row_blocks(hidden, targets, row)
        largest = torch.full((len(targets),), torch.finfo(accurate).min, dtype=accurate, device=hidden.device)
        total, picked = torch.zeros_like(largest), torch.zeros_like(largest)  # sum of exp(logit - largest); logit
        for here, slice_weight in _slices(weight, len(targets), column):
            logits = _logits(x, slice_weight, real - here.start, accurate)
            before, largest = largest, torch.maximum(largest, logits.amax(dim=1))
            place, mine = _place(targets, first + here.start, min(here.stop, real) - here.start)
            picked += torch.where(mine, logits.gather(1, place).squeeze(1), 0)
            total = total.mul_((before - largest).exp_()).add_(logits.sub_(largest[:, None]).exp_().sum(dim=1))
        highest = all_reduce(largest.clone(), row, "max")
        total, picked = all_reduce(torch.stack((total.mul_((largest - highest).exp_()), picked)), row)
        normaliser = total.log_().add_(highest)
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        ctx.row, ctx.column, ctx.first, ctx.real, ctx.place = row, column, first, real, row.ledger.place
        return torch.where(targets != IGNORED, normaliser - picked, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        place = ctx.place
        with ctx.row.ledger.at(phase="backward", layer=place.layer, micro_batch=place.micro_batch):
            d_hidden, d_weight = _gradients(gradient, ctx)
        return d_hidden, d_weight, None, None, None, None, None


def _gradients(gradient: Tensor, ctx: Any) -> tuple[Tensor | None, Tensor | None]:
    """Of the loss with respect to this rank's hidden (n, h / q) and weight (ids, h / q), times `gradient`."""
    hidden, weight, targets, normaliser = ctx.saved_tensors
    hidden_needs, weight_needs = ctx.needs_input_grad[:2]
    x = _row_blocks(hidden, targets, ctx.row)
    d_x = torch.zeros_like(x, dtype=normaliser.dtype) if hidden_needs else None
    d_weight = torch.empty_like(weight) if weight_needs else None
    of_token = torch.where(targets != IGNORED, gradient, 0)[:, None]
    for here, slice_weight in _slices(weight, len(targets), ctx.column):
        p = _logits(x, slice_weight, ctx.real - here.start, normaliser.dtype).sub_(normaliser[:, None]).exp_()
        place, mine = _place(targets, ctx.first + here.start, min(here.stop, ctx.real) - here.start)
        d_logits = p.scatter_add_(1, place, mine[:, None].to(p.dtype).neg()).mul_(of_token).to(weight.dtype)
        if d_x is not None:
            for d_x_k, weight_k in zip(d_x, slice_weight, strict=True):
                d_x_k += input_gradient(d_logits, weight_k)
        if d_weight is not None:
            parts = torch.cat([weight_gradient(d_logits, x_k) for x_k in x])
            reduce_scatter(parts, ctx.column, out=d_weight[here])
    if d_x is None:
        return None, d_weight
    return reduce_scatter(d_x.to(hidden.dtype), ctx.row).squeeze(0), d_weight


def _row_blocks(hidden: Tensor, targets: Tensor, row: Group) -> Tensor:
    """The hidden states (q, n, h / q) of this rank's tokens, from all ranks of its row; zeros where none counts."""
    return all_gather(torch.where((targets != IGNORED)[:, None], hidden, 0)[None], row)


def _slices(weight: Tensor, tokens: int, column: Group) -> Iterator[tuple[slice, Tensor]]:
    """(which rows, their weights (q, rows, h / q) from all ranks of the column), in one buffer: use each at once."""
    rows, step = len(weight), slice_rows(len(weight), tokens, column.size)
    buffer = weight.new_empty((column.size * step, weight.shape[1]))
    for start in range(0, rows, step):
        here = slice(start, min(start + step, rows))
        gathered = all_gather(weight[here], column, out=buffer[: column.size * (here.stop - start)])
        yield here, gathered.unflatten(0, (column.size, -1))


def _logits(x: Tensor, weight: Tensor, real: int, dtype: torch.dtype) -> Tensor:
    """x (q, n, h / q), weight (q, rows, h / q) -> (n, rows), minus infinity for rows from number `real` on."""
    logits = linear(x[0], weight[0]).to(dtype)
    for x_k, weight_k in zip(x[1:], weight[1:], strict=True):
        logits += linear(x_k, weight_k)
    logits[:, max(real, 0) :] = -torch.inf
    return logits


def _place(targets: Tensor, first: int, real: int) -> tuple[Tensor, Tensor]:
    """Of ids [first, first + real): (column of each target (n, 1), some column where it is not there; whether it is)."""
    place = targets - first
    mine = (place >= 0) & (place < real)
    return torch.where(mine, place, 0)[:, None], mine
