"""Weights that more than one rank of a pipeline keeps: stages with several routes, and embeddings tied across its ends."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from shoal.axes.pipeline.schedules.instruction import Place, Schedule
from shoal.comm.exchange import exchange
from shoal.comm.world import Group


def copies(schedule: Schedule) -> Iterator[tuple[Place, Place]]:
    """The two places of every stage that exists twice, as in DualPipe, by stage."""
    assert len(schedule.routes) <= 2, "a stage has one place or two"
    if len(schedule.routes) == 2:
        yield from zip(*schedule.routes, strict=True)


def add_copies(gradients: Iterable[Tensor], peer: int, group: Group) -> None:
    """Adds the gradients of rank `peer` of the group, which calls this too, to these, in place; both end with equal bits.

    gradients: contiguous, of the same sizes in the same order on both. Each rank sends every byte once, as an all-reduce
    of two ranks would.
    """
    for mine in gradients:
        theirs = torch.empty_like(mine)
        exchange([(mine, peer)], [(theirs, peer)], group).wait()
        mine.add_(theirs)  # a + b is b + a to the bit
