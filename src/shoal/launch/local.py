"""Starts a layout's ranks on this machine through torch's elastic launcher and tells a person what went wrong.

The launcher watches the ranks: one that dies ends the others within seconds. Ranks come from a fork server that has
torch loaded already, so that eight of them start in well under a second.
"""

import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shoal.launch.worker import LOST_PEER
from shoal.spec.errors import RequestError

GRACE = 2.0  # seconds that a rank which only lost its peer waits, so that the launcher sees the peer's own end first


class RankDied(RuntimeError):
    """A rank ended before its work: `rank`, and what it said (its traceback, or the signal that ended it)."""

    def __init__(self, rank: int, said: str):
        self.rank = rank
        super().__init__(f"rank {rank} died; the other ranks were ended\n{said}")


class Stopped(BaseException):
    """Somebody ended the command with a signal (Ctrl-C, SIGTERM): `number` is the signal's. No error, so no Exception."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP raise Stopped in the main thread, so that files are closed and ranks ended."""

    def stop(number: int, frame: object) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_port(port: int) -> None:
    """Raises RequestError when `port` is taken on this machine; 0 stands for any free one."""
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            raise RequestError(
                "machine.port", f"machine.port = {port} is in use on this machine; 0 takes any free port"
            ) from None


def run_local(function: Callable[..., Any], ranks: int, *arguments: Any, port: int = 0) -> list[Any]:
    """Calls function(*arguments) in `ranks` new processes that carry torchrun's variables; the results by rank.

    function and arguments must be picklable. Raises RankDied with the first dead rank's traceback, RequestError when
    that is what a rank raised, Stopped when a signal ended the run. No process is left behind.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    check_port(port)
    _silence("torch.distributed.elastic", "torch.multiprocessing")
    multiprocessing.set_forkserver_preload(["shoal.launch.preload"])
    with tempfile.TemporaryDirectory(prefix="shoal-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=f"shoal-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint=f"localhost:{port}",
            local_addr="localhost",
            max_restarts=0,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            shutdown_timeout=5,
        )
        try:
            results = elastic_launch(config, _quiet_on_signals)(function, *arguments)
        except ChildFailedError as failed:
            raise _explain(failed) from None
        except SignalException as caught:
            raise Stopped(int(caught.sigval)) from None
    return [results[rank] for rank in range(ranks)]


def _silence(*packages: str) -> None:
    """The launcher's own log lines would stand between a person and the one line that says what happened."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(packages):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _quiet_on_signals(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs in each rank: Ctrl-C reaches the whole terminal group, and one message, the parent's, is enough."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return function(*arguments)
    except RuntimeError as error:
        if _lost_its_peer(str(error)):
            time.sleep(GRACE)
        raise


def _explain(failed: Any) -> Exception:
    """The exception a person should see for the launcher's ChildFailedError."""
    failures = {rank: _message(failure) for rank, failure in failed.failures.items()}
    # Ranks whose peer vanished fail too, within the same second; the one that fails by itself is the cause.
    causes = [rank for rank, said in failures.items() if not _lost_its_peer(said)] or list(failures)
    rank = causes[0]
    head, _, line = failures[rank].splitlines()[-1].partition(": ")
    if head.endswith("RequestError"):
        return RequestError(line.split(" ")[0], line)
    return RankDied(rank, failures[rank])


def _message(failure: Any) -> str:
    if isinstance(failure.message, dict):
        return failure.message["extraInfo"]["py_callstack"].strip()
    return str(failure.message)


def _lost_its_peer(said: str) -> bool:
    last = said.splitlines()[-1] if said else ""
    return any(words in last for words in LOST_PEER)
