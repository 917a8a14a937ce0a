"""Data parallelism running: each bucket of gradients is summed over the data axis while backward still computes the next."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from shoal.axes.flat import Bucket, Held, on_gradient
from shoal.comm.collectives import Handle, all_reduce
from shoal.comm.world import Group


class DataParallel:
    """The states of a model of which every rank of `group` holds a copy, in flat buckets.

    Gradients are summed bucket by bucket, from hooks that fire as backward finishes parameters, in the last micro-batch
    only: earlier ones just accumulate, so g of them send what one does (DP-3). Buckets leave in one order on every rank,
    since a collective that ranks call in different order gives silently wrong sums; a bucket whose parameters took no
    part in this step leaves at the end. The sum is right without a division: the loss is already divided by the global
    count of valid tokens.

    buckets: by name. A pipeline runs forwards and backwards of several micro-batches in an order of its own: it stands in
    `interleaved`, and says with `finish` when a backward was made, so which buckets are complete.
    """

    shared = False  # every rank has all weights

    def __init__(self, buckets: Mapping[str, Bucket], group: Group):
        self.names, self.buckets = list(buckets), list(buckets.values())
        self.group, self.shards = group, group.alone()
        self.leaves = True  # whether gradients leave in this micro-batch
        self.in_flight: dict[int, Handle] = {}  # by bucket, in the order in which they left
        for place, bucket in enumerate(self.buckets):
            for index, slot in enumerate(bucket.slots):
                on_gradient(slot.parameter, self._arrived, place, index)

    @contextmanager
    def micro_batch(self, first: bool, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch; on leaving the last, every gradient is the global one."""
        self._begin(fresh=first, leaves=last)
        yield
        if last:
            self._settle()

    @contextmanager
    def interleaved(self) -> Iterator[None]:
        """Around a whole step whose micro-batches overlap; on leaving, every gradient is the global one."""
        self._begin(fresh=True, leaves=False)
        yield
        self._settle()

    def finish(self, names: Collection[str], last: bool) -> None:
        """The buckets of these names got all gradients of one more micro-batch; last: of the step's last one."""
        if last:
            for place, name in enumerate(self.names):
                if name in names:
                    self._leave(place)

    def free(self, names: Collection[str]) -> None:
        """Every rank keeps all weights, always."""

    def _begin(self, fresh: bool, leaves: bool) -> None:
        self.leaves, self.in_flight = leaves, {}
        for bucket in self.buckets:
            bucket.arrived = set()
            if fresh:
                bucket.written = set()

    def _settle(self) -> None:
        for place in range(len(self.buckets)):
            if place not in self.in_flight:
                self._leave(place)
        for handle in self.in_flight.values():
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
        if parameter.grad is None:
            return  # put off: this hook fires again when the gradient is made
        complete = self.buckets[place].absorb(index)
        if not (complete and self.leaves):
            return
        while (following := len(self.in_flight)) < len(self.buckets):
            bucket = self.buckets[following]
            if len(bucket.arrived) < len(bucket.slots):
                break
            self._leave(following)

    def _leave(self, place: int) -> None:
        bucket = self.buckets[place]
        bucket.fill()
        self.in_flight[place] = all_reduce(bucket.gradients, self.group, asynchronous=True)
