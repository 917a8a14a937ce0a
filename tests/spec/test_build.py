"""The loader: strict, one line per error, the same job from typed values and from text."""

import dataclasses
import pickle
import re
import subprocess
import sys

import pytest

from shoal.spec.build import fields_of, job_from_tree, job_to_tree
from shoal.spec.errors import RequestError
from shoal.spec.job import Job
from shoal.spec.layout import Layout
from shoal.spec.machine import Machine
from shoal.spec.model import ModelSpec, RopeSpec
from shoal.spec.moe import MoESpec

FIELDS = [field for field in fields_of(Job) if field.name != "model.preset"]


def nested(name, value):
    """{"a": {"b": value}} for "a.b"."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def value_at(job, name):
    for part in name.split("."):
        job = getattr(job, part)
    return job


@pytest.mark.parametrize(
    "tree, line",
    [
        ({"model": {"hiden": 64}}, "model.hiden is not a field of model; did you mean model.hidden?"),
        ({"model": {"zzz": 1}}, "model.zzz is not a field of model; model has preset, name, layers, hidden,"),
        (
            {"model": {"rope": {"thta": 1}}},
            "model.rope.thta is not a field of model.rope; did you mean model.rope.theta?",
        ),
        ({"layout": {"steps": 3}}, "layout.steps is not a field of layout; did you mean train.steps?"),
        ({"modle": {}}, "modle is not a section of a job; did you mean model?"),
        ({"steps": 3}, "steps is not a section of a job; did you mean train.steps?"),
        ({"model": "tiny"}, "model = tiny is not a table; model.preset = tiny would do"),
        ({"model": {"rope": 3}}, "model.rope = 3 is not a table; model.rope.theta = 10000.0 would do"),
        (
            {"train": {"dtype": "float23"}},
            "train.dtype = float23 is not one of float64, float32, bfloat16; did you mean float32?",
        ),
        ({"train": {"dtype": 32}}, "train.dtype = 32 is not one of float64, float32, bfloat16; float32 would do"),
        (
            {"train": {"log": "tensorboard,wandbb"}},
            "train.log = wandbb is not one of tensorboard, wandb; did you mean wandb?",
        ),
        ({"train": {"log": 3}}, "train.log = 3 is not a list of words; tensorboard,wandb would do"),
        ({"model": {"preset": "tinny"}}, "model.preset = tinny is unknown; tiny would do (presets: tiny, demo, gpt2,"),
        ({"model": {"preset": 3}}, "model.preset = 3 is unknown; tiny would do (presets:"),
        ({"train": {"steps": "ten"}}, "train.steps = ten is not a whole number; 200 would do"),
        ({"train": {"steps": 2.0}}, "train.steps = 2.0 is not a whole number; 200 would do"),
        ({"train": {"steps": True}}, "train.steps = true is not a whole number; 200 would do"),
        ({"train": {"steps": 0}}, "train.steps = 0 must be at least 1; 200 would do"),
        ({"train": {"clip": "nan"}}, "train.clip = nan is not a finite number; 1.0 would do"),
        ({"train": {"clip": float("inf")}}, "train.clip = inf is not a finite number; 1.0 would do"),
        ({"train": {"clip": 10**400}}, "train.clip = 1000000"),
        ({"train": {"learning_rate": "-1e-3"}}, "train.learning_rate = -0.001 must be at least 0; 0.001 would do"),
        ({"train": {"beta1": 1.5}}, "train.beta1 = 1.5 must be at least 0 and less than 1; 0.9 would do"),
        ({"train": {"compile": 1}}, "train.compile = 1 is not true or false; false would do"),
        ({"train": {"out": ""}}, "train.out is empty; runs/latest would do"),
        ({"data": {"path": 3}}, 'data.path = 3 is not text; "3" in quotes would do'),
        ({"data": {"path": "a\udcff"}}, "data.path = a\\udcff is not valid UTF-8;"),
        ({"model": {"kv_heads": 3}}, "model.kv_heads = 3 does not divide the model's 4 heads; 1, 2 or 4 would"),
        (
            {"model": {"hidden": 6}},
            "model.heads = 4 does not divide model.hidden = 6 and no head_size is given; 1 or 3 would",
        ),
        (
            {"model": {"hidden": 255}},
            "model.heads = 4 does not divide model.hidden = 255 and no head_size is given; a head_size",
        ),
        ({"model": {"head_size": 33}}, "model.head_size = 33 is odd, but rope turns pairs; 34 would do"),
        ({"model": {"window": 0}}, "model.window = 0 must be at least 1; none would do"),
        ({"model": {"rope": {"beta_fast": 1}}}, "model.rope.beta_fast = 1.0 must exceed beta_slow = 1.0; 4.0 would do"),
        (
            {"machine": {"name": "H1000"}},
            "machine.name = H1000 is unknown; did you mean h100? (known: a100, h100, h200, b200,",
        ),
        ({"machine": {"name": "h100\n"}}, "machine.name = h100\\n is unknown; did you mean h100?"),
        ({"machine": {"port": 70000}}, "machine.port = 70000 must be at least 0 and at most 65535; 0 would do"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_that_names_the_field(tree, line):
    with pytest.raises(RequestError) as refused:
        job_from_tree(tree)
    assert str(refused.value).startswith(line)
    assert str(refused.value).startswith(refused.value.field)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", [field.name for field in FIELDS])
def test_a_suggested_value_is_accepted(name):
    for text in ("-1", "0", "nan", "inf", "ten", "", "2x3", "none", "1e400", "9" * 5000, "1.5", "a\nb"):
        try:
            job_from_tree(nested(name, text))
        except RequestError as refused:
            assert refused.field == name
            assert "\n" not in str(refused) and len(str(refused)) < 400
            suggested = re.search(r"; (?:did you mean )?([^ ,?]+)", str(refused))
            assert suggested, str(refused)
            job_from_tree(nested(name, suggested[1]))


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_default_typed_out_is_the_default(field):
    text = "none" if field.default is None else field.default
    plain = job_from_tree({"model": {"moe": {}}} if field.name.startswith("model.moe.") else {})
    assert value_at(job_from_tree(nested(field.name, text)), field.name) == value_at(plain, field.name)


def test_fields_are_described_once_each():
    fields = list(fields_of(Job))
    assert len({field.name for field in fields}) == len(fields)
    assert all(field.help and "\n" not in field.help for field in fields)
    by_name = {field.name: field for field in fields}
    assert by_name["train.dtype"].choices == ("float64", "float32", "bfloat16")
    assert by_name["train.dtype"].type == "choice" and by_name["train.log"].type == "list"
    assert by_name["model.window"].type == by_name["model.ffn"].type == "int|none"
    assert by_name["layout.sp"].type == "bool" and by_name["layout.sp"].default == "false"
    assert "tiny" in by_name["model.preset"].choices
    leaves = {name for name in by_name if name != "model.preset"}
    assert leaves == {f"{section}.{leaf}" for section, leaf in _leaves(Job(model=ModelSpec(moe=MoESpec())))}


def _leaves(spec, prefix=""):
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}.{field.name}".lstrip("."))
        else:
            yield prefix, field.name


def test_text_and_typed_values_give_the_same_job():
    typed = {
        "model": {"layers": 2, "window": None, "tied": True, "rope": {"theta": 5e5}},
        "layout": {"tp": "2x2", "dp": 2, "sp": True},
        "train": {"log": ["tensorboard", "wandb"], "learning_rate": 1, "compile": False},
    }
    text = {
        "model": {"layers": "2", "window": "none", "tied": "true", "rope": {"theta": "500000"}},
        "layout": "dp=2,tp=2x2,sp",
        "train": {"log": "tensorboard, wandb", "learning_rate": "1", "compile": "off"},
    }
    job = job_from_tree(typed)
    assert job == job_from_tree(text)
    assert (job.model.rope.theta, job.layout.tp, job.train.log) == (500000.0, "2x2", ("tensorboard", "wandb"))
    assert job.train.learning_rate == 1.0 and isinstance(job.train.learning_rate, float)


def test_a_preset_lies_under_the_given_fields_and_derived_sizes_follow():
    job = job_from_tree({"model": {"preset": "llama3.1-8b", "layers": 3, "rope": {"factor": 32}}})
    assert (job.model.name, job.model.layers, job.model.kv_heads) == ("llama3.1-8b", 3, 8)
    assert (job.model.rope.factor, job.model.rope.scaling, job.model.rope.theta) == (32.0, "llama3", 500000.0)
    wider = job_from_tree({"model": {"preset": "tiny", "hidden": 128}}).model
    assert (wider.head_size, wider.ffn) == (32, 344)  # 8/3 of 128, rounded up to a multiple of 8


def test_what_follows_from_other_fields_is_filled_in():
    model = ModelSpec(hidden=512, heads=8)
    assert (model.kv_heads, model.head_size, model.ffn) == (8, 64, 1408)  # 8/3 of 512, up to a multiple of 64
    assert ModelSpec(hidden=512, heads=8, mlp="gelu").ffn == 2048
    assert RopeSpec(scaling="yarn", factor=40.0).attention_factor == pytest.approx(1.3688879454113936)
    assert RopeSpec(scaling="llama3", factor=8.0).attention_factor == 1.0
    assert [Layout(pp=pp).micro_batches for pp in (1, 2, 4)] == [1, 4, 8]
    assert Layout(pp=4, micro_batches=0) == Layout(pp=4) == Layout(pp=4, micro_batches=None)


def test_a_specification_built_directly_is_checked_as_well():
    with pytest.raises(RequestError, match=r"train\.dtype = half is not one of"):
        dataclasses.replace(Job().train, dtype="half")
    with pytest.raises(RequestError, match=r"model\.layers = 0 must be at least 1"):
        ModelSpec(layers=0)


def test_the_tree_of_a_job_is_the_job():
    job = job_from_tree({"model": {"preset": "mistral-7b"}, "layout": "dp=2,tp=2x2,pp=2", "train": {"log": "wandb"}})
    assert job_from_tree(job_to_tree(job)) == job


def test_peak_is_the_named_machines_or_given_or_unknown():
    assert Machine(name="h100").peak("bfloat16") == 989e12
    assert Machine(name="a100").peak("float32") == 19.5e12
    assert Machine(name="h100", peak_tflops=500).peak("bfloat16") == 500e12
    assert Machine(name="laptop", peak_tflops=0.25).peak("float64") == 0.25e12
    assert Machine().peak("float32") is None


def test_an_error_crosses_processes_unchanged():
    sent = RequestError("train.steps", "train.steps = 0 must be at least 1; 200 would do")
    arrived = pickle.loads(pickle.dumps(sent))
    assert (type(arrived), arrived.field, str(arrived)) == (RequestError, sent.field, str(sent))


def test_specifications_and_mesh_do_not_load_torch():
    code = "import sys, shoal.mesh, shoal.spec.toml, shoal.spec.inventory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
