"""The ledger: what this rank really sent and received, by phase, axis, primitive, layer and micro-batch. No torch.

It is on the path of every collective, so a record is one look-up and three integer additions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, NamedTuple

from shoal.comm.whereabouts import NOWHERE, Nowhere
from shoal.transfer import Transfer

INHERIT: Literal["inherit"] = "inherit"  # None is a value here: it belongs to no layer, to no micro-batch


class Place(NamedTuple):
    """Where in a step the run is; what is recorded now belongs there."""

    phase: str
    layer: int | None
    micro_batch: int | None


class Ledger:
    """Sums of transfers, by place, axis and primitive.

    enabled: False makes every call a no-op. trace: also keep each single transfer, in order, in `events`. whereabouts: is
    told every place, enabled or not.
    One per process, and no thread-local state: autograd runs backward on threads of its own while the caller waits.
    """

    def __init__(self, enabled: bool = True, trace: bool = False, whereabouts: Nowhere = NOWHERE):
        self.enabled, self.whereabouts = enabled, whereabouts
        self.events: list[Transfer] | None = [] if trace else None
        self.place = Place("setup", None, None)
        self._books: dict[Place, dict[tuple[str, str], list[int]]] = {}
        self._book = self._open(self.place)

    @contextmanager
    def at(
        self,
        *,
        phase: str = INHERIT,
        layer: int | Literal["inherit"] | None = INHERIT,
        micro_batch: int | Literal["inherit"] | None = INHERIT,
    ) -> Iterator[None]:
        """What happens inside is recorded under this place; what is not given stays as it is. Nests."""
        before, book = self.place, self._book
        self.place = Place(
            before.phase if phase == INHERIT else phase,
            before.layer if layer == INHERIT else layer,
            before.micro_batch if micro_batch == INHERIT else micro_batch,
        )
        self._book = self._open(self.place)
        self.whereabouts.at(self.place)
        try:
            yield
            self.whereabouts.at(before)  # not after an error: a rank that fails is seen where it did
        finally:
            self.place, self._book = before, book

    @contextmanager
    def off(self) -> Iterator[None]:
        """What happens inside is not recorded."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def record(self, axis: str, op: str, sent: int, received: int) -> None:
        """Adds one call to the current place; sent and received in bytes."""
        if not self.enabled:
            return
        row = self._book.get((axis, op))
        if row is None:
            self._book[axis, op] = [sent, received, 1]
        else:
            row[0] += sent
            row[1] += received
            row[2] += 1
        if self.events is not None:
            phase, layer, micro_batch = self.place
            self.events.append(Transfer(phase, axis, op, sent, received, 1, layer, micro_batch))

    def transfers(self) -> list[Transfer]:
        """Everything recorded, one Transfer for each place, axis and primitive, in the order of their first calls."""
        return [
            Transfer(place.phase, axis, op, sent, received, calls, place.layer, place.micro_batch)
            for place, book in self._books.items()
            for (axis, op), (sent, received, calls) in book.items()
        ]

    def total(self, *, phase: str | None = None, axis: str | None = None, op: str | None = None) -> Transfer:
        """One Transfer that sums all that match; what is not given matches everything and is written "*"."""
        total = Transfer(phase or "*", axis or "*", op or "*", 0, 0, 0)
        for transfer in self.transfers():
            if phase in (None, transfer.phase) and axis in (None, transfer.axis) and op in (None, transfer.op):
                total = replace(
                    total,
                    sent=total.sent + transfer.sent,
                    received=total.received + transfer.received,
                    calls=total.calls + transfer.calls,
                )
        return total

    def clear(self) -> None:
        """Forgets everything recorded; the place stays."""
        for book in self._books.values():
            book.clear()
        if self.events is not None:
            self.events.clear()

    def _open(self, place: Place) -> dict[tuple[str, str], list[int]]:
        return self._books.setdefault(place, {})
