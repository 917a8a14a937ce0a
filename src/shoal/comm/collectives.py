"""The collectives: each checks its shapes, moves the data and writes into the ledger what the ring convention counts.

They work on plain data; a tensor in the middle of autograd goes through comm/conjugate.py. Results are contiguous. In a
group of one nothing is sent, recorded or copied, and what comes back may be the tensor that went in. Roots and peers
are places within the group. `dim` is the tensor dim that is cut or joined, and `sizes` gives each rank's length along
it (None: all equal); every rank passes the same.

With asynchronous=True a collective returns a Handle at once; its tensors must not be touched before `wait()`.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.backend import OPERATIONS, moves, point_to_point, reduces_and_scatters
from shoal.comm.shapes import back, buffer, cut, equal, front, into, joined
from shoal.comm.whereabouts import SILENT_CALL, Call
from shoal.comm.world import Group
from shoal.transfer import traffic


class Handle:
    """A collective under way. It keeps the tensors that are being sent alive until `wait`."""

    def __init__(
        self,
        result: Tensor,
        works: Sequence[dist.Work | None] = (),
        finish: Callable[[Tensor], Tensor] | None = None,
        keep: Sequence[Tensor] = (),
        call: Call = SILENT_CALL,
    ):
        self._result, self._works, self._finish, self._keep, self._call = result, works, finish, keep, call

    def wait(self) -> Tensor:
        """The result, complete (on CUDA: complete for what the current stream does next). May be called again."""
        self._call.wait()
        for work in self._works:
            if work is not None:
                work.wait()
        self._call.done()
        if self._finish is not None:
            self._result = self._finish(self._result)
        self._works, self._finish, self._keep, self._call = (), None, (), SILENT_CALL
        return self._result


@overload
def all_reduce(x: Tensor, group: Group, op: str = "sum", asynchronous: Literal[False] = False) -> Tensor: ...
@overload
def all_reduce(x: Tensor, group: Group, op: str = "sum", *, asynchronous: Literal[True]) -> Handle: ...
def all_reduce(x: Tensor, group: Group, op: str = "sum", asynchronous: bool = False) -> Tensor | Handle:
    """The sum ("max", "min") of every rank's x, on all of them, in place; bit-identical on every rank."""
    if group.size == 1:
        return _silent(x, asynchronous)
    _check(x, group, in_place=True)
    call = group.calls.begin("all_reduce", waits=not asynchronous)
    work = dist.all_reduce(x, OPERATIONS[op], group.process_group, async_op=asynchronous)
    _record(group, "all_reduce", x, x.numel())
    return _answer(Handle(x, [work], call=call), asynchronous)


@overload
def all_gather(
    x: Tensor,
    group: Group,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    asynchronous: Literal[False] = False,
) -> Tensor: ...
@overload
def all_gather(
    x: Tensor,
    group: Group,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    *,
    asynchronous: Literal[True],
) -> Handle: ...
def all_gather(
    x: Tensor,
    group: Group,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    asynchronous: bool = False,
) -> Tensor | Handle:
    """Every rank's x joined along `dim`, on all of them.

    out: a contiguous buffer to gather into, for dim 0; x may be its own piece of it.
    """
    if group.size == 1:
        return _silent(into(out, x), asynchronous)
    _check(x, group)
    piece = front(x, dim)
    lengths = joined(piece.shape[0], group, sizes)
    whole = buffer(out, dim, piece, sum(lengths))
    call = group.calls.begin("all_gather", waits=not asynchronous)
    if equal(lengths):
        work = dist.all_gather_single(whole.view(-1), piece.view(-1), group.process_group, async_op=asynchronous)
    else:
        own = [piece.shape[0]] * group.size
        piece = piece.repeat(group.size, *[1] * (piece.dim() - 1))  # the same rows for every rank
        work = dist.all_to_all_single(whole, piece, lengths, own, group.process_group, async_op=asynchronous)
    _record(group, "all_gather", piece, sum(lengths), sizes=lengths)
    return _answer(Handle(whole, [work], back(dim), keep=[piece], call=call), asynchronous)


@overload
def reduce_scatter(
    x: Tensor,
    group: Group,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    asynchronous: Literal[False] = False,
) -> Tensor: ...
@overload
def reduce_scatter(
    x: Tensor,
    group: Group,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    *,
    asynchronous: Literal[True],
) -> Handle: ...
def reduce_scatter(
    x: Tensor,
    group: Group,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    asynchronous: bool = False,
) -> Tensor | Handle:
    """This rank's piece, along `dim`, of the sum of every rank's x.

    out: a contiguous buffer for the piece, for dim 0; it may be x's own piece.
    """
    if group.size == 1:
        return _silent(into(out, x), asynchronous)
    _check(x, group)
    whole = front(x, dim)
    lengths = cut(whole.shape[0], group, sizes)
    length, rest = lengths[group.index], whole.shape[1:]
    piece = buffer(out, dim, whole, length)
    _record(group, "reduce_scatter", whole, whole.shape[0], sizes=lengths)
    call = group.calls.begin("reduce_scatter", waits=not asynchronous)
    if reduces_and_scatters(group.device) and equal(lengths):
        work = dist.reduce_scatter_single(
            piece.view(-1), whole.view(-1), group=group.process_group, async_op=asynchronous
        )
        return _answer(Handle(piece, [work], back(dim), keep=[whole], call=call), asynchronous)
    parts = whole.new_empty((group.size * length, *rest))
    work = dist.all_to_all_single(
        parts, whole, [length] * group.size, lengths, group.process_group, async_op=asynchronous
    )

    def add_up(piece: Tensor) -> Tensor:
        torch.sum(parts.view(group.size, length, *rest), 0, dtype=piece.dtype, out=piece)
        return back(dim)(piece)

    return _answer(Handle(piece, [work], add_up, keep=[whole], call=call), asynchronous)


def broadcast(x: Tensor, group: Group, root: int) -> Tensor:
    """The root's x on all ranks, in place; the others pass a tensor of the same shape and dtype."""
    if group.size > 1:
        _check(x, group, in_place=True)
        call = group.calls.begin("broadcast")
        dist.broadcast(x, group=group.process_group, group_src=root)
        call.done()
        _record(group, "broadcast", x, x.numel(), root)
    return x


def reduce(x: Tensor, group: Group, root: int, op: str = "sum", overwrite: bool = False) -> Tensor:
    """The sum ("max", "min") of every rank's x on the root, in place there; on the others x stays as it was.

    overwrite: the others give their x away, which spares them a copy; what it holds afterwards means nothing.
    """
    if group.size > 1:
        _check(x, group, in_place=True)
        scratch = x if overwrite or group.index == root else x.clone()  # gloo overwrites what the others pass
        call = group.calls.begin("reduce")
        dist.reduce(scratch, op=OPERATIONS[op], group=group.process_group, group_dst=root)
        call.done()
        _record(group, "reduce", x, x.numel(), root)
    return x


def scatter(x: Tensor, group: Group, root: int, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """This rank's piece, `sizes[index]` long along `dim`, of the root's x.

    The others pass a tensor of the same dtype and shape but of length 0 along `dim`, as `gather` returns it.
    """
    if group.size == 1:
        return x
    _check(x, group)
    whole = front(x, dim)
    at_root = group.index == root
    assert len(sizes) == group.size, f"{len(sizes)} sizes for {group.size} ranks"
    length = sum(sizes) if at_root else 0
    assert whole.shape[0] == length, f"{whole.shape[0]} long along dim {dim}, not {length}"
    arriving = [sizes[group.index] if peer == root else 0 for peer in range(group.size)]
    piece = whole.new_empty((sizes[group.index], *whole.shape[1:]))
    leaving = list(sizes) if at_root else [0] * group.size
    call = group.calls.begin("scatter")
    dist.all_to_all_single(piece, whole, arriving, leaving, group.process_group)
    call.done()
    _record(group, "scatter", whole, sum(sizes), root, sizes)
    return back(dim)(piece)


def gather(x: Tensor, group: Group, root: int, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Every rank's x joined along `dim` on the root; on the others a tensor whose length along `dim` is 0."""
    if group.size == 1:
        return x
    _check(x, group)
    piece = front(x, dim)
    lengths = joined(piece.shape[0], group, sizes)
    arriving = lengths if group.index == root else [0] * group.size
    leaving = [piece.shape[0] if peer == root else 0 for peer in range(group.size)]
    whole = piece.new_empty((sum(arriving), *piece.shape[1:]))
    call = group.calls.begin("gather")
    dist.all_to_all_single(whole, piece, arriving, leaving, group.process_group)
    call.done()
    _record(group, "gather", piece, sum(lengths), root, lengths)
    return back(dim)(whole)


@overload
def all_to_all(
    x: Tensor,
    group: Group,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
    asynchronous: Literal[False] = False,
) -> Tensor: ...
@overload
def all_to_all(
    x: Tensor,
    group: Group,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
    *,
    asynchronous: Literal[True],
) -> Handle: ...
def all_to_all(
    x: Tensor,
    group: Group,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
    asynchronous: bool = False,
) -> Tensor | Handle:
    """Piece j of x, along dim 0, goes to rank j; what comes back holds the pieces received, in the order of the ranks.

    send_sizes, receive_sizes: lengths to and from each rank, zero allowed; both or neither (equal pieces).
    """
    assert (send_sizes is None) == (receive_sizes is None), "pass both send_sizes and receive_sizes, or neither"
    if group.size == 1:
        return _silent(x, asynchronous)
    _check(x, group)
    leaving = cut(x.shape[0], group, send_sizes)
    arriving = leaving if receive_sizes is None else list(receive_sizes)
    assert len(arriving) == group.size, f"{len(arriving)} receive_sizes for {group.size} ranks"
    assert leaving[group.index] == arriving[group.index], "what a rank sends to itself is what it receives from itself"
    x = x.contiguous()
    result = x.new_empty((sum(arriving), *x.shape[1:]))
    call = group.calls.begin("all_to_all", waits=not asynchronous)
    work = dist.all_to_all_single(result, x, arriving, leaving, group.process_group, async_op=asynchronous)
    _record(group, "all_to_all", x, x.shape[0], sizes=leaving, receive_sizes=arriving)
    return _answer(Handle(result, [work], keep=[x], call=call), asynchronous)


@overload
def send(x: Tensor, group: Group, to: int, asynchronous: Literal[False] = False) -> Tensor: ...
@overload
def send(x: Tensor, group: Group, to: int, asynchronous: Literal[True]) -> Handle: ...
def send(x: Tensor, group: Group, to: int, asynchronous: bool = False) -> Tensor | Handle:
    """Sends x to rank `to`, which calls `receive`; returns x. Messages between two ranks keep their order."""
    _check(x, group, in_place=True)
    call = group.calls.begin("send", waits=not asynchronous, peer=to)
    works = point_to_point([(x, to)], [], group.process_group)
    _record(group, "send", x, x.numel())
    return _answer(Handle(x, works, call=call), asynchronous)


@overload
def receive(x: Tensor, group: Group, source: int, asynchronous: Literal[False] = False) -> Tensor: ...
@overload
def receive(x: Tensor, group: Group, source: int, asynchronous: Literal[True]) -> Handle: ...
def receive(x: Tensor, group: Group, source: int, asynchronous: bool = False) -> Tensor | Handle:
    """Fills the buffer x with what rank `source` sends; its shape and dtype are the sender's."""
    _check(x, group, in_place=True)
    call = group.calls.begin("receive", waits=not asynchronous, peer=source)
    works = point_to_point([], [(x, source)], group.process_group)
    _record(group, "receive", x, x.numel())
    return _answer(Handle(x, works, call=call), asynchronous)


def barrier(group: Group) -> None:
    """Returns when every rank of the group has called it."""
    if group.size > 1:
        call = group.calls.begin("barrier")
        dist.barrier(group.process_group)
        call.done()
        group.ledger.record(group.axis, "barrier", 0, 0)


def _check(x: Tensor, group: Group, in_place: bool = False) -> None:
    """What holds for every tensor that is sent."""
    assert not (x.requires_grad and torch.is_grad_enabled()), "autograd would not see this; use comm/conjugate.py"
    assert x.device.type == group.device.type, f"the tensor lives on {x.device}, the group's ranks use {group.device}"
    assert moves(x), f"{x.dtype} cannot be sent from {x.device}"
    # gloo would silently reduce the memory between the elements instead
    assert not in_place or x.is_contiguous(), "a collective in place needs a contiguous tensor"


def _record(
    group: Group,
    op: str,
    x: Tensor,
    length: int,
    root: int = 0,
    sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
) -> None:
    """Writes a call into the ledger. length: of the full tensor in elements, or in rows of x when sizes are given."""
    if group.ledger.enabled:
        width = x.element_size() if sizes is None else x.element_size() * prod(x.shape[1:])
        group.ledger.record(
            group.axis, op, *traffic(op, length, width, group.size, group.index, root, sizes, receive_sizes)
        )


def _answer(handle: Handle, asynchronous: bool) -> Tensor | Handle:
    return handle if asynchronous else handle.wait()


def _silent(x: Tensor, asynchronous: bool) -> Tensor | Handle:
    """The answer of a group of one."""
    return Handle(x) if asynchronous else x
