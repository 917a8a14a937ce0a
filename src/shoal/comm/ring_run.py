"""Runs the plans of comm/ring.py with real messages between neighbours, and keeps a trace of every one.

For showing and for checking what the other collectives only promise; training uses the back end's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.backend import point_to_point
from shoal.comm.ring import Move, Plan, all_gather_plan, all_reduce_plan, reduce_scatter_plan
from shoal.comm.shapes import cut, joined
from shoal.comm.world import Group
from shoal.transfer import pieces


@dataclass(frozen=True)
class Sent:
    """What this rank passed on in one round; sent and received are bytes of the tensors that really travelled."""

    round: int
    move: Move
    sent: int
    received: int


def ring_all_reduce(x: Tensor, group: Group) -> tuple[Tensor, list[Sent]]:
    """Sums the ranks' flat x in place, in pieces(len, N) pieces; also returns this rank's trace."""
    return x, _run(all_reduce_plan(group.size), x, group, pieces(len(x), group.size), "all_reduce")


def ring_reduce_scatter(x: Tensor, group: Group, sizes: Sequence[int] | None = None) -> tuple[Tensor, list[Sent]]:
    """This rank's piece of the sum of the ranks' flat x, which is overwritten, and this rank's trace."""
    lengths = cut(len(x), group, sizes)
    trace = _run(reduce_scatter_plan(group.size), x, group, lengths, "reduce_scatter")
    return x.split(lengths)[group.index], trace


def ring_all_gather(x: Tensor, group: Group, sizes: Sequence[int] | None = None) -> tuple[Tensor, list[Sent]]:
    """The ranks' flat x one after the other, and this rank's trace."""
    lengths = joined(len(x), group, sizes)
    whole = x.new_empty(sum(lengths))
    whole.split(lengths)[group.index].copy_(x)
    return whole, _run(all_gather_plan(group.size), whole, group, lengths, "all_gather")


def _run(plan: Plan, x: Tensor, group: Group, lengths: Sequence[int], op: str) -> list[Sent]:
    """Carries out this rank's part of a plan on the pieces of x."""
    assert x.dim() == 1 and x.is_contiguous(), "rings run on flat tensors"
    views = x.split(list(lengths))
    trace = []
    for number, moves in enumerate(plan):
        here = moves[group.index]
        coming = next(move for move in moves if move.to == group.index)
        message, arrived = views[here.piece], torch.empty_like(views[coming.piece])
        call = group.calls.begin("receive", peer=coming.rank)
        for work in point_to_point([(message, here.to)], [(arrived, coming.rank)], group.process_group):
            work.wait()
        call.done()
        if coming.action == "add":
            views[coming.piece].add_(arrived)
        else:
            views[coming.piece].copy_(arrived)
        trace.append(Sent(number, here, message.nbytes, arrived.nbytes))
    if group.size > 1:
        group.ledger.record(group.axis, op, sum(s.sent for s in trace), sum(s.received for s in trace))
    return trace
