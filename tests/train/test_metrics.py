"""metrics.jsonl holds whole lines of valid JSON, and an earlier run's are kept."""

import importlib
import json
import sys

import pytest

from shoal.spec.errors import RequestError
from shoal.train.metrics import MetricsWriter, check_log


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


def test_a_folder_is_made_and_one_that_cannot_be_is_named(tmp_path):
    with MetricsWriter(tmp_path / "a" / "b") as writer:
        writer.write(line(0))
    with pytest.raises(RequestError, match=r"^train\.out = .*metrics\.jsonl cannot be written \(File exists\)"):
        MetricsWriter(tmp_path / "a" / "b" / "metrics.jsonl")


def test_a_missing_logger_names_the_extra_that_brings_it(tmp_path, monkeypatch):
    """Also where a folder of its name lies about, as W&B leaves in the place where it was used."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RequestError, match=r"^train\.log = wandb needs .*pip install 'shoal\[log\]'"):
        check_log(["tensorboard", "wandb"])
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "wandb").mkdir()
    with pytest.raises(RequestError, match=r"^train\.log = wandb needs"):
        check_log(["wandb"])


WANDB = """
class Error(Exception): pass
said = []
def init(dir, name):
    if name == "bad": raise Error("no API key\\nconfigured")
    return Run()
class Run:
    def log(self, numbers, step): said.append((step, numbers))
    def finish(self): said.append("finished")
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """A module that notes what W&B would be told: W&B itself wants an account."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield importlib.import_module("wandb")
    del sys.modules["wandb"]


def test_wandb_gets_every_finite_number(tmp_path, wandb):
    with MetricsWriter(tmp_path / "run", ["wandb"]) as writer:
        writer.write({"step": 3, "loss": 1.5, "grad_norm": float("inf"), "skipped": 1})
    assert wandb.said == [(3, {"loss": 1.5, "skipped": 1}), "finished"]


def test_a_logger_that_does_not_start_is_named_and_leaves_the_metrics_alone(tmp_path, wandb):
    with MetricsWriter(tmp_path / "bad") as writer:
        writer.write(line(0))
    with pytest.raises(RequestError, match=r"^train\.log = wandb does not start \(no API key.*offline would do$"):
        MetricsWriter(tmp_path / "bad", ["wandb"])
    assert [file.name for file in (tmp_path / "bad").iterdir()] == ["metrics.jsonl"]
    assert json.loads((tmp_path / "bad" / "metrics.jsonl").read_text()) == line(0)
