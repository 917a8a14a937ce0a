"""Data parallelism running: each bucket of gradients is summed over the data axis while backward still computes the next."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from shoal.axes.flat import Bucket, Held
from shoal.comm.collectives import Handle, all_reduce
from shoal.comm.world import Group


class DataParallel:
    """The states of a model of which every rank of `group` holds a copy, in flat buckets.

    Gradients are summed bucket by bucket, from hooks that fire as backward finishes parameters, in the last micro-batch
    only: earlier ones just accumulate, so g of them send what one does (DP-3). Buckets leave in one order on every rank,
    since a collective that ranks call in different order gives silently wrong sums; a bucket whose parameters took no
    part in this step leaves at the end. The sum is right without a division: the loss is already divided by the global
    count of valid tokens.
    """

    shared = False  # every rank has all weights

    def __init__(self, buckets: list[Bucket], group: Group):
        self.buckets, self.group, self.shards = buckets, group, group.alone()
        self.first = self.leaves = True  # whether this is the step's first micro-batch, and whether gradients leave
        self.in_flight: list[Handle] = []
        for place, bucket in enumerate(buckets):
            for index, slot in enumerate(bucket.slots):
                slot.parameter.register_post_accumulate_grad_hook(partial(self._arrived, place, index))

    @contextmanager
    def micro_batch(self, first: bool, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch; on leaving the last, every gradient is the global one."""
        self.first, self.leaves, self.in_flight = first, last, []
        for bucket in self.buckets:
            bucket.arrived = set()
        yield
        waiting = self.buckets[len(self.in_flight) :]
        if first:
            for bucket in waiting:
                bucket.fill()
        if last:
            for bucket in waiting:
                self._leave(bucket)
            for handle in self.in_flight:
                handle.wait()

    def held(self) -> Iterator[Held]:
        """The buffers of gradients on this rank."""
        for bucket in self.buckets:
            yield Held(bucket.gradients, bucket.flat.spans(0, bucket.flat.elements))

    def scale(self, factor: float) -> None:
        """Multiplies every gradient by `factor`, in place."""
        for bucket in self.buckets:
            bucket.gradients.mul_(factor)

    def runs(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """(weights, gradients, decays) of each contiguous run that the optimizer treats alike."""
        for bucket in self.buckets:
            yield from bucket.runs()

    def spread(self) -> None:
        """After an update: every rank has made the same one, so there is nothing to hand around."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, gradient) of every parameter, as views."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                yield slot.name, slot.view(bucket.gradients)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, weight) of every parameter, as views."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                yield slot.name, slot.view(bucket.weights)

    def _arrived(self, place: int, index: int, parameter: nn.Parameter) -> None:
        complete = self.buckets[place].absorb(index, fresh=self.first)
        if not (complete and self.leaves):
            return
        while len(self.in_flight) < len(self.buckets):
            bucket = self.buckets[len(self.in_flight)]
            if len(bucket.arrived) < len(bucket.slots):
                break
            self._leave(bucket)

    def _leave(self, bucket: Bucket) -> None:
        self.in_flight.append(all_reduce(bucket.gradients, self.group, asynchronous=True))
