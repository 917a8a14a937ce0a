"""Runs in which a rank is killed, stopped, fails or hangs: they end in the stated time and say who was where.

A rank breaks itself (tests/broken/sitecustomize.py) at a moment that is counted in the model's own calls, so that what
the report says is held against where it really was; the last test kills from outside what it sees to be waiting.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shoal.comm.whereabouts import read

TIMEOUT = 8  # machine.timeout_s of the runs in which a rank hangs
STATED = 10  # seconds after a rank's end, or after the time-out, in which a run ends
BROKEN = Path(__file__).parents[1] / "broken"


@dataclass
class Case:
    """A run in which `rank` does `how` in `step` at `where`, and what the first line of its report must be."""

    layout: str
    rank: int
    step: int
    where: str
    how: str
    says: str
    calls: int = 2  # forwards of blocks on that rank in one step: those of layers, times micro-batches
    call: int = 0
    words: list = field(default_factory=list)
    launcher: str = "shoal"


HANGS = {
    "stuck in Python": Case(
        "dp=2,tp=2", 1, 1, "forward", "spin", call=1,
        says=r"rank 1 did not come: it was in step 1, forward, layer 1, micro-batch 0, in no call to others; "
        r"rank 0 waited for it in all_reduce \d+ over tp, rank 3 waited for it in all_reduce \d+ over dp",
    ),
    "stopped in backward": Case(
        "pp=2,micro_batches=2,schedule=gpipe", 1, 1, "backward", "stop", call=1,
        says=r"rank 1 was stopped \(SIGSTOP\) in step 1, backward, micro-batch 1; "
        r"rank 0 waited for it in receive 4 from rank 1 over pp",
    ),
    "stopped in a save": Case(
        "dp=2", 1, 1, "save", "stop", words=["--train.save_every", "1", "--train.async_save", "false"],
        says=r"rank 1 was stopped \(SIGSTOP\) in step 1, save, writing its part of the checkpoint after 2 steps; "
        r"rank 0 waited for it in save \d+ over world",
    ),
    "asleep under srun": Case(
        "dp=2", 0, 1, "forward", "sleep", words=["--json"], launcher="srun",
        says=r"rank 0 did not come: it was in step 1, forward, layer 0, micro-batch 0, in no call to others; "
        r"rank 1 waited for it in all_reduce \d+ over dp",
    ),
}  # fmt: skip

ENDS = {
    "killed in forward": Case(
        "dp=2,tp=2", 2, 2, "forward", "kill", call=1,
        says=r"rank 2 was killed by SIGKILL in step 2, forward, layer 1, micro-batch 0; .*waited for it in all_reduce",
    ),
    "killed in backward": Case(
        "pp=2,micro_batches=2,schedule=gpipe", 0, 1, "backward", "kill", call=0,
        says=r"rank 0 was killed by SIGKILL in step 1, backward, micro-batch 0; ",
    ),
    "failed in backward": Case(
        "dp=3", 1, 1, "backward", "fail", words=["--json"],
        says=r"rank 1 failed \(ZeroDivisionError: by design\) in step 1, backward, micro-batch 0; "
        r"ranks 0 and 2 waited for it in all_reduce \d+ over dp",
    ),
    "killed in a save": Case(
        "dp=2", 1, 1, "save", "kill", words=["--train.save_every", "1"],
        says=r"rank 1 was killed by SIGKILL in step \d, .*writing its part of the checkpoint after 2 steps.*; "
        r"rank 0 waited for it in",
    ),
    "killed under torchrun": Case(
        "dp=2", 1, 1, "forward", "kill", launcher="torchrun",
        says=r"rank 1 died in step 1, forward, layer 0, micro-batch 0; rank 0 waited for it in all_reduce \d+ over dp",
    ),
}  # fmt: skip


class Run:
    """`shoal train` at work on a case."""

    def __init__(self, folder, corpus, case, timeout_s):
        self.case, self.folder = case, folder
        self.out, self.mark = folder / "run", folder / "mark"
        folder.mkdir()
        fault = {name: getattr(case, name) for name in ("rank", "step", "where", "how", "calls", "call")}
        words = [
            "train", "--model", "tiny", "--data.path", corpus, "--data.cache", corpus.parent / "cache", "--out", self.out,
            "--layout", case.layout, "--data.sequence", 16, "--train.batch", 12, "--train.sample", 0, "--steps", 50,
            "--machine.threads", 1, "--machine.timeout_s", timeout_s, *case.words,
        ]  # fmt: skip
        environment = os.environ | {
            "BREAK": json.dumps(fault | {"mark": str(self.mark)}),
            "PYTHONPATH": str(BROKEN),
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m"]
        if case.launcher == "torchrun":
            command += ["torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]
        variables = [{}]
        if case.launcher == "srun":
            with socket.socket() as free:
                free.bind(("", 0))
                words += ["--machine.port", free.getsockname()[1]]
            variables = [
                {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": "2",
                 "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "7"}
                for rank in range(2)
            ]  # fmt: skip
        self.processes = [
            subprocess.Popen(
                [*command, "shoal", *map(str, words)], env=environment | more, text=True, start_new_session=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for more in variables
        ]  # fmt: skip

    def end(self):
        """Waits for the command, or under srun for the ranks that did not break; what they wrote, and the moment."""
        waited = [p for rank, p in enumerate(self.processes) if self.case.launcher != "srun" or rank != self.case.rank]
        told = [process.communicate(timeout=120) for process in waited]
        self.after = time.time() - float(self.mark.read_text()) if self.mark.exists() else None
        self.codes = [process.returncode for process in waited]
        self.output, self.errors = ("".join(texts) for texts in zip(*told, strict=True))
        return self

    def report(self):
        """The lines that say who was where, from the first on."""
        lines = self.errors.splitlines()
        first = next(place for place, line in enumerate(lines) if line.startswith("shoal: "))
        return [lines[first].removeprefix("shoal: "), *lines[first + 1 :]]

    def kill(self):
        """Whatever is left of it."""
        for process in self.processes:
            for left in session(process.pid):
                os.kill(left, signal.SIGKILL)


def session(leader):
    """The processes of a command's session, those apart that have ended."""
    listed = subprocess.run(["ps", "-o", "pid=,stat=", "-s", str(leader)], capture_output=True, text=True).stdout
    return [int(pid) for pid, state in map(str.split, listed.splitlines()) if state[0] != "Z"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults") / "text"
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": f"document {n} " * (n % 7 + 1)}) for n in range(300)))
    subprocess.run([sys.executable, "-m", "shoal", "train", "--model", "tiny", "--data.path", folder, "--steps", "1",
                    "--data.cache", folder.parent / "cache", "--out", folder.parent / "first"], check=True,
                   capture_output=True)  # fmt: skip
    return folder


def all_at_once(cases, corpus, folder, timeout_s):
    """The cases' runs, side by side, since they mostly wait."""
    runs = {}
    try:
        for name, case in cases.items():
            runs[name] = Run(folder / name.replace(" ", "_"), corpus, case, timeout_s)
        with ThreadPoolExecutor(len(runs)) as pool:
            list(pool.map(Run.end, runs.values()))
        yield runs
    finally:
        for run in runs.values():
            run.kill()


@pytest.fixture(scope="module")
def hanging(corpus, tmp_path_factory):
    yield from all_at_once(HANGS, corpus, tmp_path_factory.mktemp("hanging"), TIMEOUT)


@pytest.fixture(scope="module")
def ending(corpus, tmp_path_factory):
    yield from all_at_once(ENDS, corpus, tmp_path_factory.mktemp("ending"), 60)


@pytest.mark.parametrize("name", HANGS)
def test_a_rank_that_hangs_is_found_when_the_others_have_waited_long_enough(hanging, name):
    run = hanging[name]
    assert run.codes == [1], run.errors
    assert re.match(run.case.says, run.report()[0]), run.errors
    assert TIMEOUT <= run.after <= TIMEOUT + STATED


@pytest.mark.parametrize("name", ENDS)
def test_a_rank_that_ends_ends_the_run(ending, name):
    run = ending[name]
    assert run.codes == [1], run.errors
    assert re.match(run.case.says, run.report()[0]), run.errors
    assert run.after <= STATED


@pytest.mark.parametrize("name", [name for name, case in (HANGS | ENDS).items() if case.launcher == "shoal"])
def test_every_rank_has_its_line_and_no_process_is_left(hanging, ending, name):
    run = (hanging | ending)[name]
    world = {"dp=2,tp=2": 4, "dp=3": 3}.get(run.case.layout, 2)
    assert [line[:8] for line in run.report() if line.startswith("  rank")] == [f"  rank {n}" for n in range(world)]
    for _ in range(50):  # helpers end on their pipes
        if not session(run.processes[0].pid):
            break
        time.sleep(0.1)
    assert not session(run.processes[0].pid)
    assert not list(run.folder.glob("shoal*")), "what the ranks wrote is gone"


def test_the_lines_of_python_that_a_rank_is_stuck_in_are_shown(hanging):
    lines = hanging["stuck in Python"].report()
    assert re.search(r'File ".*sitecustomize.py", line \d+ in spin', lines[lines.index(next(
        line for line in lines if line.startswith("  rank 1"))) + 1])  # fmt: skip


def test_a_rank_that_fails_by_itself_shows_its_traceback_below_the_first_line(ending):
    lines = ending["failed in backward"].report()
    assert lines[1].startswith("Traceback") and "ZeroDivisionError: by design" in lines
    assert lines.index("ZeroDivisionError: by design") < next(
        n for n, x in enumerate(lines) if x.startswith("  rank 0:")
    )


@pytest.mark.parametrize("name", ["failed in backward", "asleep under srun"])
def test_json_tells_it_in_one_document(hanging, ending, name):
    run = (hanging | ending)[name]
    document = json.loads(run.output)
    assert document["ok"] is False and re.match(run.case.says, document["error"]["message"])


def test_one_of_several_ranks_tells_it_and_the_rest_is_quiet(ending):
    errors = ending["killed under torchrun"].errors
    assert len(re.findall("^shoal: ", errors, re.M)) == 1
    assert "Traceback" not in errors.split("torch/distributed/run.py")[0].rpartition("shoal: ")[0], (
        "the ranks show none"
    )


def test_the_report_says_in_which_collective_the_rank_was_that_was_killed_in_it(corpus, tmp_path):
    """Rank 1 is killed from outside, while it is seen to wait for rank 0, which sleeps in its forward."""
    run = Run(tmp_path / "case", corpus, Case("dp=2", 0, 2, "forward", "sleep", says=""), 60)
    try:
        deadline = time.monotonic() + 60
        seen = before = None
        while seen is None or seen != before:
            assert time.monotonic() < deadline, "rank 1 was not seen to wait"
            time.sleep(0.3)
            before = seen
            records = [record for folder in run.folder.glob("shoal-ranks-*") for record in read(folder)]
            seen = next((record for record in records if record.rank == 1 and record.waits and run.mark.exists()), None)
        assert seen.process in session(run.processes[0].pid)
        os.kill(seen.process, signal.SIGKILL)
        killed = time.time()
        run.end()
        assert time.time() - killed <= STATED
    finally:
        run.kill()
    call = f"all_reduce {seen.waits.number} over dp"
    assert (seen.step, seen.phase) == (2, "backward") and seen.waits.op == "all_reduce" and run.codes == [1]
    assert run.report()[0].startswith(
        f"rank 1 was killed by SIGKILL in step 2, backward, micro-batch 0, in {call}; no rank waited for it yet"
    ), run.errors
    assert re.match(r"  rank 0: in step 2, forward, layer 0, micro-batch 0; in no call to others", run.report()[1])


def test_a_run_under_torchrun_that_a_person_ends_accuses_nobody(corpus, tmp_path):
    run = Run(tmp_path / "case", corpus, Case("dp=2", 0, 10**6, "forward", "kill", says="", launcher="torchrun"), 60)
    try:
        deadline = time.monotonic() + 60
        while not (run.out / "metrics.jsonl").exists() or not (run.out / "metrics.jsonl").read_text():
            assert time.monotonic() < deadline, "no step was done"
            time.sleep(0.1)
        run.processes[0].send_signal(signal.SIGTERM)
        run.end()
    finally:
        run.kill()
    assert run.codes != [0] and "metrics.jsonl" in run.errors
    assert not re.search("died|failed|waited for", run.errors.split("Traceback")[0]), run.errors
