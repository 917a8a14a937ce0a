"""`shoal verify` passes what is right and names what is not."""

import json

import pytest

from reference import trial_without_sync
from shoal.axes.data import cost
from shoal.cli.main import main
from shoal.plan import traffic
from shoal.spec.build import job_from_tree
from shoal.spec.layout import Layout
from shoal.spec.presets import MODELS
from shoal.verify.verify import shrink, small_job, verify


def asked(layout):
    return small_job(job_from_tree({"model": {"preset": "tiny"}, "layout": layout}))


@pytest.mark.parametrize("layout", ["dp=2", "dp=4", "dp=3,micro_batches=2", "dp=8"])
def test_a_sound_layout_passes(pool, layout):
    verdict = verify(asked(layout), pool=pool)
    assert verdict.failures == []
    assert {error.value < 1e-10 for error in verdict.errors.values()} == {True}
    assert all(row.ok for row in verdict.rows) and {row.phase for row in verdict.rows} == {
        "forward",
        "backward",
        "optimizer",
    }


def test_a_dropped_all_reduce_is_named(pool):
    verdict = verify(asked("dp=2"), pool=pool, run=trial_without_sync)
    assert not verdict.ok
    assert any(line.startswith("grad: gradient of ") for line in verdict.failures)
    assert any("differs between rank 0 and rank 1" in line for line in verdict.failures)
    assert any("backward all_reduce over dp: rank 0 planned" in line for line in verdict.failures)


def test_a_wrong_cost_is_named(pool, monkeypatch):
    """A formula that forgets one of the scalars."""
    right = cost.loss_transfers
    monkeypatch.setattr(traffic.data, "loss_transfers", lambda *arguments: list(right(*arguments))[:-1])
    verdict = verify(asked("dp=2"), pool=pool)
    assert verdict.failures == ["optimizer all_reduce over dp: rank 0 planned 0 bytes sent, measured 24"]


def test_the_command_writes_its_contract_and_exits_0(capsys):
    assert main(["verify", "--layout", "dp=2", "--json"]) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert document["ok"] is True and document["layout"] == "dp=2" and document["world"] == 2
    assert set(document["max_rel_err"]) == {"loss", "grad", "weights", "grad_norm"}
    keys = {"phase", "axis", "op", "predicted_bytes", "measured_bytes", "predicted_calls", "measured_calls"}
    assert all(keys <= set(row) and row["predicted_bytes"] == row["measured_bytes"] for row in document["transfers"])
    assert "relative error" in output.err


def test_the_command_exits_1_and_names_what_differs(capsys, monkeypatch):
    monkeypatch.setattr(traffic.data, "gradient_transfers", lambda *_: iter(()))
    assert main(["verify", "--layout", "dp=2"]) == 1
    assert "differs: backward all_reduce over dp: rank 0 planned 0 bytes sent" in capsys.readouterr().out


@pytest.mark.parametrize("name", MODELS)
def test_every_preset_shrinks_to_a_model_of_its_kind(name):
    whole = job_from_tree({"model": {"preset": name}}).model
    small = shrink(whole, Layout())
    assert small.layers <= 2 and small.hidden <= 64
    kept = ("norm", "positions", "mlp", "qk_norm", "qkv_bias", "output_bias", "mlp_bias", "tied", "rope")
    assert all(getattr(small, field) == getattr(whole, field) for field in kept)
    assert (small.kv_heads < small.heads) == (whole.kv_heads < whole.heads)
    assert bool(small.window) == bool(whole.window)
