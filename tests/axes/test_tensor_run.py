"""Tensor and sequence parallelism running: against a loop in plain torch, byte for byte, and broken on purpose."""

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from faults import counted_by_all, sum_of_all_but
from reference import STEPS, differing, job, plain_torch, together
from shoal.axes import shares
from shoal.axes.shares import Shares
from shoal.axes.tensor import run as tensor
from shoal.axes.tensor.loss import head_loss
from shoal.comm import collectives
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.kernels.linear import linear
from shoal.mesh import Mesh
from shoal.model.decoder import Decoder
from shoal.model.init import initialise
from shoal.plan.pieces import mesh_of, pieces_of
from shoal.plan.traffic import evaluation_transfers, step_transfers, times
from shoal.spec.build import job_from_tree
from shoal.spec.errors import RequestError
from shoal.spec.inventory import inventory
from shoal.spec.job import DataSpec
from shoal.spec.layout import Layout
from shoal.spec.model import ModelSpec
from shoal.train.layers import layers_of
from shoal.train.trainer import Trainer
from shoal.verify.audit import audit
from shoal.verify.compare import compare, relative
from shoal.verify.trial import MadeUpBatches, trial

SEQUENCE = 24  # tokens: 2, 3, 4, 6 and 8 ranks can cut it
MODELS = {
    "llama": ModelSpec(
        layers=2, hidden=32, heads=8, kv_heads=2, ffn=48, vocab=61, positions_max=SEQUENCE, qk_norm=True
    ),
    "gpt": ModelSpec(
        layers=2, hidden=32, heads=8, ffn=48, vocab=67, positions_max=SEQUENCE, norm="layernorm", positions="learned",
        mlp="gelu", qkv_bias=True, output_bias=True, mlp_bias=True, tied=True, dropout=0.1,
    ),
    # one KV head, an MLP that no number of ranks cuts evenly, fewer token ids than 8 ranks have rows for
    "odd": ModelSpec(
        layers=2, hidden=32, heads=8, kv_heads=1, head_size=6, ffn=50, vocab=9, positions_max=SEQUENCE, window=5,
        qk_norm=True, qkv_bias=True, output_bias=True, mlp_bias=True, dropout=0.2,
    ),
    "threes": ModelSpec(
        layers=2, hidden=36, heads=12, kv_heads=3, head_size=4, ffn=50, vocab=67, positions_max=SEQUENCE, tied=True,
        mlp="gelu",
    ),
}  # fmt: skip
CASES = [
    ("llama", "tp=1"),
    ("llama", "tp=2"),
    ("llama", "tp=4,sp,micro_batches=2"),
    ("llama", "tp=8,sp,regather"),
    ("llama", "dp=2,tp=2,sp,zero=3"),
    ("llama", "dp=2,tp=4,zero=2,micro_batches=2"),
    ("gpt", "tp=2,sp,regather"),
    ("gpt", "tp=4"),
    ("gpt", "tp=8,sp"),
    ("gpt", "dp=2,tp=4,sp,zero=1"),
    ("gpt", "dp=4,tp=2,sp,hsdp=2,zero=3,micro_batches=2"),
    ("odd", "tp=2,sp"),
    ("odd", "tp=8"),
    ("odd", "dp=2,tp=4,sp,regather,zero=3"),
    ("odd", "dp=4,tp=2,sp,zero=2,micro_batches=2"),
    ("odd", "dp=2,tp=4,order=dp-tp"),
    ("threes", "tp=3,sp"),
    ("threes", "tp=6,sp,regather,micro_batches=2"),
    ("threes", "dp=2,tp=3,zero=1,zero1=ar+ag"),
]


def asked(model, layout, **changes):
    return replace(job(layout, MODELS[model], **changes), data=DataSpec(sequence=SEQUENCE))


@cache
def truth(model):
    """What plain torch trains. The layout does not matter to it."""
    return plain_torch(asked(model, "dp=1"))


def by_place(transfers):
    """Bytes and calls of the tensor axis by phase, primitive, layer and micro-batch."""
    totals = Counter()
    for transfer in transfers:
        if transfer.axis == "tp":
            place = (transfer.phase, transfer.op, transfer.layer, transfer.micro_batch)
            for kind in ("sent", "received", "calls"):
                totals[*place, kind] += getattr(transfer, kind)
    return totals


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_every_layout_trains_what_plain_torch_trains_and_sends_what_is_planned(pool, model, layout):
    """Loss, every gradient, norms and 5 steps' weights to 1e-10 in float64; bytes and calls exact, per layer and rank."""
    this = asked(model, layout)
    records = pool.run(trial, this.layout.world, this, STEPS)
    errors = compare(together(this, records), truth(model))
    assert {kind: error for kind, error in errors.items() if not error.value <= 1e-10} == {}
    assert all(record.losses == records[0].losses for record in records)
    assert differing(this, records) is None
    planned = [times(step_transfers(this, rank), STEPS) for rank in range(this.layout.world)]
    measured = [record.transfers for record in records]
    assert [row.difference() for row in audit(planned, measured) if not row.ok] == []
    assert list(map(by_place, planned)) == list(map(by_place, measured))


def test_the_cases_cover_what_may_go_wrong():
    """Both kinds of every switch, each number of ranks; KV heads in copies of 2 to 8, cut, and all of them."""
    layouts = [asked(model, layout).layout for model, layout in CASES]
    assert {layout.tp_size for layout in layouts} == {1, 2, 3, 4, 6, 8}
    assert {(layout.sp, layout.regather) for layout in layouts} == {(False, False), (True, False), (True, True)}
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    copies = {max(1, asked(m, at).layout.tp_size // MODELS[m].kv_heads) for m, at in CASES}
    assert copies == {1, 2, 4, 8}
    for switch in ("tied", "qk_norm", "mlp_bias"):
        assert {getattr(MODELS[model], switch) for model, _ in CASES} == {True, False}


def steps_of(record, count):
    """The first steps of a record; the weights stay those of its end."""
    kinds = ("losses", "grad_norms", "gradients")
    return replace(record, **{kind: getattr(record, kind)[:count] for kind in kinds})


def test_float32_agrees_in_losses_and_gradients(pool):
    this = asked("odd", "dp=2,tp=4,sp", dtype="float32")
    records = pool.run(trial, 8, this, 1)
    errors = compare(together(this, records), steps_of(truth("odd"), 1))
    assert max(errors[kind].value for kind in ("loss", "grad", "grad_norm")) < 1e-5


@pytest.mark.parametrize(("layout", "reduce"), [("tp=2,sp", "same"), ("dp=2,tp=2,sp,regather,zero=3", "float32")])
def test_bfloat16_sends_what_is_planned(pool, layout, reduce):
    """Activations in 2 bytes, the loss's three numbers per token in 4, partial gradients as the data axis sums its own."""
    this = asked("llama", layout, dtype="bfloat16")
    this = replace(this, train=replace(this.train, reduce_dtype=reduce))
    records = pool.run(trial, this.layout.world, this, 1)
    planned = [step_transfers(this, rank) for rank in range(this.layout.world)]
    assert list(map(by_place, planned)) == [by_place(record.transfers) for record in records]
    assert [row.difference() for row in audit(planned, [r.transfers for r in records]) if not row.ok] == []
    errors = compare(together(this, records), steps_of(truth("llama"), 1))
    assert errors["loss"].value < 1e-2 and errors["grad_norm"].value < 2e-2


@pytest.mark.parametrize(("model", "layout"), [("odd", "tp=4,sp"), ("gpt", "tp=2"), ("threes", "tp=6,sp")])
def test_logits_are_whole_on_every_rank(pool, model, layout):
    this = asked(model, layout)
    tokens = np.random.default_rng(0).integers(0, this.model.vocab, (3, SEQUENCE))
    (wanted,) = pool.run(logits, 1, asked(model, "dp=1"), tokens)
    for found in pool.run(logits, this.layout.world, this, tokens):
        np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-13)


def logits(rank, world, job, tokens):
    here = world_of(job, rank)
    model = Decoder(job.model, torch.float64, layers=layers_of(job, here))
    initialise(model, job.model, job.train.seed, pieces_of(job, rank))
    found = model(torch.from_numpy(tokens)).detach().numpy()
    here.close()
    return found


def world_of(job, rank):
    return World(mesh_of(job), rank, Ledger()) if job.layout.world > 1 else World.single()


def test_an_evaluation_sees_the_loss_of_one_process_and_sends_what_is_planned(pool):
    this = asked("odd", "dp=2,tp=4,sp,zero=3")
    losses, transfers = zip(*pool.run(evaluation, 8, this), strict=True)
    ((wanted, _),) = pool.run(evaluation, 1, asked("odd", "dp=1"))
    assert losses == pytest.approx([wanted] * 8, rel=1e-12)
    planned = [evaluation_transfers(this, rank, forwards=1) for rank in range(8)]
    assert [row.difference() for row in audit(planned, transfers) if not row.ok] == []


def evaluation(rank, world, job):
    here = world_of(job, rank)
    batches = MadeUpBatches(job, here.mesh.coordinate("dp", rank))
    trainer = Trainer(job, here, batches)
    here.ledger.clear()
    loss = trainer.evaluate(batches.batch(0))
    transfers = here.ledger.transfers()
    here.close()
    return loss, transfers


@pytest.mark.parametrize("summed", [True, False])
def test_a_row_layer_before_a_column_layer_needs_its_sum(pool, summed):
    """Spec TP-2: a nonlinearity of a sum is not the sum of nonlinearities, so the sum comes between the two layers."""
    x, first, second, y = pool.run(row_then_column, 1, True)[0]
    exact = F.gelu(torch.from_numpy(x) @ torch.from_numpy(first).t()) @ torch.from_numpy(second).t()
    assert relative(y, exact.numpy()) < 1e-14
    error = relative(pool.run(row_then_column, 3, summed)[0][-1], y)
    assert (error < 1e-14) if summed else (error > 0.1)


def row_then_column(rank, world, summed):
    """x (2, 4, 6) through a row layer to 5 features, GELU and a column layer to 9, which are gathered."""
    here = World(Mesh.of(Layout(tp=world)), rank, Ledger()) if world > 1 else World.single()
    group = here.group("tp")
    random = np.random.default_rng(0)
    x, first, second = (torch.from_numpy(random.normal(size=size)) for size in ((2, 4, 6), (5, 6), (9, 5)))
    row, column = tensor.RowLinear(6 // world, 5, False, group), tensor.ColumnLinear(5, 9 // world, False, group)
    row.weight, column.weight = (
        torch.nn.Parameter(part.chunk(world, dim)[rank]) for part, dim in ((first, 1), (second, 0))
    )
    inside = x.chunk(world, -1)[rank]
    between = row(inside) if summed else linear(inside, row.weight)
    y = collectives.all_gather(column(F.gelu(between)).detach(), group, dim=-1)
    here.close()
    return x.numpy(), first.numpy(), second.numpy(), y.numpy()


# Faults, each as other frameworks had it, put into the running code on every rank.


def row_without_its_sum(ctx, x, weight, bias, layer):
    ctx.save_for_backward(x, weight)
    ctx.layer, ctx.place = layer, layer.group.ledger.place
    return linear(x, weight, bias)


def row_with_a_bias_of_every_rank(ctx, x, weight, bias, layer):
    return collectives.all_reduce(row_without_its_sum(ctx, x, weight, bias, layer), layer.group)


def column_without_its_sum(ctx, gradient):
    with patch.object(collectives, "all_reduce", lambda x, group, asynchronous: collectives.Handle(x)):
        return COLUMN_BACKWARD(ctx, gradient)


def loss_with_padding(hidden, weight, targets, group, first, real):
    return head_loss(hidden, weight, targets, group, first)


def look_up_without_mask(tokens, weight, first, group):
    return F.embedding((tokens - first).clamp(0, len(weight) - 1), weight)


def noise_of_the_first_part(self, key):
    return replace(key, positions=key.positions[: len(key.positions) // self.group.size])


COLUMN_BACKWARD = tensor._Column.backward

LOSS, NORM = "loss", "gradient norm"
BIASES = {"attention.out.bias", "mlp.down.bias"}
HEAD_NORMS = {"attention.q_norm.weight", "attention.k_norm.weight"}
NORMS = {"attention_norm.weight", "mlp_norm.weight", "head.norm.weight"}
KV = {"attention.qkv.weight", "attention.qkv.bias"}


def of_any_block(name):
    """A parameter's name without the number of its block."""
    return name.split(".", 2)[-1] if name.startswith("blocks.") else name


BELOW_THE_HEAD = {of_any_block(p.name) for p in inventory(MODELS["odd"]) if p.unit != "head"}

FAULTS = {  # the layout; of what, which name becomes what; at which step what differs first
    "no sum after a row layer": ("tp=2", tensor._Row, "forward", staticmethod(row_without_its_sum), 0, LOSS),
    "row biases t times": ("tp=2", tensor._Row, "forward", staticmethod(row_with_a_bias_of_every_rank), 1, LOSS),
    "no sum before a column layer": (
        "tp=2", tensor._Column, "backward", staticmethod(column_without_its_sum), 0, BELOW_THE_HEAD),
    "padding counts as ids": ("tp=2", tensor, "head_loss", loss_with_padding, 0, LOSS),
    "ids of other ranks looked up": ("tp=2", tensor, "look_up", look_up_without_mask, 0, LOSS),
    "no sum of partial gradients": ("tp=2", Shares, "sum", sum_of_all_but("tp"), 0, HEAD_NORMS),
    "no sum of partial gradients, sp": ("tp=2,sp", Shares, "sum", sum_of_all_but("tp"), 0, HEAD_NORMS | NORMS | BIASES),
    "no sum over copies of KV heads": ("tp=2", Shares, "sum", sum_of_all_but("kv"), 0, KV),
    "shared gradients counted by all": ("tp=2", shares, "counted_runs", counted_by_all, 0, NORM),
    "dropout of one part everywhere": (
        "tp=2,sp", tensor.TensorLayers, "noise_key", noise_of_the_first_part, 0, LOSS),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_where_it_lies(pool, fault):
    """Each differs at least four digits more than the comparison allows, and in the parameters that it concerns alone."""
    layout, *_, step, what = FAULTS[fault]
    this = asked("odd", layout)
    found = together(this, pool.run(trial_with, 2, fault, this, STEPS))
    assert first_difference(found, truth("odd")) == (step, what)
    assert max(error.value for error in compare(found, truth("odd")).values()) > 1e-6


def trial_with(rank, world, fault, job, steps):
    _, where, name, broken, *_ = FAULTS[fault]
    with patch.object(where, name, broken):  # and no longer: the pool's ranks live on
        return trial(rank, world, job, steps)


def first_difference(found, truth, limit=1e-6):
    """(step, LOSS, NORM or the parameters whose gradients differ), in the order in which a step computes them."""
    for step in range(STEPS):
        gradients, wanted = found.gradients[step], truth.gradients[step]
        if relative(found.losses[step], truth.losses[step]) > limit:
            return step, LOSS
        if wrong := {of_any_block(name) for name in wanted if relative(gradients[name], wanted[name]) > limit}:
            return step, wrong
        if relative(found.grad_norms[step], truth.grad_norms[step]) > limit:
            return step, NORM
    return None


@pytest.mark.parametrize(
    ("tree", "field", "size"),
    [
        ({"layout": "tp=3"}, "layout.tp", "4"),
        ({"layout": "tp=16"}, "layout.tp", "8"),
        ({"layout": "tp=2x3"}, "layout.tp", "2x2"),
        ({"layout": "tp=3x3"}, "layout.tp", "2x2"),
        ({"model": {"heads": 12, "kv_heads": 3}, "layout": "tp=2"}, "layout.tp", "3"),
        ({"model": {"heads": 8, "kv_heads": 3}, "layout": "tp=2"}, "model.kv_heads", "4"),
        ({"layout": "tp=4,sp", "data": {"sequence": 250}}, "data.sequence", "248"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_a_size_that_can(tree, field, size):
    """The model has 8 heads and 2 KV heads where nothing else is said."""
    tree = {**tree, "model": {"hidden": 96, "heads": 8, "kv_heads": 2, "head_size": 12, **tree.get("model", {})}}
    with pytest.raises(RequestError) as refused:
        job_from_tree(tree).check()
    assert refused.value.field == field
    assert re.search(rf"\b{size}\b", str(refused.value).rpartition(";")[2])
    section, _, leaf = field.partition(".")
    put_right = f"{leaf}={size}" if section == "layout" else {**tree.get(section, {}), leaf: int(size)}
    job_from_tree({**tree, section: put_right}).check()
