"""Collectives inside autograd: each pairs what happens to activations with what happens to their gradients.

Named forward_backward; the second is the first's transpose, so a model cut by them has the gradients of the whole one.
Backward's transfers are recorded under phase "backward", at the layer and micro-batch where forward ran. In a group of
one every function returns its input.

Which pair is right depends on the gradients: where every rank computes the same thing from a tensor, the gradients are
equal and backward needs one of them (identity, split); where each computes its own part, backward sums (all_reduce,
reduce_scatter). Shoeybi et al. 2019 call identity_all_reduce f and all_reduce_identity g.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.comm import collectives
from shoal.comm.shapes import cut, joined
from shoal.comm.world import Group


def identity_all_reduce(x: Tensor, group: Group) -> Tensor:
    """f: x is whole on every rank and each computes its own part from it."""
    return _apply(x, group, _identity, partial(_all_reduce, group=group))


def all_reduce_identity(x: Tensor, group: Group) -> Tensor:
    """g: every rank has a part of a sum; what follows is the same on every rank."""
    return _apply(x, group, partial(_all_reduce, group=group), _identity)


def all_gather_reduce_scatter(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Joins the ranks' pieces along `dim`; each rank then computes its own part from the whole."""
    sizes = joined(x.shape[dim], group, sizes)
    return _apply(
        x,
        group,
        partial(collectives.all_gather, group=group, dim=dim, sizes=sizes),
        partial(collectives.reduce_scatter, group=group, dim=dim, sizes=sizes),
    )


def reduce_scatter_all_gather(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Sums the ranks' x and leaves each its piece along `dim`."""
    sizes = cut(x.shape[dim], group, sizes)
    return _apply(
        x,
        group,
        partial(collectives.reduce_scatter, group=group, dim=dim, sizes=sizes),
        partial(collectives.all_gather, group=group, dim=dim, sizes=sizes),
    )


def all_gather_split(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Joins the ranks' pieces along `dim`; what follows is the same on every rank."""
    sizes = joined(x.shape[dim], group, sizes)
    return _apply(
        x,
        group,
        partial(collectives.all_gather, group=group, dim=dim, sizes=sizes),
        partial(_split, group=group, dim=dim, sizes=sizes),
    )


def split_all_gather(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's piece along `dim` of an x that is the same on every rank and gets its whole gradient there."""
    sizes = cut(x.shape[dim], group, sizes)
    return _apply(
        x,
        group,
        partial(_split, group=group, dim=dim, sizes=sizes),
        partial(collectives.all_gather, group=group, dim=dim, sizes=sizes),
    )


def all_to_all(
    x: Tensor, group: Group, send_sizes: Sequence[int] | None = None, receive_sizes: Sequence[int] | None = None
) -> Tensor:
    """Exchanges pieces along dim 0; the gradients travel back the same way."""
    return _apply(
        x,
        group,
        partial(collectives.all_to_all, group=group, send_sizes=send_sizes, receive_sizes=receive_sizes),
        partial(collectives.all_to_all, group=group, send_sizes=receive_sizes, receive_sizes=send_sizes),
    )


def broadcast_reduce(x: Tensor, group: Group, root: int) -> Tensor:
    """The root's x on every rank; its gradient is the sum of all, and the others' x, which was not used, gets zeros."""

    def back(gradient: Tensor) -> Tensor:
        total = collectives.reduce(_own(gradient), group, root)
        return total if group.index == root else torch.zeros_like(total)

    return _apply(x, group, lambda x: collectives.broadcast(_own(x), group, root), back)


def reduce_broadcast(x: Tensor, group: Group, root: int) -> Tensor:
    """The sum of the ranks' x on the root, zeros on the others; everybody's gradient is the root's."""

    def move(x: Tensor) -> Tensor:
        total = collectives.reduce(_own(x), group, root)
        return total if group.index == root else torch.zeros_like(total)

    return _apply(x, group, move, lambda gradient: collectives.broadcast(_own(gradient), group, root))


def scatter_gather(x: Tensor, group: Group, root: int, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """This rank's piece of the root's x (the others pass an x of length 0 along `dim`)."""
    return _apply(
        x,
        group,
        partial(collectives.scatter, group=group, root=root, sizes=sizes, dim=dim),
        partial(collectives.gather, group=group, root=root, sizes=sizes, dim=dim),
    )


def gather_scatter(x: Tensor, group: Group, root: int, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """The ranks' pieces joined along `dim` on the root, length 0 along it on the others."""
    sizes = joined(x.shape[dim], group, sizes)
    return _apply(
        x,
        group,
        partial(collectives.gather, group=group, root=root, sizes=sizes, dim=dim),
        partial(collectives.scatter, group=group, root=root, sizes=sizes, dim=dim),
    )


def send(x: Tensor, group: Group, to: int) -> Tensor:
    """Sends x to rank `to`, which calls `receive`; returns a scalar 0 that stands for it in this rank's loss.

    Backward through the scalar receives x's gradient from there: add it to what backward starts from.
    """

    def move(x: Tensor) -> Tensor:
        collectives.send(x.contiguous(), group, to)
        return x.new_zeros(())

    empty = partial(torch.empty, x.shape, dtype=x.dtype, device=x.device)
    return _apply(x, group, move, lambda _: collectives.receive(empty(), group, to))


def receive(shape: Sequence[int], dtype: torch.dtype, group: Group, source: int) -> Tensor:
    """What rank `source` sends, as a tensor whose gradient goes back there."""
    start = torch.empty(tuple(shape), dtype=dtype, device=group.device, requires_grad=True)

    def back(gradient: Tensor) -> None:
        collectives.send(gradient.contiguous(), group, source)

    return _apply(start, group, lambda start: collectives.receive(torch.empty_like(start), group, source), back)


class _Conjugate(torch.autograd.Function):
    """forward moves x, backward moves the gradient, at the ledger's place of the forward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, move: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor | None]
    ) -> Tensor:
        ctx.ledger, ctx.place, ctx.back = group.ledger, group.ledger.place, back
        return move(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        with ctx.ledger.at(phase="backward", layer=ctx.place.layer, micro_batch=ctx.place.micro_batch):
            return ctx.back(gradient), None, None, None


def _apply(x: Tensor, group: Group, move: Callable[[Tensor], Tensor], back: Callable[[Tensor], Any]) -> Tensor:
    return _Conjugate.apply(x, group, move, back) if group.size > 1 else x


def _identity(x: Tensor) -> Tensor:
    return x.view_as(x)  # a new tensor over the same memory: autograd must not find the input in the output


def _own(x: Tensor) -> Tensor:
    """A copy of x that may be overwritten: activations and gradients belong to others too."""
    return x.clone(memory_format=torch.contiguous_format)


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    return collectives.all_reduce(_own(x), group)


def _split(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    return x.narrow(dim, sum(sizes[: group.index]), sizes[group.index]).contiguous()
