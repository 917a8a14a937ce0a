"""Data parallelism running: each bucket of gradients is summed over the data axis while backward still computes the next."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from shoal.axes.flat import Bucket, FlatStorage
from shoal.comm.collectives import Handle, all_reduce
from shoal.comm.world import Group


class GradientSync:
    """Sums a storage's gradients over `group`, bucket by bucket, from hooks that fire as backward finishes parameters.

    Only inside `last_micro_batch()`: earlier micro-batches just accumulate, so g of them send what one does (DP-3).
    Buckets leave in the storage's order on every rank, since a collective that ranks call in different order gives
    silently wrong sums; a bucket whose parameters took no part in this step leaves at the end.
    The sum is right without a division: the loss is already divided by the global count of valid tokens.
    """

    def __init__(self, storage: FlatStorage, group: Group):
        self.storage, self.group = storage, group
        self.missing: list[int] = []  # per bucket: parameters whose gradient is still to come; empty when not armed
        self.in_flight: list[Handle] = []
        if group.size > 1:
            for place, bucket in enumerate(storage.buckets):
                for slot in bucket.slots:
                    slot.parameter.register_post_accumulate_grad_hook(partial(self._finished, place))

    @contextmanager
    def last_micro_batch(self) -> Iterator[None]:
        """Around the backward whose gradients complete the step: on leaving, every gradient is the global one."""
        if self.group.size == 1:
            yield
            return
        self.missing = [len(bucket.slots) for bucket in self.storage.buckets]
        self.in_flight = []
        try:
            yield
            for bucket in self.storage.buckets[len(self.in_flight) :]:
                self._launch(bucket)
            for handle in self.in_flight:
                handle.wait()
        finally:
            self.missing = []

    def _finished(self, place: int, parameter: nn.Parameter) -> None:
        if not self.missing:
            return
        self.missing[place] -= 1
        buckets = self.storage.buckets
        while len(self.in_flight) < len(buckets) and self.missing[len(self.in_flight)] == 0:
            self._launch(buckets[len(self.in_flight)])

    def _launch(self, bucket: Bucket) -> None:
        self.in_flight.append(all_reduce(bucket.gradients, self.group, asynchronous=True))
