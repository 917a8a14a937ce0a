"""Ranks started on this machine: results by rank, and one clear word when a rank dies."""

import os
import signal
import socket
import time

import pytest

from shoal.launch.local import RankDied, check_port, run_local
from shoal.spec.errors import RequestError


def test_results_come_by_rank():
    assert run_local(os.getenv, 2, "RANK") == ["0", "1"]


def test_a_rank_killed_by_a_signal_ends_the_others_within_seconds():
    started = time.monotonic()
    with pytest.raises(RankDied, match="SIGKILL"):
        run_local(_die, 2, signal.SIGKILL)
    assert time.monotonic() - started < 20, "the surviving rank sleeps for a minute: it was not ended"


def test_the_traceback_shown_is_that_of_the_rank_at_fault():
    with pytest.raises(RankDied, match=r"(?s)rank 1 died.*ZeroDivisionError"):
        run_local(_divide, 2)


def test_a_refused_request_stays_one():
    with pytest.raises(RequestError, match=r"^data.path = nowhere does not exist"):
        run_local(_refuse, 2)


def test_a_port_in_use_is_refused_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(RequestError, match=r"machine.port = .* is in use"):
            check_port(taken.getsockname()[1])


def _die(number):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), number)
    time.sleep(60)


def _divide():
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("by zero")
    time.sleep(60)


def _refuse():
    raise RequestError("data.path", "data.path = nowhere does not exist; a folder would do")
