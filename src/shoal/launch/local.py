"""Starts a layout's ranks on this machine through torch's elastic launcher and tells a person what went wrong.

The launcher watches the ranks: one that dies ends the others within seconds. Ranks come from a fork server that has
torch loaded already, so that eight of them start in well under a second.
"""

import faulthandler
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from shoal.comm.faults import explain
from shoal.comm.whereabouts import read
from shoal.launch.report import GRACE, STOPPED, RankDied, Watch, kind_of, kind_of_words, stack_file, stacks_in
from shoal.spec.errors import RequestError
from shoal.train.summary import NotFinite, ReplicasDiffer


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


def run_local(
    function: Callable[..., Any], ranks: int, *arguments: Any, port: int = 0, whereabouts: Path | None = None
) -> list[Any]:
    """Calls function(*arguments) in `ranks` new processes that carry torchrun's variables; the results by rank.

    function and arguments must be picklable. Raises RankDied with the first dead rank's traceback, RequestError when
    that is what a rank raised, Stopped when a signal ended the run. No process is left behind.

    whereabouts: a folder into which `function` has the ranks write where they are; RankDied then tells that too.
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
            with Watch(whereabouts) if whereabouts else nullcontext() as watch:
                results = elastic_launch(config, _quiet_on_signals)(whereabouts, function, *arguments)
        except ChildFailedError as failed:
            raise _explain(failed, whereabouts, watch.stopped if watch else []) from None
        except SignalException as caught:
            raise Stopped(int(caught.sigval)) from None
    return [results[rank] for rank in range(ranks)]


def _silence(*packages: str) -> None:
    """The launcher's own log lines would stand between a person and the one line that says what happened."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(packages):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _quiet_on_signals(whereabouts: Path | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs in each rank: Ctrl-C reaches the whole terminal group, and one message, the parent's, is enough."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with open(stack_file(whereabouts, int(os.environ["RANK"])) if whereabouts else os.devnull, "w") as stack:
        faulthandler.register(signal.SIGTERM, stack, all_threads=False, chain=True)  # whatever it does, it says where
        try:
            return function(*arguments)
        except RuntimeError as error:
            if kind_of(error) == "lost":
                time.sleep(GRACE)  # so that the launcher sees the peer's own end first
            raise
        finally:
            faulthandler.unregister(signal.SIGTERM)


def _explain(failed: Any, whereabouts: Path | None, stopped: list[int]) -> Exception:
    """The exception a person should see for the launcher's ChildFailedError. stopped: ranks that were found so."""
    failures = {rank: _message(failure) for rank, failure in failed.failures.items()}
    # Ranks whose peer vanished fail too, within the same second; the one that fails by itself is the cause.
    kinds = {rank: kind_of_words(_last_line(said)) for rank, said in failures.items()}
    causes = [rank for rank in failures if kinds[rank] != "lost"] or list(failures)
    rank = causes[0]
    head, _, line = _last_line(failures[rank]).partition(": ")
    if head.endswith("RequestError"):
        return RequestError(line.split(" ")[0], line)
    for ending in (NotFinite, ReplicasDiffer):
        if head.endswith(ending.__name__):
            return ending(line)  # every rank's, and none has died
    records = read(whereabouts) if whereabouts else []
    if whereabouts is None or not records:
        return RankDied(rank, failures[rank])
    dead = dict.fromkeys(stopped, STOPPED)
    dead |= {rank: _in_words(failed.failures[rank], failures[rank]) for rank in causes if kinds[rank] == "failed"}
    report = explain(records, dead, stacks=stacks_in(whereabouts))
    if rank in dead:
        return RankDied(rank, failures[rank] if failures[rank].startswith("Traceback") else "", report)
    return RankDied(rank, "" if dead else _last_line(failures[rank]), report)  # an error that everybody has who waits


def _in_words(failure: Any, said: str) -> str:
    """How a rank ended by itself."""
    if said.startswith("Traceback"):
        return f"failed ({_last_line(said)})"
    code = failure.exitcode
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"


def _message(failure: Any) -> str:
    if isinstance(failure.message, dict):
        return failure.message["extraInfo"]["py_callstack"].strip()
    return str(failure.message)


def _last_line(said: str) -> str:
    return said.splitlines()[-1] if said else ""
