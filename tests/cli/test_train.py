"""`shoal train` as a person runs it: real processes, real files."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from shoal.cli.main import main
from shoal.spec.build import job_from_tree
from shoal.spec.toml import read_toml


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": f"document {n} " * (n % 7 + 1)}) for n in range(300)))
    return folder


def shoal(*words, timeout=120, **options):
    command = [sys.executable, "-m", "shoal", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


def train(corpus, out, *words, steps=4):
    return shoal(
        "train", "--model", "tiny", "--data.path", corpus, "--data.cache", out.parent / "cache", "--out", out,
        "--steps", steps, "--data.sequence", 32, "--train.batch", 8, "--train.sample", 0, *words,
    )  # fmt: skip


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_every_layout_writes_the_same_metrics_and_weights(tmp_path, corpus, packing):
    """Uneven documents, so uneven valid tokens per rank; float64, so equal to 1e-10."""
    runs = {}
    for number, layout in enumerate(["dp=1", "dp=2", "dp=4", "dp=2,micro_batches=2"]):
        out = tmp_path / f"run{number}"
        done = train(corpus, out, "--dtype", "float64", "--layout", layout, "--data.packing", packing)
        assert done.returncode == 0, done.stderr
        runs[layout] = metrics(out), load_file(out / "model.safetensors")
    lines, weights = runs["dp=1"]
    keys = {"step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_s", "peak_memory", "skipped"}
    assert [line["step"] for line in lines] == [0, 1, 2, 3] and all(keys <= line.keys() for line in lines)
    for other, other_weights in runs.values():
        for name in ("loss", "grad_norm", "tokens", "learning_rate"):
            np.testing.assert_allclose([line[name] for line in other], [line[name] for line in lines], rtol=1e-10)
        for name, weight in weights.items():
            assert np.linalg.norm(other_weights[name] - weight) <= 1e-10 * np.linalg.norm(weight), name
    assert abs(lines[-1]["eval_loss"] - other[-1]["eval_loss"]) < 1e-10


def test_json_is_one_document_on_stdout_and_all_else_is_on_stderr(tmp_path, corpus):
    done = train(corpus, tmp_path / "run", "--layout", "dp=2", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0 and document["ok"] and document["steps"] == 4
    assert all(row["predicted_bytes"] == row["measured_bytes"] for row in document["transfers"])
    assert "step 1/4" in done.stderr


def test_nothing_held_out_is_null_in_json(tmp_path, corpus):
    done = train(corpus, tmp_path / "run", "--data.eval_fraction", "0", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["eval_loss"] is None
    assert metrics(tmp_path / "run")[-1]["eval_loss"] is None


def test_the_run_folder_holds_the_whole_job(tmp_path, corpus):
    assert train(corpus, tmp_path / "run", "--train.learning_rate", "5e-4").returncode == 0
    job = job_from_tree(read_toml(tmp_path / "run" / "job.toml"))
    assert job.train.learning_rate == 5e-4 and job.model.name == "tiny"
    assert {file.name for file in (tmp_path / "run").iterdir()} == {"job.toml", "metrics.jsonl", "model.safetensors"}


def test_a_dumped_configuration_is_the_same_job(tmp_path):
    words = ["--model", "demo", "--layout", "dp=2", "--train.beta2", "0.9", "--model.window", "64"]
    dumped = shoal("train", *words, "--dump-config").stdout
    (tmp_path / "job.toml").write_text(dumped)
    assert shoal("train", tmp_path / "job.toml", "--dump-config").stdout == dumped
    assert "beta2 = 0.9" in dumped and "window = 64" in dumped


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_it_joins_ranks_that_others_started(tmp_path, corpus, launcher):
    words = ["train", "--model", "tiny", "--data.path", corpus, "--data.cache", tmp_path / "cache", "--steps", "2",
             "--data.sequence", "32", "--train.batch", "8", "--layout", "dp=2",
             "--out", tmp_path / "run", "--train.sample", "0"]  # fmt: skip
    if launcher == "torchrun":
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--standalone",
            "-m",
            "shoal",
        ]
        assert subprocess.run([*command, *map(str, words)], capture_output=True, timeout=120).returncode == 0
    else:
        with socket.socket() as free:
            free.bind(("", 0))
            words += ["--machine.port", str(free.getsockname()[1])]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "shoal", *map(str, words)],
                env=os.environ | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": "2",
                                  "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost",
                                  "SLURM_JOB_ID": str(os.getpid())},
                stdout=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]  # fmt: skip
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1]


def test_a_world_of_another_size_than_the_layout_is_refused(tmp_path, corpus):
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = shoal("train", "--layout", "dp=2", "--out", tmp_path / "run", env=environment)
    assert done.returncode == 2 and "needs 2 ranks, but 3 were started; --layout dp=3 would do" in done.stderr


def running(tmp_path, corpus, *words):
    """A long run that has done a few steps."""
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", "train", "--model", "tiny", "--data.path", corpus, "--data.cache", tmp_path / "c",
         "--out", out, "--steps", "100000", "--data.sequence", "32", "--train.batch", "8", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < 5:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)
    return process, out


def left_behind(process):
    """Processes of the ended command's session that are there a moment later still (helpers end on their pipes)."""
    for _ in range(50):
        listed = subprocess.run(
            ["ps", "-ww", "-o", "pid=,args=", "-s", str(process.pid)], capture_output=True, text=True
        ).stdout
        if not listed:
            break
        time.sleep(0.1)
    return listed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("layout", ["dp=1", "dp=2"])
@pytest.mark.parametrize("whom", ["the command", "the terminal's group"])
def test_a_signal_ends_it_cleanly(tmp_path, corpus, number, layout, whom):
    process, out = running(tmp_path, corpus, "--layout", layout)
    os.kill(process.pid, number) if whom == "the command" else os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert errors.count("\n") == 2 and f"stopped by {number.name}" in errors, errors
    assert "the steps done are in" in errors
    assert not left_behind(process)
    assert all(json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    assert not (out / "model.safetensors").exists() and not list(out.glob(".*"))


def test_json_tells_of_a_stopped_run_too(tmp_path, corpus):
    process, _ = running(tmp_path, corpus, "--layout", "dp=2", "--json")
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 143
    assert json.loads(output) == {"ok": False, "error": {"field": None, "message": "stopped by SIGTERM"}}


def test_a_second_run_into_a_folder_in_use_is_refused(tmp_path, corpus):
    process, out = running(tmp_path, corpus, "--layout", "dp=1")
    second = train(corpus, out)
    process.terminate()
    process.communicate(timeout=30)
    assert second.returncode == 2 and f"train.out = {out} is in use by another run; {out}-2 would do" in second.stderr
    assert not (out / "metrics.1.jsonl").exists()


@pytest.mark.parametrize("writes", ["weights", "metrics", "states"])
def test_a_full_disk_is_one_line(tmp_path, corpus, writes, monkeypatch, capsys):
    """The disk says that it is full at the first write of a kind, as /dev/full does."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(*arguments, **options):
        raise full

    words = ["--train.offload", "disk"] if writes == "states" else []
    if writes == "weights":
        monkeypatch.setattr("shoal.train.weights.save_file", refuse)
    elif writes == "metrics":
        monkeypatch.setattr("shoal.train.metrics.MetricsWriter.write", refuse)
    else:
        monkeypatch.setattr("os.posix_fallocate", refuse)
    out = tmp_path / "run"
    code = main(["train", "--model", "tiny", "--data.path", str(corpus), "--data.cache", str(tmp_path / "c"), "--out", str(out),
                 "--steps", "2", "--data.sequence", "32", "--train.batch", "8", *words])  # fmt: skip
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and "is on a disk with no space left" in error
    assert not (out / "model.safetensors").exists() and not list(out.glob(".*"))


def test_a_failing_sample_does_not_cost_the_weights(tmp_path, corpus):
    """A tokenizer that covers the corpus but not the sample's prompt."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = ["document", *map(str, range(300)), "</s>"]
    library = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}))
    library.pre_tokenizer = WhitespaceSplit()
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    done = train(corpus, tmp_path / "run", "--data.tokenizer", tmp_path / "tokenizer.json", "--model.vocab", "302",
                 "--train.sample", "5")  # fmt: skip
    assert done.returncode == 0 and (tmp_path / "run" / "model.safetensors").exists(), done.stderr


def test_a_run_whose_last_steps_were_skipped_is_no_success(tmp_path, corpus):
    done = train(
        corpus, tmp_path / "run", "--train.learning_rate", "1e200", "--train.warmup", "0", "--train.clip", "0", "--json"
    )
    document = json.loads(done.stdout)
    assert done.returncode == 1 and document["ok"] is False and document["skipped_at_end"] == 3


def test_a_stopped_tokenize_leaves_nothing(tmp_path):
    (tmp_path / "large.txt").write_text("some words and more of them\n" * 4_000_000)
    command = [sys.executable, "-m", "shoal", "tokenize", tmp_path / "large.txt", "--out", tmp_path / "a" / "x.tokens"]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not list((tmp_path / "a").glob(".x*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.terminate()
    assert process.wait(30) == 143 and not list((tmp_path / "a").iterdir())


def test_a_killed_rank_ends_the_run_with_its_number(tmp_path, corpus):
    process, _ = running(tmp_path, corpus, "--layout", "dp=2")
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,ppid=,args=", "-s", str(process.pid)], capture_output=True, text=True
    )
    forked = [line.split(maxsplit=2) for line in listed.stdout.splitlines() if "forkserver" in line]
    ranks = [int(number) for number, parent, _ in forked if int(parent) != process.pid]
    assert len(ranks) == 2
    started = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.match(r"shoal: rank [01] was killed by SIGKILL in step \d+", errors), errors
    assert time.monotonic() - started < 30
    assert not left_behind(process)


def test_a_run_that_only_makes_nan_stops_and_says_why(tmp_path, corpus):
    done = train(corpus, tmp_path / "run", "--layout", "dp=2", "--train.learning_rate", "1e200", "--train.clip", "0",
                 "--train.max_skipped", "3", "--train.warmup", "0", steps=50)  # fmt: skip
    assert done.returncode == 1 and "3 steps in a row" in done.stderr and "train.learning_rate" in done.stderr
    lines = metrics(tmp_path / "run")
    assert lines[-1]["skipped"] == 3 and len(lines) < 50
