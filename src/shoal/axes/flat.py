"""Flat storage: the parameters of a bucket lie in one buffer, their gradients in another of the same shape.

Collectives move whole buffers and the optimizer updates whole runs, so nothing is copied in or out; `parameter.data`
and `parameter.grad` are views (design, idea 5). A bucket is what one collective moves: a run of parameters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its bucket: elements [start, start + count)."""

    name: str
    parameter: nn.Parameter
    start: int
    count: int


class Bucket:
    """One run of parameters in flat buffers.

    weights, gradients: 1-D, equal length, in the parameters' dtype and device; gradients start as zeros.
    Parameters that decay come first, so that each of `runs` is contiguous and the optimizer sees two tensors at most.
    """

    def __init__(self, decayed: Sequence[tuple[str, nn.Parameter]], plain: Sequence[tuple[str, nn.Parameter]]):
        self.slots: list[Slot] = []
        place = 0
        for name, parameter in (*decayed, *plain):
            self.slots.append(Slot(name, parameter, place, parameter.numel()))
            place += parameter.numel()
        first = self.slots[0].parameter
        self.decayed_elements = sum(parameter.numel() for _, parameter in decayed)
        self.weights = torch.empty(place, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.weights)
        with torch.no_grad():
            for slot in self.slots:
                self.view(self.weights, slot).copy_(slot.parameter)
                slot.parameter.data = self.view(self.weights, slot)
                slot.parameter.grad = self.view(self.gradients, slot)

    @staticmethod
    def view(buffer: Tensor, slot: Slot) -> Tensor:
        """The part of a flat buffer that belongs to one parameter, in the parameter's shape."""
        return buffer[slot.start : slot.start + slot.count].view(slot.parameter.shape)

    def runs(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """(weights, gradients, decays) of each contiguous run that the optimizer treats alike."""
        for run, decays in ((slice(0, self.decayed_elements), True), (slice(self.decayed_elements, None), False)):
            if self.weights[run].numel():
                yield self.weights[run], self.gradients[run], decays


class FlatStorage:
    """A module's parameters moved into buckets. `names`: per bucket the parameters' names; `decays`: those with decay."""

    def __init__(self, module: nn.Module, names: Sequence[Sequence[str]], decays: set[str]):
        parameters = dict(module.named_parameters())
        assert sorted(name for bucket in names for name in bucket) == sorted(parameters), (
            "buckets must cover the module"
        )
        self.buckets = [
            Bucket(
                [(name, parameters[name]) for name in bucket if name in decays],
                [(name, parameters[name]) for name in bucket if name not in decays],
            )
            for bucket in names
        ]

    def zero_gradients(self) -> None:
        """Sets every gradient to zero in place; the views stay."""
        for bucket in self.buckets:
            bucket.gradients.zero_()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, gradient) of every parameter, as views."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                yield slot.name, bucket.view(bucket.gradients, slot)

    def norm(self) -> Tensor:
        """Global L2 norm of the gradients, each parameter counted once; a float32 scalar, float64 for float64 models."""
        accurate = torch.promote_types(self.buckets[0].gradients.dtype, torch.float32)
        norms = [torch.linalg.vector_norm(bucket.gradients, dtype=accurate) for bucket in self.buckets]
        return torch.linalg.vector_norm(torch.stack(norms))

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiplies every gradient in place."""
        for bucket in self.buckets:
            bucket.gradients.mul_(factor)
