"""metrics.jsonl holds whole lines of valid JSON, and an earlier run's are kept."""

import io
import json
from dataclasses import replace

import pytest

from shoal.spec.errors import RequestError
from shoal.spec.job import Job
from shoal.spec.machine import Machine
from shoal.train.display import Display, peak_memory
from shoal.train.metrics import MetricsWriter


def line(step, **more):
    return {"step": step, "loss": 2.5, "tokens_per_s": 1234.5, "utilisation": None, "skipped": 0, **more}


def test_lines_are_there_as_soon_as_written_and_nan_is_null(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(line(0, grad_norm=float("nan")))
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == line(0, grad_norm=None)


def test_an_earlier_run_is_kept(tmp_path):
    for run in range(3):
        with MetricsWriter(tmp_path) as writer:
            writer.write(line(run))
    files = {file.name: json.loads(file.read_text())["step"] for file in tmp_path.iterdir()}
    assert files == {"metrics.1.jsonl": 0, "metrics.2.jsonl": 1, "metrics.jsonl": 2}


def test_an_inactive_writer_writes_nothing(tmp_path):
    with MetricsWriter(tmp_path, active=False) as writer:
        writer.write(line(0))
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_gets_every_number(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, ["tensorboard"]) as writer:
        for step in range(3):
            writer.write(line(step, loss=float(step)))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("loss")] == [0, 1, 2]


def test_a_missing_logger_names_the_extra_that_brings_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(RequestError, match=r"train\.log = wandb needs .*pip install 'shoal\[log\]'"):
        MetricsWriter(tmp_path, ["wandb"])


def test_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    job = Job()
    with Display(job, stream) as display:
        for step in range(job.train.steps):
            display.step(line(step))
        display.step(line(job.train.steps - 1, eval_loss=3.0, skipped=2))
    lines = stream.getvalue().splitlines()
    assert 15 <= len(lines) <= 30 and not any("\x1b" in text or "\r" in text for text in lines)
    assert lines[0].startswith("step 1/200  loss 2.500  1,234 tokens/s  utilisation unknown")
    assert "held out 3.000  2 skipped" in lines[-1]


def test_utilisation_is_told_against_a_named_peak():
    stream = io.StringIO()
    job = replace(Job(), machine=Machine(name="h100"))
    with Display(job, stream) as display:
        display.step(line(0, utilisation=0.234))
    assert "23.4% of h100's 67 TFLOP/s float32" in stream.getvalue()


def test_peak_memory_is_in_bytes():
    before = peak_memory("cpu")
    block = bytearray(200_000_000)
    block[::4096] = b"x" * len(block[::4096])
    assert before > 10_000_000 and peak_memory("cpu") - before > 100_000_000
