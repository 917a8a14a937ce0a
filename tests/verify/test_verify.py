"""`shoal verify` passes what is right and names what is not."""

import json

import numpy as np
import pytest

from reference import trial_without_sync
from shoal.axes.data import cost
from shoal.cli.main import main
from shoal.plan import traffic
from shoal.spec.build import job_from_tree
from shoal.spec.errors import RequestError
from shoal.spec.layout import Layout, layout_tree
from shoal.spec.presets import MODELS
from shoal.verify.compare import Record, compare
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


@pytest.mark.parametrize(
    ("dtype", "layout", "fields"),
    [
        ("float32", "dp=2,tp=2,sp,zero=1", {}),
        ("float32", "pp=2,schedule=interleaved,micro_batches=4", {}),
        ("bfloat16", "dp=2,tp=2x2,zero=2", {"reduce_dtype": "float32"}),
        ("bfloat16", "dp=2,pp=2,zero=3,schedule=zb-h1", {"reduce_dtype": "float32"}),
        ("bfloat16", "cp=3", {}),
        ("bfloat16", "dp=2,ep=2", {}),
        ("bfloat16", "tp=2,sp,recompute=full", {}),
    ],
)
def test_in_other_types_a_layout_is_as_near_to_float64_as_one_process_is(pool, dtype, layout, fields):
    preset = "moe-tiny" if "ep=" in layout else "tiny"
    job = job_from_tree({"model": {"preset": preset}, "layout": layout, "train": {"dtype": dtype, **fields}})
    small = small_job(job, dtype)
    assert (small.train.dtype, small.train.reduce_dtype) == (dtype, fields.get("reduce_dtype", "same"))
    verdict = verify(small, pool=pool)
    assert verdict.failures == []
    assert verdict.errors["grad"].value > 1e-9, "it has computed in that type"
    assert all(limit < (0.25 if kind == "grad" else 0.02) for kind, limit in verdict.limits.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dropped_all_reduce_is_more_than_rounding(pool, dtype):
    verdict = verify(
        small_job(job_from_tree({"model": {"preset": "tiny"}, "layout": "dp=2"}), dtype),
        1,
        pool=pool,
        run=trial_without_sync,
    )
    assert any(line.startswith("grad: gradient of ") for line in verdict.failures)


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


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--layout", "tp=3", "--model.heads", "4"], "layout.tp = 3 does not cut the model's 4 heads"),
        (["--layout", "tp=8", "--model", "tiny"], "layout.tp = 8 does not cut the model's 4 heads"),
        (
            ["--layout", "tp=3x3", "--model.heads", "9", "--model.kv_heads", "9", "--model.head_size", "8"],
            "9 heads, 9 KV heads and hidden 64 evenly",
        ),
        (["--layout", "tp=2,sp", "--data.sequence", "33"], "data.sequence = 33 does not divide into the 2 parts"),
        (["--layout", "tp=2x2", "--train.batch", "3"], "train.batch = 3 gives micro-batches of 3 sequences"),
        (["--layout", "pp=4", "--model.layers", "3"], "layout.pp = 4 wants 4 layers, the model has 3"),
        (
            ["--layout", "pp=2,schedule=pipedream", "--dtype", "bfloat16"],
            "train.dtype = bfloat16 with layout.schedule = pipedream: updates between micro-batches are compared in",
        ),
        (["--layout", "dp=65"], "layout = dp=65 has 65 ranks, more than the 64 processes"),
        (["--layout", "tp=100000x100000"], "has 10,000,000,000 ranks, more than the 64 processes"),
        (["--layout", "dp=2", "--as-is", "--train.batch", "3"], "train.batch = 3 does not divide over dp = 2"),
    ],
)
def test_what_train_would_refuse_is_not_called_ok(words, line, capsys):
    """Sizes that a person gave count, though small ones are what runs."""
    assert main(["verify", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and line in error


def test_sizes_that_nobody_gave_are_made_to_fit(capsys):
    assert main(["verify", "--layout", "tp=3", "--model.tied", "--steps", "1"]) == 0
    assert "tp=3 on small tiny: 2 layers, hidden 48, 6 heads" in capsys.readouterr().out


def test_a_job_as_it_is_runs_with_its_own_odd_sizes(capsys):
    words = ["--layout", "tp=2,sp", "--as-is", "--model.layers", "3", "--model.ffn", "51", "--model.vocab", "259"]
    assert main(["verify", *words, "--data.sequence", "10", "--train.batch", "2", "--steps", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] and document["ran"].endswith("ffn 51, vocabulary 259; 2 x 10 tokens, float64")
    assert document["ran"].startswith("tiny: 3 layers, hidden 64, 4 heads, 2 KV heads")


@pytest.mark.parametrize("words", [[], ["--as-is"]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_job_file_that_a_run_leaves_is_verified_in_float64(words, dtype, tmp_path, capsys):
    """It names every field, the type of the weights too: nobody asked for that one here."""
    small = ["--model", "tiny", "--data.sequence", "8", "--train.batch", "4", "--dtype", dtype]
    assert main(["train", "--layout", "dp=2,zero=1", *small, "--dump-config"]) == 0
    (tmp_path / "job.toml").write_text(capsys.readouterr().out)
    assert main(["verify", str(tmp_path / "job.toml"), *words, "--steps", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("dp=2,zero=1 on ") and "8 tokens, float64" in shown


@pytest.mark.parametrize(
    "alone", [{"data": {"sequence": 4, "packing": "packed"}}, {"model": {"window": 1}}], ids=["documents", "window"]
)
def test_gradients_that_are_zero_but_for_rounding_do_not_differ(pool, alone):
    """A token that sees only itself gives queries, and what norms them, no gradient."""
    model = {"preset": "tiny", "qk_norm": True} | alone.get("model", {})
    asked = job_from_tree(alone | {"model": model, "layout": layout_tree("dp=2,micro_batches=2")})
    assert verify(small_job(asked), pool=pool).failures == []


def test_a_small_gradient_that_is_wrong_is_still_found():
    truth = {"large": np.ones(10_000), "small": np.full(4, 1e-6)}
    wrong = truth | {"small": truth["small"] * (1 + 1e-6)}
    records = [Record([1.0], [1.0], [gradients], {"w": np.ones(1)}, []) for gradients in (wrong, truth)]
    assert compare(*records)["grad"].value > 1e-10


def test_what_would_wait_for_ever_is_refused_before_any_rank_starts(tmp_path):
    """The ends of a tied model on ranks that sum nothing together; and parts that do not go together."""
    (tmp_path / "mine.csv").write_text(
        "schedule,mine\nversions,flush\nroute,1.0,0.0,2.0\nmicro-batches,0\n" + "rank,F0,B0\n" * 3
    )
    tree = {
        "model": {"preset": "gpt2"},
        "layout": {"pp": 3, "micro_batches": 1, "schedule": str(tmp_path / "mine.csv")},
    }
    with pytest.raises(RequestError, match="has the ends of a tied model at"):
        verify(small_job(job_from_tree(tree)))
    grid = {"model": {"preset": "moe-tiny"}, "layout": {"tp": "2x2"}}
    with pytest.raises(RequestError, match="a grid of tensor ranks cuts no experts"):
        verify(small_job(job_from_tree(grid)))
