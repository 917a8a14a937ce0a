"""Flat storage: the parameters of a bucket lie in one buffer, their gradients in another of the same shape.

Collectives move whole buffers and the optimizer updates whole runs. Weights are never copied in or out: `parameter.data`
is a view. Gradients move into their buffer as backward makes them (design, idea 5). A bucket is what one collective
moves: a run of parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from shoal.axes.piece import Span


def on_gradient(parameter: nn.Parameter, arrived: Callable[..., None], *place: int) -> None:
    """Has the method `arrived` called with (*place, parameter) whenever backward has finished the parameter's gradient.

    The hook does not keep the method's object alive: parameters live in its buffers, and torch holds hooks where Python's
    garbage collector does not see them.
    """
    method = WeakMethod(arrived)

    def hook(parameter: Tensor) -> None:
        call = method()
        if call is not None:
            call(*place, parameter)

    parameter.register_post_accumulate_grad_hook(hook)


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a flat buffer: elements [start, start + count)."""

    name: str
    parameter: nn.Parameter
    start: int
    count: int

    def view(self, buffer: Tensor) -> Tensor:
        """The part of a flat buffer that belongs to the parameter, in the parameter's shape."""
        return buffer[self.start : self.start + self.count].view(self.parameter.shape)

    def take_gradient(self, buffer: Tensor, fresh: bool) -> None:
        """Moves the gradient that autograd left on the parameter into the buffer: written if `fresh`, else added.

        Autograd hands its own tensor over when a parameter has no gradient yet, so one copy stands in the place of
        zeroing the buffer and adding to it.
        """
        assert self.parameter.grad is not None
        if fresh:
            self.view(buffer).copy_(self.parameter.grad)
        else:
            self.view(buffer).add_(self.parameter.grad)
        self.parameter.grad = None


@dataclass(frozen=True)
class Flat:
    """Where the parameters of one flat buffer lie: those with weight decay first, so that each kind is one run.

    elements: of all parameters; decayed: of those with decay.
    """

    slots: list[Slot]
    elements: int
    decayed: int

    @classmethod
    def of(cls, named: Sequence[tuple[str, nn.Parameter]], decays: set[str]) -> "Flat":
        """The layout of named parameters; decays: the names of those with weight decay."""
        slots: list[Slot] = []
        place = 0
        for name, parameter in sorted(named, key=lambda pair: pair[0] not in decays):
            slots.append(Slot(name, parameter, place, parameter.numel()))
            place += parameter.numel()
        return cls(slots, place, sum(slot.count for slot in slots if slot.name in decays))

    def move_into(self, weights: Tensor) -> None:
        """Makes every parameter a view into the flat buffer `weights`, with the values it has."""
        with torch.no_grad():
            for slot in self.slots:
                slot.view(weights).copy_(slot.parameter)
                slot.parameter.data = slot.view(weights)

    def zero_missing(self, buffer: Tensor, written: set[int]) -> None:
        """Puts zeros into the parts of `buffer` whose slots are not among `written`, which then names all."""
        for place, slot in enumerate(self.slots):
            if place not in written:
                slot.view(buffer).zero_()
        written.update(range(len(self.slots)))

    def spans(self, start: int, stop: int) -> list[Span]:
        """What lies in [start, stop) of the buffer, relative to start."""
        return [
            Span(slot.name, max(start - slot.start, 0), max(slot.start, start) - start, slot_stop - start)
            for slot in self.slots
            if (slot_stop := min(slot.start + slot.count, stop)) > max(slot.start, start)
        ]

    def runs(self, start: int, stop: int) -> Iterator[tuple[slice, bool]]:
        """What lies in [start, stop) of the buffer, relative to start: (run, whether it decays); padding is nobody's."""
        edge = min(max(self.decayed, start), stop) - start
        end = min(max(self.elements, start), stop) - start
        for run, decays in ((slice(0, edge), True), (slice(edge, end), False)):
            if run.stop > run.start:
                yield run, decays


class Held(NamedTuple):
    """A flat gradient buffer of this rank, and what lies where in it."""

    buffer: Tensor
    spans: list[Span]


class Bucket:
    """One run of parameters in flat buffers.

    weights, gradients: 1-D, equal length, in the parameters' dtype and device. arrived: places of the slots whose
    gradient came in this micro-batch; written: of those that hold something of this step.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], decays: set[str]):
        self.flat = Flat.of(named, decays)
        self.slots = self.flat.slots
        first = self.slots[0].parameter
        self.weights = torch.empty(self.flat.elements, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.weights)
        self.flat.move_into(self.weights)
        self.arrived: set[int] = set()
        self.written: set[int] = set()

    def absorb(self, place: int) -> bool:
        """Takes up the gradient of the slot at `place`; whether all of the bucket's have now arrived."""
        self.slots[place].take_gradient(self.gradients, fresh=place not in self.written)
        self.written.add(place)
        self.arrived.add(place)
        return len(self.arrived) == len(self.slots)

    def fill(self) -> None:
        """Puts zeros where no gradient came in this step."""
        self.flat.zero_missing(self.gradients, self.written)

    def runs(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """(weights, gradients, decays) of each contiguous run that the optimizer treats alike."""
        for run, decays in self.flat.runs(0, self.flat.elements):
            yield self.weights[run], self.gradients[run], decays
