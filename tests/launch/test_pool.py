"""The pool: results by rank, and what happens when a rank fails, dies, hangs or is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shoal.launch.local import RankDied
from shoal.launch.pool import Pool
from shoal.spec.errors import RequestError


@dataclass(frozen=True)
class Told:
    """A type of this file, to travel both ways."""

    rank: int
    values: dict


def greet(rank, world, told):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    values = {"sum": total, "half": torch.ones(2, dtype=torch.bfloat16), "told": told.values, "nested": [(total,)]}
    return Told(rank, values)


def process(rank, world):
    return os.getpid(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], dist.is_initialized()


def fail(rank, world, how):
    """Rank 1 fails; the others wait for it in a collective."""
    if rank == 1:
        if how == "raise":
            raise LookupError("the reason")
        if how == "request":
            raise RequestError("layout.tp", "layout.tp = 5 is too many; 4 would do")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        if how == "unpicklable":
            return lambda: None
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def differ(rank, world):
    """Ranks call different collectives."""
    x = torch.ones(1000)
    if rank == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 0)
        dist.all_gather_single(torch.empty(2000), x)


def test_results_come_by_rank_with_tensors_as_arrays(pool):
    results = pool.run(greet, 3, Told(9, {"a": torch.ones(1)}))
    assert [type(result) for result in results] == [Told] * 3
    assert [result.rank for result in results] == [0, 1, 2]
    for result in results:
        assert isinstance(result.values["sum"], np.ndarray) and result.values["sum"] == [3.0]
        assert result.values["half"].dtype == np.float32 and list(result.values["half"]) == [1, 1]
        assert result.values["told"]["a"] == [1.0]
        assert result.values["nested"][0][0] == [3.0]


def test_ranks_are_kept_warm_with_one_thread_each(pool):
    first, second = pool.run(process, 4), pool.run(process, 4)
    assert first == second
    assert len({pid for pid, *_ in first}) == 4
    assert [rest for _, *rest in first] == [[1, "1", True]] * 4


@pytest.mark.parametrize(
    "how, said",
    [("raise", "LookupError: the reason"), ("kill", "SIGKILL"), ("exit", "code 3"), ("unpicklable", "pickle")],
)
def test_a_failing_rank_is_named_and_the_others_do_not_hold_it_up(pool, how, said):
    before = {pid for pid, *_ in pool.run(process, 8)}
    started = time.monotonic()
    with pytest.raises(RankDied, match=said) as caught:
        pool.run(fail, 4, how)
    assert time.monotonic() - started < 5
    assert caught.value.rank == 1
    if how == "raise":
        assert "in fail" in str(caught.value), "the rank's own traceback"
    after = {pid for pid, *_ in pool.run(process, 8)}
    assert len(after) == 8 and len(before & after) == 4, "the four of the failed run were replaced"


def test_a_request_error_stays_one(pool):
    with pytest.raises(RequestError) as caught:
        pool.run(fail, 2, "request")
    assert type(caught.value) is RequestError
    assert (caught.value.field, str(caught.value)) == ("layout.tp", "layout.tp = 5 is too many; 4 would do")


def test_a_hanging_rank_is_reported_with_where_everybody_is(pool):
    with pytest.raises(TimeoutError) as caught:
        pool.run(fail, 3, "hang", timeout=1)
    said = str(caught.value)
    assert "within 1 s from rank 0, 1, 2 of 3" in said
    first, second = said.split("rank 1 is at")
    assert "all_reduce" in first and "all_reduce" not in second.split("rank 2 is at")[0]
    assert "in fail" in first and "in fail" in second
    assert len(pool.run(process, 8)) == 8


def test_different_collectives_are_found_out_in_time(pool):
    started = time.monotonic()
    with pytest.raises((TimeoutError, RankDied)):
        pool.run(differ, 2, timeout=3)
    assert time.monotonic() - started < 8
    assert len(pool.run(process, 2)) == 2


def test_arguments_that_cannot_travel_leave_the_pool_as_it_was(pool):
    before = pool.run(process, 2)
    with pytest.raises(Exception, match="pickle"):
        pool.run(greet, 2, lambda: None)
    assert pool.run(process, 2) == before


def test_too_many_ranks_are_refused(pool):
    with pytest.raises(AssertionError, match=f"{pool.size + 1} ranks were asked of a pool of {pool.size}"):
        pool.run(process, pool.size + 1)


SCRIPT = """
    import sys, time
    import torch, torch.distributed as dist
    from shoal.launch.pool import Pool

    def wait(rank, world):
        import os
        open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
        if rank == 0:
            time.sleep(60)
        dist.all_reduce(torch.ones(1))

    if __name__ == "__main__":
        with Pool(3) as pool:
            pool.run(wait, 2)
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_whoever_started_it(tmp_path, end):
    script, ranks = tmp_path / "script.py", tmp_path / "ranks"
    script.write_text(textwrap.dedent(SCRIPT))
    ranks.mkdir()
    parent = subprocess.Popen([sys.executable, script, ranks], stderr=subprocess.PIPE, start_new_session=True)
    wait_until(lambda: len(list(ranks.iterdir())) == 2, 30)
    os.killpg(parent.pid, end) if end == signal.SIGINT else parent.send_signal(end)  # Ctrl-C reaches the whole group
    said = parent.communicate(timeout=10)[1]  # comes when nobody is left to write
    assert said.count(b"Traceback") == (end == signal.SIGINT), said  # the parent's alone
    wait_until(lambda: not session(parent.pid), 5)


def session(leader):
    """Processes of a session that are still there: ranks, fork server, resource tracker."""
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            alive.append(int(stat.parent.name))
    return alive


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_closing_ends_every_rank():
    with Pool(2) as own:
        pids = [pid for pid, *_ in own.run(process, 2)]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(AssertionError, match="closed"):
        own.run(process, 2)
