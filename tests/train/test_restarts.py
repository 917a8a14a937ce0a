"""torchrun restarts ranks of which one was killed, or starts fewer: the run goes on as if nothing had been."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from safetensors.numpy import load_file

from shoal.cli.main import main
from shoal.cli.options import Parser, add_job_options, read_job
from shoal.launch.attempt import of_this_attempt
from shoal.launch.cluster import Place
from shoal.spec.errors import RequestError

JOB = """
[model]
preset = "tiny"

[data]
path = "{corpus}"
cache = "{corpus}/cache"
sequence = 32

[machine]
threads = 1

[train]
out = "{out}"
steps = 12
batch = 8
dtype = "float64"
sample = 0
save_every = 2
check_every = 3
resume = "auto"
"""
MORTAL = Path(__file__).parents[1] / "killed_rank.py"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": f"document {n} " * (n % 7 + 1)}) for n in range(300)))
    return folder


def job_file(corpus, out):
    out.parent.mkdir(exist_ok=True)
    path = out.with_suffix(".toml")
    path.write_text(JOB.format(corpus=corpus, out=out))
    return str(path)


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    """The same run on two ranks that nothing interrupts."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(["train", job_file(corpus, out), "--layout", "dp=2"]) == 0
    return out


def torchrun(ranks, restarts, kills, *words):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
               "--max-restarts", str(restarts), str(MORTAL), kills, *map(str, words)]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def began(done):
    """Where each attempt of a torchrun began."""
    return [int(step) for step in re.findall(r"attempt \d+ began at step (\d+)", done.stderr)]


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def same_run(out, other, tolerance):
    lines, others = metrics(out), metrics(other)
    assert [line["step"] for line in lines] == list(range(12)), "no gap and no repeat"
    for name in ("loss", "grad_norm", "learning_rate", "tokens", "skipped"):
        np.testing.assert_allclose([line[name] for line in lines], [line[name] for line in others], rtol=tolerance)
    assert lines[-1]["eval_loss"] == pytest.approx(others[-1]["eval_loss"], rel=tolerance)
    weights, whole = load_file(out / "model.safetensors"), load_file(other / "model.safetensors")
    assert weights.keys() == whole.keys()
    for name, weight in whole.items():
        assert np.linalg.norm(weights[name] - weight) <= tolerance * np.linalg.norm(weight), name


def test_killed_ranks_are_started_again_and_go_on_from_the_last_checkpoint(corpus, undisturbed, tmp_path):
    """Rank 0 before there is any checkpoint, then rank 1 in the middle; nothing of it is left in the numbers, to the bit."""
    out = tmp_path / "run"
    done = torchrun(2, 2, "0:1,1:7", "train", job_file(corpus, out), "--layout", "dp=2")
    assert done.returncode == 0, done.stderr
    first, second, third = began(done)
    assert (first, second) == (0, 0) and third in (4, 6), "the last save may be lost with the rank that took part in it"
    same_run(out, undisturbed, tolerance=0)
    assert "check all_gather over dp" in done.stdout and "DIFFERS" not in done.stdout
    assert not list(out.glob(".*")) and not list((out / "checkpoints").glob(".*"))
    assert [len(file.read_text().splitlines()) for file in out.glob("metrics.*.jsonl")] == [1], "of the first attempt"


def test_fewer_ranks_go_on_with_what_more_began(corpus, undisturbed, tmp_path):
    """Four ranks, no more restarts, then two: the data axis takes what is there, and the shards are cut anew."""
    out = tmp_path / "run"
    words = ["train", job_file(corpus, out), "--layout", "zero=1"]
    broken = torchrun(4, 0, "3:6", *words)
    assert broken.returncode != 0 and began(broken) == [0]
    done = torchrun(2, 0, "", *words)
    assert done.returncode == 0, done.stderr
    assert began(done)[0] in (4, 6)
    same_run(out, undisturbed, tolerance=1e-12)
    assert "dp = 2" in (out / "job.toml").read_text()


@pytest.fixture
def store():
    """A store as torchrun's agent keeps it over restarts, and how a rank reaches it."""
    kept = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield lambda: dist.TCPStore("localhost", kept.port, is_master=False)


def place(rank, world):
    return Place(rank, world, rank, world, "env://")


def test_ranks_of_an_attempt_share_nothing_with_those_before(store):
    """A whole attempt; one of which a rank died before the others came; one whose rank 0 died; one of fewer ranks."""

    def come(world, ranks, seconds):
        with ThreadPoolExecutor(world) as threads:
            return [threads.submit(of_this_attempt, store(), place(rank, world), seconds) for rank in ranks]

    def met(world, ranks):
        mine = [one.result() for one in come(world, ranks, 20)]
        for number, one in zip(ranks, mine, strict=True):
            assert not one.check(["address/0", f"address/{number}"]), "nothing of earlier ones"
        for number, one in zip(ranks, mine, strict=True):
            one.set(f"address/{number}", str(number))
        return [sorted(one.multi_get([f"address/{number}" for number in ranks])) for one in mine]

    everyone = [[b"0", b"1", b"2"]] * 3
    assert met(3, [2, 1, 0]) == everyone
    for ranks in ([1], [0, 2], [1, 2]):
        for alone in come(3, ranks, 0.3):
            with pytest.raises(RequestError, match=r"met not all of the others within machine.timeout_s = 0.3 s"):
                alone.result()
    assert met(3, [1, 2, 0]) == everyone
    assert met(2, [1, 0]) == [[b"0", b"1"]] * 2


def job_of(words, ranks):
    parser = Parser()
    add_job_options(parser)
    return read_job(parser.parse_args(words), {"model": {"preset": "tiny"}}, ranks)


def test_the_data_axis_takes_the_ranks_that_are_there(tmp_path):
    (tmp_path / "job.toml").write_text('layout = "tp=2,zero=1"')
    for words, ranks, dp in (
        ([], None, 1),
        ([], 4, 4),
        (["--layout", "tp=2,pp=2"], 8, 2),
        (["--layout", "dp=0,cp=2"], 8, 4),
        (["--layout", "dp=none,tp=2x2"], 8, 2),
        (["--layout.dp", "0", "--layout.hsdp", "2", "--layout.zero", "3"], 4, 4),
        (["--layout", "ep=2"], 4, 4),
        ([str(tmp_path / "job.toml")], 6, 3),
        (["--layout", "dp=2"], 4, 2),  # who says how many is taken at his word
        (["--layout", "tp=2"], 3, 1),  # and what does not fit stays as it is, to be refused
    ):
        assert job_of(words, ranks).layout.dp == dp, words
    with pytest.raises(RequestError, match="does not divide dp x cp"):
        job_of(["--layout", "ep=4"], 6)
