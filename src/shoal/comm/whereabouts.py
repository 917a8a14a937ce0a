"""Where every rank is, written down so that others can read it when the rank itself can no longer be asked. No torch.

Each rank keeps one small file mapped into memory: the step, phase, layer and micro-batch it is in, the call to others
that it waits in or waited in last, and how often it has called each of its groups. What is written is there for readers
at once and outlives the process, however that ends. A collective costs three writes of some bytes, and no system call.
"""

import mmap
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MARK = b"shoal-1"
NONE = -1  # no layer, micro-batch, peer, step
AT_THE_END = -2  # as step: after the last one
SAVE = "save"  # the call in which ranks wait until all have done their part of a checkpoint

# Times are seconds since 1970.
HEAD = struct.Struct("<8sIII64s")  # MARK, rank, ranks in the world, process, host
PLACE = struct.Struct("<dqqq16s")  # since, step, layer, micro-batch, phase
CALL = struct.Struct("<diiqi24sqq16s")  # since, whether it waits, row, number, peer's place in the group, op; its place
SAVING = struct.Struct("<qi")  # the step whose checkpoint is being saved, by another thread; whether this rank writes
END = struct.Struct("<d16s300s")  # when, kind, what was said
ROW = struct.Struct("<q24sI")  # collectives called, axis, ranks in the group; their numbers follow
CALLED = struct.Struct("<q")  # the first of a row
HEAD_AT, PLACE_AT, CALL_AT, SAVING_AT, END_AT, TABLE_AT = 0, 128, 256, 384, 512, 1024
ROWS = 64  # of the table of groups
TOLD = "told"  # a file that the one rank makes which tells of all

Spot = tuple[str, int | None, int | None]  # a ledger's Place: phase, layer, micro-batch


class Call:
    """One call to others. This one is silent: of a rank that writes nothing down."""

    def wait(self) -> None:
        """The rank stands still from here on until others have done their part."""

    def done(self) -> None:
        """It goes on. Not called after an error, so that the rank is seen where it failed."""


class Calls:
    """The calls of one group. Silent, as Call."""

    def begin(self, op: str, waits: bool = True, peer: int | None = None, spot: Spot | None = None) -> Call:
        """Notes a call that starts. waits: the rank waits in it at once, else from Call.wait on.

        peer: the place in the group of the one rank that a message goes to or comes from. spot: what the call belongs
        to; by default where the run is.
        """
        return SILENT_CALL


class Nowhere:
    """Writes nothing down: what a ledger has unless somebody asks for more."""

    def at(self, spot: Spot) -> None:
        """The rank is at this place of the ledger."""

    def step(self, step: int | None) -> None:
        """The rank begins this step; None: it has done the last one."""

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Inside, on whatever thread, the checkpoint after `step` steps is being saved."""
        yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, this rank does its own part of the save, for which the others wait."""
        yield

    def calls(self, axis: str, ranks: Sequence[int]) -> Calls:
        """Where the calls of a group are noted."""
        return SILENT

    def ended(self, kind: str, said: str = "") -> None:
        """How the rank ends: "done", "failed" by itself, "lost" its peer, "late": waited too long, "stopped" by
        a signal; and its error's words.
        """


SILENT_CALL, SILENT, NOWHERE = Call(), Calls(), Nowhere()


class Whereabouts(Nowhere):
    """Those of `rank` of `world`, in a folder that all ranks of the run share. Raises OSError when it takes no file."""

    def __init__(self, folder: Path, rank: int, world: int):
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".{_name(rank)}"
        self._row_size = ROW.size + 4 * world
        with open(unfinished, "wb+") as file:
            file.truncate(TABLE_AT + ROWS * self._row_size)  # sparse: what is not written takes no room
            self._map = mmap.mmap(file.fileno(), 0)
        HEAD.pack_into(self._map, HEAD_AT, MARK, rank, world, os.getpid(), socket.gethostname().encode())
        SAVING.pack_into(self._map, SAVING_AT, NONE, False)
        self._saving = NONE
        self._step, self._spot = NONE, _packed(("setup", None, None))
        self._calls: dict[tuple[str, tuple[int, ...]], NotedCalls] = {}
        self._write_place()
        unfinished.replace(folder / _name(rank))

    def at(self, spot: Spot) -> None:
        self._spot = _packed(spot)
        self._write_place()

    def step(self, step: int | None) -> None:
        self._step = AT_THE_END if step is None else step
        self._write_place()

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        self._saving = step
        SAVING.pack_into(self._map, SAVING_AT, step, False)
        yield
        SAVING.pack_into(self._map, SAVING_AT, NONE, False)

    @contextmanager
    def writing(self) -> Iterator[None]:
        SAVING.pack_into(self._map, SAVING_AT, self._saving, True)
        yield
        SAVING.pack_into(self._map, SAVING_AT, self._saving, False)

    def calls(self, axis: str, ranks: Sequence[int]) -> Calls:
        key = axis, tuple(ranks)
        if len(ranks) == 1:
            return SILENT
        if key not in self._calls:
            row = len(self._calls)
            assert row < ROWS, "a rank has fewer groups than this"
            at = TABLE_AT + row * self._row_size
            struct.pack_into(f"<{len(ranks)}I", self._map, at + ROW.size, *ranks)
            ROW.pack_into(self._map, at, 0, axis.encode(), len(ranks))
            self._calls[key] = NotedCalls(self, row, at)
        return self._calls[key]

    def ended(self, kind: str, said: str = "") -> None:
        END.pack_into(self._map, END_AT, time.time(), kind.encode(), said.encode())
        self._map.flush()  # for readers on other machines

    def write_called(self, at: int, number: int) -> None:
        """A group whose row lies at `at` is called for the time `number`."""
        CALLED.pack_into(self._map, at, number)

    def write_call(
        self, waits: bool, row: int, number: int, peer: int, op: bytes, spot: tuple[int, int, bytes] | None
    ) -> None:
        """The call that the rank waits in, or has just waited in."""
        CALL.pack_into(self._map, CALL_AT, time.time(), waits, row, number, peer, op, *(spot or self._spot))

    def _write_place(self) -> None:
        PLACE.pack_into(self._map, PLACE_AT, time.time(), self._step, *self._spot)


class NotedCalls(Calls):
    """The calls of the group in one row of a rank's table. Messages are counted by their peer and direction."""

    def __init__(self, whereabouts: Whereabouts, row: int, at: int):
        self.whereabouts, self.row, self._at = whereabouts, row, at
        self._called = 0
        self._messages: Counter[tuple[str, int]] = Counter()

    def begin(self, op: str, waits: bool = True, peer: int | None = None, spot: Spot | None = None) -> Call:
        if peer is None:
            self._called = number = self._called + 1
            self.whereabouts.write_called(self._at, number)
        else:
            self._messages[op, peer] += 1
            number = self._messages[op, peer]
        call = NotedCall(self, number, op, NONE if peer is None else peer, None if spot is None else _packed(spot))
        if waits:
            call.wait()
        return call


@dataclass(slots=True)
class NotedCall(Call):
    """A call that is written down while the rank waits in it."""

    calls: NotedCalls
    number: int
    op: str
    peer: int
    spot: tuple[int, int, bytes] | None

    def wait(self) -> None:
        self._write(True)

    def done(self) -> None:
        self._write(False)

    def _write(self, waits: bool) -> None:
        self.calls.whereabouts.write_call(waits, self.calls.row, self.number, self.peer, self.op.encode(), self.spot)


# ---- reading


@dataclass(frozen=True)
class LastCall:
    """A call that a rank waits in or waited in last. peer: the rank a message goes to or comes from; None in collectives.

    number: of this group's collectives, or of the messages to (from) that peer; from 1.
    """

    op: str
    number: int
    axis: str
    ranks: tuple[int, ...]
    peer: int | None = None
    waits: bool = True


@dataclass(frozen=True)
class Record:
    """What a rank has written down. since: when it came where it is, seconds since 1970. called: collectives, by group.

    step: None before the first and after the last, where at_the_end is set. saving: the steps after which the
    checkpoint is that is being saved; writing: its own part of that is under way. ended: as Nowhere.ended; "" while it
    runs.
    """

    rank: int
    world: int
    host: str = ""
    process: int = 0
    step: int | None = None
    at_the_end: bool = False
    phase: str = "setup"
    layer: int | None = None
    micro_batch: int | None = None
    since: float = 0.0
    call: LastCall | None = None
    called: tuple[tuple[str, tuple[int, ...], int], ...] = ()
    saving: int | None = None
    writing: bool = False
    ended: str = ""
    said: str = ""
    ended_at: float = 0.0

    @property
    def waits(self) -> LastCall | None:
        """The call that the rank stands still in, because of others: not its own part of a save."""
        call = self.call if self.call is not None and self.call.waits else None
        return None if call is not None and call.op == SAVE and self.writing else call

    def times(self, axis: str, ranks: tuple[int, ...]) -> int:
        """How often it has called a group."""
        return next((number for *group, number in self.called if tuple(group) == (axis, ranks)), 0)


def read(folder: Path) -> list[Record]:
    """The records that lie in `folder`, by rank; a file that is no record is passed over."""
    records = []
    for file in folder.glob("rank*.at"):
        with suppress(OSError, struct.error):
            records.append(_record(file.read_bytes()))
    return sorted((record for record in records if record is not None), key=lambda record: record.rank)


def clear(folder: Path) -> None:
    """Removes the records, and what says that somebody has told of them."""
    for file in (*folder.glob("rank*.at"), folder / TOLD):
        file.unlink(missing_ok=True)


def _name(rank: int) -> str:
    return f"rank{rank}.at"


def _record(content: bytes) -> Record | None:
    mark, rank, world, process, host = HEAD.unpack_from(content, HEAD_AT)
    if _text(mark) != MARK.decode():
        return None
    since, step, *spot = PLACE.unpack_from(content, PLACE_AT)
    call_since, waits, row, number, peer, op, *call_spot = CALL.unpack_from(content, CALL_AT)
    saving, writing = SAVING.unpack_from(content, SAVING_AT)
    ended_at, ended, said = END.unpack_from(content, END_AT)
    called = tuple(_rows(content, world))
    call = None
    if _text(op):
        axis, ranks, _ = called[row]
        call = LastCall(_text(op), number, axis, ranks, None if peer == NONE else ranks[peer], bool(waits))
    layer, micro_batch, phase = call_spot if waits else spot
    return Record(
        rank,
        world,
        _text(host),
        process,
        step=None if step < 0 else step,
        at_the_end=step == AT_THE_END,
        phase=_text(phase),
        layer=None if layer == NONE else layer,
        micro_batch=None if micro_batch == NONE else micro_batch,
        since=call_since if waits else max(since, call_since),
        call=call,
        called=called,
        saving=None if saving == NONE else saving,
        writing=bool(writing),
        ended=_text(ended),
        said=_text(said),
        ended_at=ended_at,
    )


def _rows(content: bytes, world: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
    for at in range(TABLE_AT, TABLE_AT + ROWS * (ROW.size + 4 * world), ROW.size + 4 * world):
        number, axis, size = ROW.unpack_from(content, at)
        if not size:
            return
        yield _text(axis), struct.unpack_from(f"<{size}I", content, at + ROW.size), number


def _packed(spot: Spot) -> tuple[int, int, bytes]:
    phase, layer, micro_batch = spot
    return NONE if layer is None else layer, NONE if micro_batch is None else micro_batch, phase.encode()


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")
