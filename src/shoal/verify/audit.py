"""Holds measured transfers against predicted ones: equal per rank, byte for byte and call for call, or named. No torch."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from shoal.axes.pipeline.live import peaks
from shoal.axes.pipeline.schedules.instruction import Schedule
from shoal.transfer import Transfer
from shoal.verify.compare import Executed

MEMORY_TOLERANCE = 0.01  # of what is planned

Key = tuple[str, str, str]  # phase, axis, op


@dataclass(frozen=True)
class Row:
    """One phase, axis and primitive. Bytes and calls are lists by rank; the totals over the ranks go into tables."""

    phase: str
    axis: str
    op: str
    predicted_sent: list[int]
    measured_sent: list[int]
    predicted_received: list[int]
    measured_received: list[int]
    predicted_calls: list[int]
    measured_calls: list[int]

    @property
    def ok(self) -> bool:
        return (self.predicted_sent, self.predicted_received, self.predicted_calls) == (
            self.measured_sent,
            self.measured_received,
            self.measured_calls,
        )

    def as_dict(self) -> dict:
        """For JSON: `predicted_bytes`, `measured_bytes` and calls are sums over the ranks of what they sent; lists go by rank."""
        return {
            "phase": self.phase,
            "axis": self.axis,
            "op": self.op,
            "predicted_bytes": sum(self.predicted_sent),
            "measured_bytes": sum(self.measured_sent),
            "predicted_calls": sum(self.predicted_calls),
            "measured_calls": sum(self.measured_calls),
            "ok": self.ok,
            "by_rank": {
                "predicted_sent": self.predicted_sent,
                "measured_sent": self.measured_sent,
                "predicted_received": self.predicted_received,
                "measured_received": self.measured_received,
            },
        }

    def difference(self) -> str:
        """One line: what differs, on which rank."""
        columns = {
            "bytes sent": (self.predicted_sent, self.measured_sent),
            "bytes received": (self.predicted_received, self.measured_received),
            "calls": (self.predicted_calls, self.measured_calls),
        }
        for what, (predicted, measured) in columns.items():
            for rank, (planned, seen) in enumerate(zip(predicted, measured, strict=True)):
                if planned != seen:
                    return f"{self.phase} {self.op} over {self.axis}: rank {rank} planned {planned:,} {what}, measured {seen:,}"
        return ""


@dataclass(frozen=True)
class MemoryRow:
    """The most bytes that a rank holds of one category of plan/memory.py."""

    rank: int
    category: str
    predicted: int
    measured: int

    @property
    def ok(self) -> bool:
        return abs(self.predicted - self.measured) <= MEMORY_TOLERANCE * self.predicted

    def as_dict(self) -> dict:
        """For JSON."""
        return {
            "rank": self.rank,
            "category": self.category,
            "predicted_bytes": self.predicted,
            "measured_bytes": self.measured,
        }

    def difference(self) -> str:
        """One line: what differs, on which rank."""
        return f"memory, {self.category}: rank {self.rank} planned {self.predicted:,} bytes, measured {self.measured:,}"


@dataclass(frozen=True)
class ScheduleRow:
    """One step of a pipeline on a rank: instructions in order, and the most forwards held at once."""

    rank: int
    planned: list[str]
    executed: list[str]
    planned_alive: int
    measured_alive: int

    @property
    def ok(self) -> bool:
        return self.planned == self.executed and self.planned_alive == self.measured_alive

    def as_dict(self) -> dict:
        """For JSON, instructions as text."""
        return {
            "rank": self.rank,
            "planned": " ".join(self.planned),
            "executed": " ".join(self.executed),
            "planned_alive": self.planned_alive,
            "measured_alive": self.measured_alive,
        }

    def difference(self) -> str:
        """One line: the first instruction that differs."""
        for number, (planned, seen) in enumerate(zip_longest(self.planned, self.executed, fillvalue="nothing")):
            if planned != seen:
                return f"schedule: rank {self.rank} planned {planned} as instruction {number}, executed {seen}"
        return f"schedule: rank {self.rank} planned {self.planned_alive} forwards alive, held {self.measured_alive}"


def audit_schedule(schedule: Schedule, place: int, rank: int, executed: Executed) -> ScheduleRow:
    """The row of `rank`, which is number `place` of its pipeline."""
    planned = [str(x) for x in schedule.instructions(place)]
    return ScheduleRow(rank, planned, executed.instructions, peaks(schedule)[place], executed.alive)


def audit_memory(rank: int, predicted: Mapping[str, int], measured: Mapping[str, int]) -> list[MemoryRow]:
    """One MemoryRow for each category that is predicted for the rank."""
    return [MemoryRow(rank, category, size, measured.get(category, 0)) for category, size in predicted.items()]


def audit(predicted: Sequence[Iterable[Transfer]], measured: Sequence[Iterable[Transfer]]) -> list[Row]:
    """One Row per phase, axis and primitive that either side knows; both sides hold one iterable per rank."""
    planned, seen = _by_key(predicted), _by_key(measured)
    rows = []
    for key in sorted(planned.keys() | seen.keys()):
        sides = []
        for side in (planned, seen):
            cells = side.get(key, [(0, 0, 0)] * len(predicted))
            sides.append([list(column) for column in zip(*cells, strict=True)])
        (sent, received, calls), (sent_seen, received_seen, calls_seen) = sides
        rows.append(Row(*key, sent, sent_seen, received, received_seen, calls, calls_seen))
    return rows


def _by_key(transfers: Sequence[Iterable[Transfer]]) -> dict[Key, list[tuple[int, int, int]]]:
    """Per key, for each rank: (sent, received, calls)."""
    table: dict[Key, list[tuple[int, int, int]]] = defaultdict(lambda: [(0, 0, 0)] * len(transfers))
    for rank, of_rank in enumerate(transfers):
        for transfer in of_rank:
            cells = table[transfer.phase, transfer.axis, transfer.op]
            sent, received, calls = cells[rank]
            cells[rank] = (sent + transfer.sent, received + transfer.received, calls + transfer.calls)
    return dict(table)
