"""What a pipeline schedule is made of: instructions in order per rank, and where each stage of the model lives. No torch.

A *stage* is a run of layers; a *chunk* is a stage as seen by the rank that holds it. Sends and receives are no part of a
schedule: communication.py derives them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

# forward; whole backward; its input half; its weight half; update of the weights (asynchronous schedules only)
Kind = Literal["F", "B", "I", "W", "U"]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One piece of work. chunk: number among the chunks of this rank. Written F0, or F0.1 for chunk 1."""

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a backward (B or I) of different chunks that run together, as in DualPipe. Written F4&B1.1."""

    forward: Instruction
    backward: Instruction

    def __str__(self) -> str:
        return f"{self.forward}&{self.backward}"


Step = Instruction | Overlap


class Place(NamedTuple):
    """Where a stage of the model lives. Written rank.chunk."""

    rank: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.rank}.{self.chunk}"


Route = tuple[Place, ...]


def parts(step: Step) -> tuple[Instruction, ...]:
    """The instructions of a step; the forward of an overlap comes first."""
    return (step.forward, step.backward) if isinstance(step, Overlap) else (step,)


@dataclass(frozen=True)
class Schedule:
    """Who does what in which order, for one training step.

    orders: steps by rank. routes: where stages 0, 1, ... of the model live; several routes are several copies of the
    weights. route_of: by micro-batch, the route it takes. versions: which weights a backward uses where updates happen
    between (see live.py); "flush": every micro-batch sees the same weights. Lists become tuples. Nothing is checked
    here; check.py does.
    """

    name: str
    orders: Sequence[Sequence[Step]]
    routes: Sequence[Sequence[Place]]
    route_of: Sequence[int]
    versions: Literal["flush", "stash", "vertical", "2bw"] = "flush"

    def __post_init__(self) -> None:
        object.__setattr__(self, "orders", tuple(map(tuple, self.orders)))
        object.__setattr__(self, "routes", tuple(tuple(Place(*place) for place in route) for route in self.routes))
        object.__setattr__(self, "route_of", tuple(self.route_of))

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def micro_batches(self) -> int:
        return len(self.route_of)

    @property
    def stages(self) -> int:
        """Stages of the model, whether or not several copies of them exist."""
        return len(self.routes[0])

    def chunks(self, rank: int) -> int:
        """How many chunks a rank holds."""
        return self._held[rank]

    def stage_of(self, rank: int, chunk: int) -> int:
        """The stage of the model that is this chunk of this rank."""
        return self._stage_at[rank, chunk]

    def previous(self, rank: int, chunk: int, micro_batch: int) -> Place | None:
        """Where the stage before this one is, on the micro-batch's route; None before the first."""
        stage = self._stage_at[rank, chunk]
        return Place(*self.routes[self.route_of[micro_batch]][stage - 1]) if stage else None

    def next(self, rank: int, chunk: int, micro_batch: int) -> Place | None:
        """Where the stage after this one is, on the micro-batch's route; None after the last."""
        stage = self._stage_at[rank, chunk]
        return Place(*self.routes[self.route_of[micro_batch]][stage + 1]) if stage + 1 < self.stages else None

    def instructions(self, rank: int) -> Iterator[Instruction]:
        """Every instruction of a rank in order; the forward of an overlap comes before its backward."""
        return (instruction for step in self.orders[rank] for instruction in parts(step))

    @cached_property
    def _held(self) -> Counter[int]:
        return Counter(place.rank for route in self.routes for place in route)

    @cached_property
    def _stage_at(self) -> Mapping[tuple[int, int], int]:
        return {place: stage for route in self.routes for stage, place in enumerate(route)}


def F(micro_batch: int, chunk: int = 0) -> Instruction:
    """Forward."""
    return Instruction("F", micro_batch, chunk)


def B(micro_batch: int, chunk: int = 0) -> Instruction:
    """Backward: gradients of inputs and weights."""
    return Instruction("B", micro_batch, chunk)


def I(micro_batch: int, chunk: int = 0) -> Instruction:  # noqa: E743
    """The half of a backward that makes the gradient of the inputs, which the stage before waits for."""
    return Instruction("I", micro_batch, chunk)


def W(micro_batch: int, chunk: int = 0) -> Instruction:
    """The other half: gradients of the weights, which nobody waits for."""
    return Instruction("W", micro_batch, chunk)


def U(micro_batch: int, chunk: int = 0) -> Instruction:
    """Update of a chunk's weights with the gradients of all micro-batches up to this one."""
    return Instruction("U", micro_batch, chunk)


def one_chunk_per_rank(p: int) -> list[Route]:
    """Rank s holds stage s."""
    return [tuple(Place(rank, 0) for rank in range(p))]


def looped(p: int, v: int) -> list[Route]:
    """Rank d holds stages d, d + p, ...: its chunks 0, 1, ..., v - 1."""
    return [tuple(Place(rank, chunk) for chunk in range(v) for rank in range(p))]


def v_shape(p: int) -> list[Route]:
    """Rank d holds stages d and 2p - 1 - d: down the ranks as chunk 0, and up again as chunk 1."""
    return [(*(Place(rank, 0) for rank in range(p)), *(Place(rank, 1) for rank in reversed(range(p))))]
