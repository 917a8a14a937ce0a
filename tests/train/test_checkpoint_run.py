"""Checkpoints as a person meets them: `shoal train` that saves, is killed, goes on elsewhere; `shoal convert`."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shoal.cli.main import main
from shoal.train.checkpoint.folder import CHECKPOINTS, check, path_of, steps
from shoal.train.metrics import MetricsWriter


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": f"document {n} " * (n % 7 + 1)}) for n in range(300)))
    return folder


def words(corpus, out, *more, steps=6):
    """A small run in float64, as one types it."""
    where = ["--data.path", corpus, "--data.cache", corpus / "cache", "--out", out, "--machine.threads", 1]
    sizes = ["--steps", steps, "--data.sequence", 32, "--train.batch", 8, "--train.sample", 0]
    return [str(word) for word in ("train", "--model", "tiny", "--dtype", "float64", *where, *sizes, *more)]


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def same_metrics(out, other):
    lines, others = metrics(out), metrics(other)
    assert [line["step"] for line in lines] == [line["step"] for line in others], "no gap and no repeat"
    for name in ("loss", "grad_norm", "learning_rate", "tokens", "skipped"):
        np.testing.assert_allclose([line[name] for line in lines], [line[name] for line in others], rtol=1e-10)
    assert lines[-1]["eval_loss"] == pytest.approx(others[-1]["eval_loss"], rel=1e-10)


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A run of six steps in one process that nothing interrupted, with its last two checkpoints."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert main(words(corpus, out, "--train.save_every", 2)) == 0
    return out


def test_a_killed_run_goes_on_under_another_layout_as_if_nothing_had_been(corpus, finished, tmp_path):
    """Killed with all its ranks after a few steps, in the middle of whatever it does; then its metrics are torn, too."""
    out, endless = (
        tmp_path / "run",
        ["--layout", "dp=2,zero=1", "--train.save_every", 2, "--train.learning_rate", "1e-3"],
    )
    command = [sys.executable, "-m", "shoal", *words(corpus, out, *endless, "--train.warmup", 20, steps=100_000)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 200
    while not steps(out / CHECKPOINTS):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end_of(out)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99')
    reached = steps(out / CHECKPOINTS)[-1]
    whole = tmp_path / "whole"
    constant = ["--train.schedule", "constant", "--train.warmup", 20, "--train.save_every", 1]
    assert main(words(corpus, whole, *constant, steps=reached + 3)) == 0
    more = [*constant, "--train.resume", "auto", "--layout", "tp=2,sp", "--json"]
    done = subprocess.run([sys.executable, "-m", "shoal", *words(corpus, out, *more, steps=reached + 3)],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    same_metrics(out, whole)
    document = json.loads(done.stdout)
    assert all(row["predicted_bytes"] == row["measured_bytes"] for row in document["transfers"])
    assert document["first_loss"] == pytest.approx(metrics(whole)[0]["loss"], rel=1e-12)
    assert document["tokens"] == sum(line["tokens"] for line in metrics(whole))


def end_of(out):
    """Returns when no killed process has the run's folder open any more."""
    import fcntl

    handle = os.open(out, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.close(handle)


def test_a_finished_run_that_goes_on_has_nothing_to_do(corpus, finished, tmp_path, capsys):
    before = (finished / "metrics.jsonl").read_text(), (finished / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert main(words(corpus, finished, "--train.save_every", 2, "--train.resume", "auto", "--json")) == 0
    assert ((finished / "metrics.jsonl").read_text(), (finished / "model.safetensors").read_bytes()) == before
    document = json.loads(capsys.readouterr().out)
    assert document["loss"] == metrics(finished)[-1]["loss"] and document["eval_loss"] is not None
    assert steps(finished / CHECKPOINTS) == [4, 6]


def test_a_run_of_its_own_starts_from_the_checkpoint_of_another(corpus, finished, tmp_path):
    out = tmp_path / "own"
    step_four = path_of(finished / CHECKPOINTS, 4)
    assert main(words(corpus, out, "--train.resume", step_four)) == 0
    assert [line["step"] for line in metrics(out)] == [4, 5]
    assert metrics(out)[-1]["loss"] == metrics(finished)[-1]["loss"]
    assert not (out / CHECKPOINTS).exists() and steps(finished / CHECKPOINTS) == [4, 6]


def test_a_fresh_run_in_the_same_folder_keeps_what_was_there(corpus, tmp_path):
    out = tmp_path / "run"
    assert main(words(corpus, out, "--train.save_every", 2, steps=2)) == 0
    assert main(words(corpus, out, "--train.save_every", 1, "--seed", 3, steps=1)) == 0
    assert steps(out / CHECKPOINTS) == [1] and steps(out / "checkpoints.1") == [2]
    assert len((out / "metrics.1.jsonl").read_text().splitlines()) == 2 and len(metrics(out)) == 1


def test_a_damaged_checkpoint_is_passed_over_with_a_line(corpus, finished, tmp_path, capsys):
    import shutil

    out = tmp_path / "run"
    shutil.copytree(finished, out)
    (path_of(out / CHECKPOINTS, 6) / "rank-00000.safetensors").unlink()
    assert main(words(corpus, out, "--train.save_every", 2, "--train.resume", "auto")) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "passed over" in line]
    assert len(lines) == 1 and lines[0].endswith("rank-00000.safetensors is missing")
    same_metrics(out, finished)
    check(path_of(out / CHECKPOINTS, 6))


@pytest.mark.parametrize(
    ("more", "field", "said"),
    [
        (["--model.hidden", 32], "model.hidden", "model.hidden = 32 is not that of the checkpoint"),
        (["--seed", 5], "train.seed", "train.seed = 5 is not that of the checkpoint"),
        (["--train.resume", "no/such/folder"], "train.resume", "train.resume = no/such/folder holds no checkpoint"),
        (["--train.resume", ""], "train.resume", "train.resume is empty; never would do"),
        (["--train.keep", 0], "train.keep", "train.keep = 0 must be at least 1"),
        (["--data.path", "{other}"], "data.path", "gives other tokens"),
        (["--train.weights", "nothing"], "train.weights", "train.weights = nothing is no file"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line_with_the_field(corpus, finished, tmp_path, capsys, more, field, said):
    (tmp_path / "other.txt").write_text("something else " * 500)
    more = [str(word).format(other=tmp_path / "other.txt") for word in more]
    given = words(corpus, tmp_path / "run", "--train.resume", finished, "--json", *more)
    assert main(given) == 2
    output = capsys.readouterr()
    error = json.loads(output.out)["error"]
    assert error["field"] == field and said in error["message"]
    assert "Traceback" not in output.err and output.err.splitlines()[-1] == f"shoal: {error['message']}"


@pytest.mark.parametrize("layout", ["dp=1", "tp=2,pp=2"])
def test_convert_writes_what_the_run_wrote_and_a_run_starts_from_it(corpus, finished, tmp_path, capsys, layout):
    out, weights = finished, tmp_path / "weights.safetensors"
    if layout != "dp=1":
        out = tmp_path / "run"
        command = words(corpus, out, "--layout", layout, "--train.save_every", 2, steps=2)
        assert subprocess.run([sys.executable, "-m", "shoal", *command], capture_output=True).returncode == 0
    assert main(["convert", str(out), "--out", str(weights)]) == 0
    assert "bytes" in capsys.readouterr().out
    written, expected = load_file(weights), load_file(out / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(np.array_equal(written[name], expected[name]) for name in expected)
    if layout == "dp=1":
        on = tmp_path / "on"
        assert main(words(corpus, on, "--train.weights", weights, "--train.learning_rate", 0, steps=1)) == 0
        kept = load_file(on / "model.safetensors")
        assert all(np.array_equal(kept[name], expected[name]) for name in expected)


def test_convert_says_in_one_line_what_is_wrong(finished, tmp_path, capsys):
    import shutil

    shutil.copytree(finished, tmp_path / "run")
    (path_of(tmp_path / "run" / CHECKPOINTS, 6) / "index.json").write_text("{")
    (tmp_path / "kept.safetensors").write_text("as it was")
    for given, said in (
        ([tmp_path / "nowhere"], "holds no checkpoint; a step-... folder would do"),
        ([tmp_path / "run"], "is not whole: its index.json is torn; "),
        ([finished, "--dtype", "float31"], "--dtype = float31 is not one of"),
        ([finished, "--out", tmp_path / "no" / "such" / "folder.safetensors"], "cannot be written (No such file"),
    ):
        kept = [] if "--out" in given else ["--out", tmp_path / "kept.safetensors"]
        assert main(["convert", *map(str, [*given, *kept])]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1
    assert (tmp_path / "kept.safetensors").read_text() == "as it was"
    assert (
        main(["convert", str(finished), "--dtype", "float32", "--out", str(tmp_path / "kept.safetensors"), "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["step"] == 6
    assert {values.dtype for values in load_file(tmp_path / "kept.safetensors").values()} == {np.dtype("float32")}


def test_weights_of_another_model_are_refused(corpus, finished, tmp_path, capsys):
    weights = load_file(finished / "model.safetensors")
    name = next(iter(weights))
    for changed, said in (
        ({**weights, name: weights[name][:1]}, f"has a {name} of (1, "),
        ({other: values for other, values in weights.items() if other != name}, f"has no {name}"),
    ):
        save_file(changed, tmp_path / "changed.safetensors")
        assert main(words(corpus, tmp_path / "run", "--train.weights", tmp_path / "changed.safetensors", steps=1)) == 2
        assert said in capsys.readouterr().err


def test_metrics_go_on_without_gap_or_repeat(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(5):
            writer.write({"step": step, "loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    with MetricsWriter(tmp_path, goes_on_from=3) as writer:
        writer.write({"step": 3, "loss": 30.0})
        writer.sync()
    assert [(line["step"], line["loss"]) for line in metrics(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
