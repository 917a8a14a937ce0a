"""A layout that rounds passes where nothing but rounding differs, and faults are found through the rounding all the same."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from faults import counted_by_all, sum_of_all_but
from shoal.axes import shares
from shoal.axes.expert import route
from shoal.axes.expert.route import best
from shoal.axes.shares import Shares
from shoal.axes.zero.part import Part
from shoal.cli.main import main
from shoal.spec.build import job_from_tree
from shoal.spec.moe import MoESpec
from shoal.train import experts, schedule, trainer
from shoal.train.optimizer import AdamW
from shoal.verify.choices import NOBODY, beaten, of_all
from shoal.verify.compare import compare
from shoal.verify.rounded import Path, led
from shoal.verify.trial import trial
from shoal.verify.verify import alone, as_it_is, small_job, verify

MIXED = {"preset": "moe-tiny", "norm": "layernorm", "dropout": 0.1, "moe": {"every": 2}}
SIGMOID = {"router": "sigmoid", "z_loss": 0.001, "shared_experts": 1, "shared_gate": True}
GROUPED = {"experts": 16, "top_k": 4, "groups": 4, "groups_kept": 2, "bias": True, "router": "sigmoid"}


def small(layout, model, dtype="bfloat16"):
    job = job_from_tree({"model": {"preset": "tiny", **model}, "layout": layout, "train": {"dtype": dtype}})
    return small_job(job, dtype)


def experts_of(moe):
    return {"preset": "moe-tiny", "moe": moe}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("layout", "model", "steps"),
    [
        (
            "dp=2,tp=2,pp=2,etp=2,ep=2,sp,schedule=zb-h1",
            MIXED,
            1,
        ),  # norm biases start at 0 and step by the sign of noise
        ("dp=2,micro_batches=2,zero=2", {"norm": "layernorm"}, 1),
        ("tp=2,cp=2,ep=4,recompute=selective,dedup", experts_of(SIGMOID), 1),  # near ties in the routers
        ("tp=4,ep=4", experts_of({"every": 1}), 3),
        ("dp=2,cp=2,ep=2,zero=3", experts_of({**GROUPED, "capacity": 1.0, "aux_loss": 0.01}), 3),
        ("dp=2,pp=2,ep=2", experts_of({"balance": "micro_batch", "aux_loss": 0.01}), 3),
    ],
)
def test_rounding_alone_is_no_fault(pool, layout, model, steps, dtype):
    verdict = verify(small(layout, model, dtype), steps, pool=pool)
    assert verdict.failures == []
    assert ("routing" in verdict.errors) == ("moe" in model)
    assert all(limit < 0.25 for limit in verdict.limits.values()), "else half a gradient would pass"


def test_micro_batches_add_up_as_coarsely_on_one_process(pool):
    """In bfloat16 a sum of very many is off by more than four times what one is."""
    train = {"dtype": "bfloat16", "batch": 384, "clip": 0.0}
    layout = "dp=2,micro_batches=192"
    asked = {"model": {"preset": "tiny", "layers": 1}, "layout": layout, "data": {"sequence": 2}, "train": train}
    verdict = verify(as_it_is(job_from_tree(asked), "bfloat16"), 1, pool=pool)
    assert verdict.failures == []
    assert verdict.errors["grad"].value < 0.6 * verdict.limits["grad"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_process_that_is_led_along_its_own_path_finds_the_same_bits(pool, dtype):
    job = alone(small("dp=2,ep=2", experts_of(GROUPED), dtype))
    (record,) = pool.run(trial, 1, job, 3)
    choices = of_all([record.chosen], job, 3)
    assert all(NOBODY not in table for table in choices.values())
    (again,) = pool.run(led, 1, job, 3, Path(record.before, record.gradients, choices, dtype))
    errors = compare(again.record, record)
    assert errors["loss"].value == errors["grad"].value == 0
    assert errors["grad_norm"].value < 1e-6
    assert errors["weights"].value < 1e-6, "torch's AdamW makes the same of the same gradients"


def faster(step, train):
    return 1.25 * schedule.learning_rate(step, train)


def worst(values, spec):
    """The worst experts instead of the best."""
    return best(-values, spec)


def worst_for_one(values, spec):
    """The same for one token of all."""
    return torch.cat([best(-values[:1], spec), best(values[1:], spec)])


def lose(self, rate):
    """In place of AdamW.step: weights that are no numbers."""
    for weights, _, _ in self.runs:
        weights.fill_(torch.nan)


class Nothing:
    """The handle of what was never sent."""

    def wait(self):
        pass


LAYERNORM, ROUTED = {"norm": "layernorm"}, experts_of({"experts": 8})
# by fault: layout, model, what takes the place of what, on which ranks, and how the line begins that names it
FAULTS = {
    "norm gradients that are not summed over tensor ranks": (
        "tp=2,sp", LAYERNORM, Shares, "sum", sum_of_all_but("tp"), (0, 1), "grad: gradient of "),
    "a router's gradient that is not summed over tensor ranks": (
        "tp=2,ep=2", experts_of(SIGMOID), Shares, "sum", sum_of_all_but("tp"), (0, 1), "grad: gradient of "),
    "another learning rate on one rank": (
        "dp=2,zero=1", LAYERNORM, trainer, "learning_rate", faster, (1,), "weights: "),
    "another learning rate on one stage": (
        "pp=2", LAYERNORM, trainer, "learning_rate", faster, (1,), "weights: "),
    "an update that one rank does not make": (
        "dp=2,zero=3", {}, AdamW, "step", lambda self, rate: None, (1,), "weights: "),
    "weights that are lost": (
        "dp=2", {}, AdamW, "step", lose, (0, 1), "weights: "),
    "weights that are not gathered": (
        "dp=2,zero=1", {}, Part, "spread", lambda self: Nothing(), (0, 1), "weights: "),
    "what several keep counts on each": (
        "tp=2", {}, shares, "counted_runs", counted_by_all, (0, 1), "grad_norm: "),
    "the worst experts": (
        "dp=2,ep=2", ROUTED, route, "best", worst, (1,), "routing: a choice of experts in layer "),
    "the worst experts for one token": (
        "dp=2,ep=2", ROUTED, route, "best", worst_for_one, (1,), "routing: a choice of experts in layer "),
    "an auxiliary loss that is not told": (
        "dp=2,ep=2", experts_of({"aux_loss": 0.01}), experts.Mixtures, "auxiliary", lambda self: 0.0, (0, 1), "loss: "),
    "experts of any group": (
        "dp=2,ep=2", experts_of(GROUPED), route, "_allowed", lambda values, spec: values > -1, (1,), "routing: "),
    "a routing bias that does not move": (
        "dp=2,ep=2", experts_of(GROUPED), experts, "update_bias", lambda layers, loads: None, (0, 1),
        "weights: blocks.0.mlp.router.bias"),
}  # fmt: skip


def trial_with(rank, world, fault, job, steps):
    """A trial on ranks of which some are at fault."""
    _, _, place, name, replacement, ranks, _ = FAULTS[fault]
    right = getattr(place, name)
    if rank in ranks:
        setattr(place, name, replacement)
    try:
        return trial(rank, world, job, steps)
    finally:
        setattr(place, name, right)  # the pool's ranks live on


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_more_than_rounding(pool, fault, dtype):
    layout, model, *_, line = FAULTS[fault]
    verdict = verify(small(layout, model, dtype), 1, pool=pool, run=partial(run_with, fault))
    assert any(failure.startswith(line) for failure in verdict.failures), verdict.failures


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_leads_nowhere_is_a_fault_at_every_step(pool, dtype):
    """Weights that are no numbers lead one process nowhere either: it must not say how much is allowed."""
    verdict = verify(small("dp=2", {}, dtype), 3, pool=pool, run=partial(run_with, "weights that are lost"))
    assert {"loss", "grad", "weights"} <= {line.split(":")[0] for line in verdict.failures}
    assert all(np.isfinite(limit) for limit in verdict.limits.values())


def run_with(fault, rank, world, job, steps):
    return trial_with(rank, world, fault, job, steps)


VALUES = np.array([0.9, 0.1, 0.5, 0.45, 0.3, 0.2, 0.6, 0.05])


@pytest.mark.parametrize(
    ("moe", "chosen", "by"),
    [
        ({"top_k": 2}, (0, 6), 0),
        ({"top_k": 2}, (6, 0), 0),
        ({"top_k": 2}, (0, 2), 0.1),
        ({"top_k": 2}, (2, 3), 0.45),
        ({"top_k": 2}, (0, 0), np.inf),
        ({"top_k": 2}, (0, NOBODY), np.inf),
        # groups by the mean of their two best: 0.5, 0.475, 0.25, 0.325
        ({"top_k": 2, "groups": 4, "groups_kept": 2}, (0, 2), 0),
        ({"top_k": 2, "groups": 4, "groups_kept": 2}, (0, 3), 0.05),
        ({"top_k": 2, "groups": 4, "groups_kept": 2}, (0, 6), 0.15),
        ({"top_k": 2, "groups": 4, "groups_kept": 1}, (2, 3), 0.025),
        ({"top_k": 2, "groups": 4, "groups_kept": 1}, (0, 2), np.inf),
        ({"top_k": 2, "groups": 4, "groups_kept": 2}, (2, 3), 0.175),  # with group 3 kept instead of 0
        ({"top_k": 2, "groups": 4, "groups_kept": 2, "group_score": "max"}, (0, 6), 0),
        ({"top_k": 2, "groups": 4, "groups_kept": 2, "group_score": "max"}, (0, 2), 0.1),
    ],
)
def test_how_far_a_choice_is_from_the_best(moe, chosen, by):
    spec = MoESpec(experts=8, **moe)
    assert beaten(np.stack([VALUES, VALUES]), np.array([chosen, chosen]), spec) == pytest.approx(by)


def test_the_command_says_what_routing_may_differ_by(capsys):
    words = ["--model", "moe-tiny", "--layout", "dp=2,ep=2", "--dtype", "bfloat16", "--steps", "1", "--json"]
    assert main(["verify", *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["max_rel_err"]["routing"] <= document["allowed"]["routing"] < 0.1
