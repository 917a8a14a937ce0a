"""All ranks of a run, as far as checkpoints are concerned: in a process group of their own, on the CPU.

A save in the background so never comes between the messages of training. What is exchanged are plans and reasons, a few
kilobytes that no ledger counts; tensors stay where they are.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shoal.comm.gloo import gloo
from shoal.comm.world import World

T = TypeVar("T")


class Peers:
    """The ranks of `world`; made, used and closed by all of them in one order."""

    def __init__(self, world: World):
        self.rank, self.size, self.calls = world.rank, world.size, world.calls()
        self.group = dist.new_group(backend=gloo(), timeout=world.timeout) if world.size > 1 else None

    def everyone(self, value: T) -> list[T]:
        """What each rank passed, by rank."""
        values: list[Any] = [value]
        if self.group is not None:
            values = [None] * self.size
            call = self.calls.begin("all_gather")
            dist.all_gather_object(values, value, group=self.group)
            call.done()
        return values

    def decide(self, value: Any, decision: Callable[[list[Any]], list[T]]) -> T:
        """What rank 0's `decision` makes for this rank of what each rank passed."""
        if self.group is None:
            return decision([value])[0]
        leads = self.rank == 0
        values = [None] * self.size if leads else None
        call = self.calls.begin("gather")
        dist.gather_object(value, values, dst=0, group=self.group)
        answer: list[Any] = [None]
        dist.scatter_object_list(answer, decision(values) if values is not None else None, src=0, group=self.group)
        call.done()
        return answer[0]

    def close(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)
