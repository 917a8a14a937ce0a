"""What is told when a run of several ranks breaks: who was lost and where everybody was (comm/whereabouts.py). No torch.

With the local launcher the process that started the ranks tells. Ranks that others started, torchrun or srun, tell
themselves: the first that loses a peer or waits too long for one, in the name of all.
"""

import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from shoal.comm.faults import explain
from shoal.comm.whereabouts import TOLD, Record, read
from shoal.launch.worker import LOST_PEER

# How gloo and the store say that a rank has waited too long, and that one which has is gone.
TOO_LATE = ("Timed out waiting", "Timed out after", "timeout after", "Socket Timeout", "timeout caused pair closure")
GRACE = 2.0  # seconds that a rank which only lost its peer waits, so that the peer's own end is seen first
LOOKS = 0.5  # seconds from one look at the ranks' processes to the next
FRAMES = 5  # innermost lines of Python that are shown
STOPPED = "was stopped (SIGSTOP)"


class RankDied(RuntimeError):
    """A rank ended before its work, or did not come: `rank`, and what it said (its traceback, or how it ended).

    report: where everybody was; its first line says what happened and stands before what the rank said.
    """

    def __init__(self, rank: int, said: str, report: str = ""):
        self.rank = rank
        head, _, lines = (report or f"rank {rank} died; the other ranks were ended").partition("\n")
        super().__init__("\n".join(filter(None, [head, said, lines])))


def kind_of(error: BaseException) -> str:
    """Why a rank ends, as Nowhere.ended has it."""
    if not isinstance(error, Exception):
        return "stopped"
    return kind_of_words(words_of(error)) if isinstance(error, RuntimeError) else "failed"


def kind_of_words(said: str) -> str:
    """The same from the last line of an error's traceback."""
    if any(words in said for words in LOST_PEER):
        return "lost"
    return "late" if any(words in said for words in TOO_LATE) else "failed"


def words_of(error: BaseException) -> str:
    """An error in one line, as the last one of its traceback."""
    return " ".join(traceback.format_exception_only(error)[-1].split())


class Watch:
    """Looks after ranks on this machine, by their records in `folder`: when one is gone, stopped ones are ended too.

    A stopped process does not hear that it should leave, and whoever ends the ranks would wait for it. stopped: those
    that were found so.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.stopped: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOKS):
            states = {record.rank: (record.process, state_of(record.process)) for record in read(self.folder)}
            if all(state != "gone" for _, state in states.values()):
                continue
            for rank, (process, state) in states.items():
                if state == "stopped":
                    self.stopped.append(rank)
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)


def state_of(process: int) -> str:
    """Of a process on this machine: "gone", "stopped" or "runs"."""
    try:
        letter = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(letter, "runs")


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves the lines of Python it is in when it is told to end."""
    return folder / f"rank{rank}.stack"


def stacks_in(folder: Path) -> dict[int, list[str]]:
    """The innermost lines of each rank that left some, innermost first."""
    stacks = {}
    for file in folder.glob("rank*.stack"):
        frames = [line.strip() for line in file.read_text().splitlines() if line.startswith("  File")]
        stacks[int(file.stem[4:])] = frames[:FRAMES]
    return stacks


@contextmanager
def telling(folder: Path, rank: int) -> Iterator[None]:
    """Around what a rank does that somebody else started: an error because of another rank becomes one report.

    The first rank to come to it raises RankDied, the others leave with exit code 1 and say nothing.
    """
    try:
        yield
    except BaseException as error:
        kind = kind_of(error)
        if kind == "failed" or not folder.exists():
            raise
        if kind == "stopped" and not dead_by_records(read(folder), rank):
            raise  # else who started the ranks ends us because of that rank, of which we have not heard ourselves yet
        with suppress(BaseException):  # whoever started the ranks ends them as soon as one is gone: tell at once
            time.sleep(GRACE)
        records = read(folder)
        dead = dead_by_records(records, rank)
        if kind == "lost" and not dead:
            raise SystemExit(1) from None  # the others were told to end, and so were we
        try:
            (folder / TOLD).touch(exist_ok=False)
        except OSError:
            raise SystemExit(1) from None
        raise RankDied(min(dead, default=rank), "", explain(records, dead)) from None


def dead_by_records(records: Sequence[Record], own: int) -> dict[int, str]:
    """Ranks that were lost, and how, as far as their records and processes on this machine show.

    Of another machine's ranks only the records are seen: one that runs on in a call which a rank has lost a peer in,
    and has not said that it lost one itself, is that peer.
    """
    dead, here = {}, socket.gethostname()
    for record in records:
        if record.ended == "failed":
            dead[record.rank] = f"failed ({record.said})"
        elif not record.ended and record.host == here and record.rank != own:
            state = state_of(record.process)
            if state != "runs":
                dead[record.rank] = STOPPED if state == "stopped" else "died"
    if not dead:
        silent = {record.rank for record in records if not record.ended and record.host != here}
        lost = [record.waits for record in records if record.ended == "lost" and record.waits is not None]
        peers = {rank for call in lost for rank in (call.ranks if call.peer is None else (call.peer,))}
        dead = dict.fromkeys(sorted(silent & peers), "was lost")
    return dead
