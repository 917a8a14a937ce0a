"""How long a schedule takes: every step in time, the bubble, and what is alive when. No torch.

Ranks keep their orders, and a step starts as soon as its inputs are there. Times are in any one unit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from numbers import Real
from typing import NamedTuple

from shoal.axes.pipeline.dependencies import times
from shoal.axes.pipeline.live import Live, live, live_versions
from shoal.axes.pipeline.schedules.instruction import Instruction, Overlap, Place, Schedule, Step

Duration = Callable[[int, Step], float]


class Span(NamedTuple):
    """One step in time."""

    start: float
    end: float
    step: Step


@dataclass(frozen=True)
class Timeline:
    """A schedule in time. spans: by rank, in order, without overlap; what lies between is the bubble."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """From the start of the first step to the end of the last."""
        return max(spans[-1].end for spans in self.spans if spans)

    @cached_property
    def busy(self) -> list[float]:
        """How long each rank works."""
        return [sum(span.end - span.start for span in spans) for spans in self.spans]

    @property
    def idle(self) -> list[float]:
        """How long each rank does not work, of the makespan."""
        return [self.makespan - busy for busy in self.busy]

    @property
    def standstill(self) -> list[float]:
        """How long each rank stands still between its first step and its last.

        What remains where steps follow each other without a barrier; the zero-bubble papers count this.
        """
        return [
            spans[-1].end - spans[0].start - busy if spans else 0.0
            for spans, busy in zip(self.spans, self.busy, strict=True)
        ]

    @property
    def bubble(self) -> float:
        """Idle over useful time, all ranks together: (p - 1) / m for 1F1B. It may exceed 1 (spec PP-3)."""
        return sum(self.idle) / sum(self.busy)

    @property
    def bubble_fraction(self) -> float:
        """Idle time over all time: (p - 1) / (m + p - 1) for 1F1B; 1 less the efficiency (spec PP-3)."""
        return sum(self.idle) / (len(self.spans) * self.makespan)

    def live(self, rank: int) -> list[tuple[float, Live]]:
        """When what is alive on a rank changes, and to what: at the start and the end of every step."""
        states = zip(self.spans[rank], live(self.schedule, rank), strict=True)
        return [moment for span, (during, after) in states for moment in ((span.start, during), (span.end, after))]

    def versions(self, rank: int) -> list[tuple[float, int]]:
        """How many versions of weights exist on a rank after each step, all its chunks together, and when that is."""
        chunks = [live_versions(self.schedule, Place(rank, chunk)) for chunk in range(self.schedule.chunks(rank))]
        return [(span.end, sum(counts)) for span, *counts in zip(self.spans[rank], *chunks, strict=True)]


def simulate(schedule: Schedule, duration: Duration, transfer: float = 0.0) -> Timeline:
    """Runs a schedule in time.

    duration: of a step on a rank, as stage_times gives it, or measured. transfer: from the end of a step until a rank that
    needs its result has it; messages do not hold each other up. Raises ValueError for a schedule that cannot run.
    """
    spans = times(schedule, duration, lambda result, to: transfer)
    return Timeline(
        schedule,
        tuple(
            tuple(Span(start, end, step) for (start, end), step in zip(done, order, strict=True))
            for done, order in zip(spans, schedule.orders, strict=True)
        ),
    )


def stage_times(
    schedule: Schedule,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    weight: float | Sequence[float] | None = None,
    recompute: float | Sequence[float] = 0.0,
    update: float | Sequence[float] = 0.0,
    hidden: float = 0.0,
) -> Duration:
    """Durations of a schedule's steps from the times of its stages: one for all, or one for each stage of the model.

    backward: of a whole B, of which `weight` (by default half) is W's and the rest I's. recompute: comes on top of B and I.
    update: of U. hidden: which share of the shorter of two that overlap costs nothing; F&B = F + B - hidden min(F, B).
    Raises ValueError for times that are not one per stage, or below 0.
    """
    stages = schedule.stages
    f, b = _by_stage("forward", forward, stages), _by_stage("backward", backward, stages)
    again, u = _by_stage("recompute", recompute, stages), _by_stage("update", update, stages)
    w = [half / 2 for half in b] if weight is None else _by_stage("weight", weight, stages)
    i = [whole - part for whole, part in zip(b, w, strict=True)]
    if min(i) < 0:
        raise ValueError(
            f"weight is a part of backward, but longer in stage {i.index(min(i))}; at most backward would do"
        )
    if not 0 <= hidden <= 1:
        raise ValueError(f"hidden = {hidden} is no share; 0 to 1 would do")
    by_kind = {"F": f, "B": _sum(b, again), "I": _sum(i, again), "W": w, "U": u}

    def single(rank: int, x: Instruction) -> float:
        return by_kind[x.kind][schedule.stage_of(rank, x.chunk)]

    def duration(rank: int, step: Step) -> float:
        if not isinstance(step, Overlap):
            return single(rank, step)
        there, back = single(rank, step.forward), single(rank, step.backward)
        return there + back - hidden * min(there, back)

    return duration


def _by_stage(name: str, value: float | Sequence[float], stages: int) -> list[float]:
    values = [float(value)] * stages if isinstance(value, int | float | Real) else list(value)
    if len(values) != stages:
        raise ValueError(f"{name} has {len(values)} times, the schedule {stages} stages; one time or {stages} would do")
    if not all(0 <= time < inf for time in values):
        raise ValueError(f"{name} = {', '.join(map(str, values))} is no time; 0 or more would do")
    return values


def _sum(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x + y for x, y in zip(a, b, strict=True)]
