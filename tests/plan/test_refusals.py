"""What is refused is refused with changes that really do, and the README has the list."""

from pathlib import Path

import pytest

from shoal.plan.refusals import REFUSALS, refuse
from shoal.plan.stages import check_pipeline
from shoal.spec.build import job_from_tree
from shoal.spec.errors import RequestError
from shoal.spec.layout import Layout, layout_tree

# By the place of the refusal in the table, a job that meets it.
UPDATING = "pp=2,schedule=pipedream"
EXAMPLES = {
    "layout.hsdp with zero = 0": ("dp=4,hsdp=2", {}),
    "layout.reshard with zero below 3": ("dp=2,zero=2,reshard=never", {}),
    "layout.zero1 without zero = 1": ("dp=2,zero=2,zero1=ar+ag", {}),
    "layout.sp with tp = 1": ("dp=2,sp", {}),
    "layout.sp with a grid of tensor ranks": ("tp=2x2,sp", {}),
    "layout.regather without sp": ("tp=2,regather", {}),
    "layout.schedule with pp = 1": ("dp=2,schedule=gpipe", {}),
    "layout.stages with pp = 1": ("dp=2,stages=1-1", {}),
    "layout.v with pp = 1": ("dp=2,v=2", {}),
    "layout.dedup with ep = 1": ("dp=2,dedup", {"model.preset": "moe-tiny"}),
    "layout.ep without experts in the model": ("ep=2", {}),
    "layout.etp without experts in the model": ("tp=2,etp=2", {}),
    "layout.tp with experts in the model": ("tp=2x2", {"model.preset": "moe-tiny"}),
    "layout.hsdp with experts that reach over several replicas": (
        "dp=4,tp=2,ep=8,zero=3,hsdp=4",
        {"model.preset": "moe-tiny"},
    ),
    "layout.order with hsdp and ep above 1, and axes of tokens or experts outside dp": (
        "dp=4,ep=2,zero=3,hsdp=2,order=tp-dp-ep",
        {"model.preset": "moe-tiny"},
    ),
    "data.pad with experts in the model and a sequence that the layout fills up": (
        "cp=2",
        {"model.preset": "moe-tiny", "data.pad": True, "data.sequence": 62},
    ),
    "layout.zero with a schedule that updates weights between micro-batches": (f"{UPDATING},zero=3", {}),
    "model.tied with a schedule that updates weights between micro-batches": (UPDATING, {"model.tied": True}),
    "train.clip with a schedule that updates weights between micro-batches": (UPDATING, {"train.clip": 1.0}),
    "train.reduce_dtype without bfloat16 weights under ZeRO": ("dp=2", {"train.reduce_dtype": "float32"}),
}


def asked(layout, changes):
    tree = {
        "model": {"preset": "tiny"},
        "layout": layout_tree(layout),
        "train": {"clip": 0.0},
        "data": {"sequence": 64},
    }
    for name, value in changes.items():
        section, field = name.split(".")
        tree[section] = {field: value} if field == "preset" else {**tree[section], field: value}
    return job_from_tree(tree)


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_change_that_is_offered_would_do(name):
    """Whatever else is wrong afterwards, it is not this."""
    layout, changes = EXAMPLES[name]
    job = asked(layout, changes)
    (refusal,) = [refusal for refusal in REFUSALS if refusal.holds(job)]
    assert f"{refusal.field} {refusal.met}" == name
    with pytest.raises(RequestError) as refused:
        refuse(job)
    assert refused.value.field == refusal.field and str(refused.value) == refusal.line(job)
    for instead in {*refusal.instead, *refusal.changes(job)}:
        words = dict(layout_tree(layout))
        others = dict(changes)
        for word in instead.split(","):
            key, _, value = word.partition("=")
            if "." in key:
                others[key] = value
            elif key == "no stages":
                words.pop("stages")
            else:
                words |= layout_tree(word)
        text = ",".join(f"{key}={value}" for key, value in words.items())
        refuse(asked(text, others))


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        ("dp=4,ep=4,hsdp=2,zero=3", "layout.hsdp = 2 with experts that reach over several replicas: "),
        ("dp=4,ep=4,hsdp=2,zero=3", "; hsdp=1 or ep=2 would do"),
        ("dp=4,tp=2,ep=4,hsdp=4,zero=1", "; hsdp=2 or ep=2 would do"),
        ("dp=4,tp=2,etp=2,ep=4,hsdp=2,zero=1", "; hsdp=1 or ep=2 would do"),
        ("dp=2,ep=2,hsdp=2,zero=3,order=tp-dp-ep", "layout.hsdp = 2 with experts that reach over several replicas: "),
        (
            "dp=4,cp=2,ep=2,hsdp=2,zero=2,order=tp-ep-dp-cp",
            "layout.order = tp-ep-dp-cp with hsdp and ep above 1, and axes",
        ),
        ("dp=4,tp=2,ep=2,hsdp=2,zero=2,order=ep-dp-tp", "order=tp-cp-ep-dp-pp or hsdp=1 or ep=1 would do"),
    ],
)
def test_experts_and_replicas_that_do_not_fit_are_refused_with_what_would(layout, line):
    with pytest.raises(RequestError) as refused:
        refuse(asked(layout, {"model.preset": "moe-tiny"}))
    assert line in str(refused.value)


def test_the_examples_are_the_whole_table():
    """Except the schedule from a file that updates in between, which tests/cli/test_pipeline_errors.py has."""
    names = {f"{refusal.field} {refusal.met}" for refusal in REFUSALS}
    assert names - set(EXAMPLES) == {"layout.schedule from a file, and one that updates weights between micro-batches"}


def test_what_is_in_the_table_is_in_the_readme():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert [str(refusal) for refusal in REFUSALS if f"* {refusal}\n" not in readme] == []
    listed = readme.partition("## What does not go together")[2].partition("\n## ")[0]
    assert listed.count("\n* ") == len(REFUSALS)


@pytest.mark.parametrize("layout", ["dp=2", "tp=2,sp,regather", "pp=2,schedule=gpipe", "dp=4,hsdp=2,zero=3", "tp=2x2"])
def test_what_goes_together_is_not_refused(layout):
    refuse(asked(layout, {}))
    check_pipeline(Layout.parse(layout), tied=False)
