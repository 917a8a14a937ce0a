"""A pool of warm ranks on this machine: processes that have loaded torch and stay between runs.

Every run gets a fresh gloo process group. A rank that fails ends the run at once: the others, which may be waiting for
it in a collective, are killed, and new ones take their place. Ranks end with the pool, or with whoever made it.
"""

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shoal.launch.local import RankDied
from shoal.launch.parcel import pack, unpack
from shoal.launch.worker import Failure, Order, serve
from shoal.spec.errors import RequestError

GRACE = 2.0  # seconds in which a rank that only lost its peer waits for the peer's own failure to be told
DUMP = 0.3  # seconds that ranks have to write down where they are


@dataclass
class Worker:
    """A rank's process, our end of its pipe, and the file into which it writes where it is when asked."""

    process: ForkServerProcess
    pipe: Connection
    stack: Path

    def cause_of_death(self) -> str:
        """In words, how the process ended."""
        self.process.join()
        code = self.process.exitcode
        assert code is not None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"


class Pool:
    """`size` ranks that wait for work; a context manager.

    run(function, world, *arguments) calls function(rank, world, *arguments) on `world` of them.
    """

    def __init__(self, size: int):
        self.size = size
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["shoal.launch.preload"])
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-pool-")
        self._runs = 0
        self._workers = [self._start(index) for index in range(size)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def run(self, function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 300.0) -> list[Any]:
        """Results of function(rank, world, *arguments) by rank, tensors in them turned into NumPy arrays.

        function: of a module's top level, called inside an initialised gloo group of `world` ranks. It and the
        arguments are pickled; results too. timeout: seconds for the whole run.

        Raises RequestError when a rank raised one, RankDied with the rank's traceback (or the signal that killed it)
        for anything else, TimeoutError with where every unfinished rank was. Afterwards the pool is as new.
        """
        assert 1 <= world <= self.size, f"{world} ranks were asked of a pool of {self.size}"
        assert self._workers, "this pool is closed"
        self._runs += 1
        store = Path(self._folder.name, f"store-{self._runs}")
        parcel = pack((function, arguments))
        team = self._workers[:world]
        finished = False
        try:
            for rank, worker in enumerate(team):
                _tell(worker, Order(rank, world, str(store), timeout, parcel))
            results = self._collect(team, time.monotonic() + timeout, timeout)
            for worker in team:  # only now may they leave their group: nobody needs them any more
                _tell(worker, None)
            finished = True
        finally:
            if not finished:
                self._replace(world)
                store.unlink(missing_ok=True)  # else the last rank to leave the group does it
        return results

    def close(self) -> None:
        """Ends every rank; the pool cannot be used afterwards."""
        for worker in self._workers:
            worker.pipe.close()  # an idle rank sees this and leaves
        deadline = time.monotonic() + 2
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            worker.process.kill()
            worker.process.join()
        self._workers = []
        self._folder.cleanup()

    def _start(self, index: int) -> Worker:
        ours, theirs = self._context.Pipe()
        stack = Path(self._folder.name, f"stack-{index}")
        stack.touch()
        process = self._context.Process(target=serve, args=(theirs, str(stack)), name=f"rank {index}", daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours, stack)

    def _replace(self, count: int) -> None:
        """Kills the first `count` workers and starts others in their place."""
        for worker in self._workers[:count]:
            worker.process.kill()
        for index, worker in enumerate(self._workers[:count]):
            worker.process.join()
            worker.pipe.close()
            self._workers[index] = self._start(index)

    def _collect(self, team: list[Worker], deadline: float, timeout: float) -> list[Any]:
        """Every rank's result; raises as `run` does."""
        results: dict[int, Any] = {}
        lost: dict[int, Failure] = {}
        while len(results) < len(team):
            waiting = [rank for rank in range(len(team)) if rank not in results and rank not in lost]
            ready = wait(
                [team[rank].pipe for rank in waiting] + [team[rank].process.sentinel for rank in waiting],
                max(0.0, deadline - time.monotonic()),
            )
            for rank in waiting:
                worker = team[rank]
                if worker.pipe in ready or worker.process.sentinel in ready:
                    answer = _hear(worker)
                    if not isinstance(answer, Failure):
                        results[rank] = answer[0]
                    elif answer.lost_peer:
                        lost[rank] = answer
                        deadline = min(deadline, time.monotonic() + GRACE)
                    else:
                        _raise(rank, answer)
            if not ready or len(lost) + len(results) == len(team):
                if lost:
                    _raise(*next(iter(lost.items())))
                if not ready:
                    raise TimeoutError(_where_they_are(team, waiting, timeout))
        return [results[rank] for rank in range(len(team))]


def _tell(worker: Worker, message: Order | None) -> None:
    """Sends to a worker; one that is dead is found out by whoever listens for its answer."""
    with suppress(BrokenPipeError):
        worker.pipe.send(message)


def _hear(worker: Worker) -> tuple[Any] | Failure:
    """(result,) of a worker that has answered, or its Failure; a dead one's is how it died."""
    try:
        answer = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        return Failure(worker.cause_of_death())
    return answer if isinstance(answer, Failure) else (unpack(answer),)


def _raise(rank: int, failure: Failure) -> None:
    if failure.field is not None:
        raise RequestError(failure.field, failure.said)
    raise RankDied(rank, failure.said)


def _where_they_are(team: list[Worker], ranks: list[int], timeout: float) -> str:
    """One line, and for each of `ranks` the innermost frames of what it is doing."""
    for rank in ranks:
        pid = team[rank].process.pid
        assert pid is not None
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(DUMP)
    lines = [f"no answer within {timeout:g} s from rank {', '.join(map(str, ranks))} of {len(team)}"]
    for rank in ranks:
        frames = team[rank].stack.read_text().splitlines()[1:]
        own = [place for place, frame in enumerate(frames) if "in _carry_out" in frame]  # below it: how ranks start
        lines += [f"rank {rank} is at (innermost first):", *frames[: own[0] if own else None]]
    return "\n".join(lines)
