"""Pipelines through the trainer: against a loop in plain torch, in the schedule's order, byte for byte, and broken on purpose."""

from collections import Counter
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest

from reference import STEPS, differing, job, plain_torch, together
from shoal.axes.pipeline.live import peaks
from shoal.axes.pipeline.run import Engine
from shoal.plan.pieces import mesh_of
from shoal.plan.stages import schedule_of
from shoal.plan.traffic import step_transfers, times
from shoal.spec.job import DataSpec
from shoal.spec.layout import SCHEDULES
from shoal.spec.model import ModelSpec
from shoal.verify.audit import audit
from shoal.verify.compare import compare
from shoal.verify.trial import trial

LAYERS, SEQUENCE = 8, 8
MODELS = {
    "untied": ModelSpec(layers=LAYERS, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=37, positions_max=SEQUENCE),
    "tied": ModelSpec(
        layers=LAYERS, hidden=16, heads=4, ffn=24, vocab=37, positions_max=SEQUENCE, norm="layernorm",
        positions="learned", mlp="gelu", qkv_bias=True, output_bias=True, mlp_bias=True, tied=True, dropout=0.1,
    ),
}  # fmt: skip
CASES = [
    ("untied", "pp=2,schedule=naive,micro_batches=1"),
    ("tied", "pp=4,schedule=naive,micro_batches=3,dp=2"),
    ("tied", "pp=2,schedule=gpipe,micro_batches=5,dp=2,zero=1"),
    ("untied", "pp=4,schedule=gpipe,micro_batches=16"),
    ("tied", "pp=2,micro_batches=1"),
    ("untied", "pp=2,micro_batches=2,tp=2x2"),
    ("tied", "pp=4,micro_batches=2,stages=2-1-3-2"),
    ("tied", "pp=4,micro_batches=4,dp=2,zero=3"),
    ("untied", "pp=2,micro_batches=8,dp=2,tp=2,order=pp-dp-tp"),
    ("untied", "pp=2,micro_batches=2,dp=4,hsdp=2,zero=3"),
    ("tied", "pp=8,micro_batches=8"),
    ("untied", "pp=2,schedule=interleaved,v=4,micro_batches=3"),
    ("tied", "pp=2,schedule=interleaved,micro_batches=5,stages=2-1-3-2,dp=2,zero=2"),
    ("tied", "pp=4,schedule=interleaved,micro_batches=8,tp=2,sp"),
    ("tied", "pp=2,schedule=breadth-first,micro_batches=4,dp=2,zero=3"),
    ("untied", "pp=4,schedule=breadth-first,micro_batches=2"),
    ("untied", "pp=2,schedule=breadth-first,v=1,micro_batches=15"),
    ("tied", "pp=2,schedule=zb-h1,micro_batches=4,dp=2,tp=2,sp,zero=2"),
    ("untied", "pp=4,schedule=zb-h1,micro_batches=5"),
    ("tied", "pp=2,schedule=zb-h2,micro_batches=10,tp=2"),
    ("untied", "pp=4,schedule=zb-h2,micro_batches=16,dp=2,zero=1"),
    ("untied", "pp=2,schedule=zb-v,micro_batches=3,dp=2,zero=3"),
    ("tied", "pp=4,schedule=zb-v,micro_batches=8"),
    ("tied", "pp=2,schedule=zb-v,micro_batches=2,tp=2x2"),
    ("tied", "pp=2,schedule=dualpipe,micro_batches=4,dp=2,zero=2"),
    ("untied", "pp=2,schedule=dualpipe,micro_batches=6,stages=5-3"),
    ("untied", "pp=4,schedule=dualpipe,micro_batches=10,tp=2,sp"),
    ("tied", "pp=8,schedule=dualpipe,micro_batches=16"),
    ("tied", "pp=2,schedule=dualpipe-v,micro_batches=4,dp=2,zero=3"),
    ("untied", "pp=4,schedule=dualpipe-v,micro_batches=8,tp=2,sp,zero=1"),
]


def asked(model, layout, **changes):
    """The job of a case, with a batch that its micro-batches divide."""
    this = replace(job(layout, MODELS[model], **changes), data=DataSpec(sequence=SEQUENCE))
    parts = this.layout.dp * this.layout.micro_batches
    batch = next(batch for batch in (32, 30) if batch % parts == 0)
    return replace(this, train=replace(this.train, batch=batch))


@cache
def truth(model, batch):
    """What plain torch trains. The layout does not matter to it."""
    this = asked(model, "dp=1")
    return plain_torch(replace(this, train=replace(this.train, batch=batch)))


def logged(rank, world, job, steps):
    """(what the trial saw; by step, the instructions as executed and the most micro-batches alive)."""
    ran = []
    step = Engine.step

    def kept(self, *arguments, **options):
        ran.append(step(self, *arguments, **options))
        return ran[-1]

    with patch.object(Engine, "step", kept):  # and no longer: the pool's ranks live on
        record = trial(rank, world, job, steps)
    return record, [([str(done.instruction) for done in one.log], one.peak) for one in ran]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_every_layout_trains_what_plain_torch_trains_as_scheduled_and_planned(pool, model, layout):
    """Loss, every gradient, norms and 5 steps' weights to 1e-10 in float64; order, live micro-batches and bytes exact."""
    this = asked(model, layout)
    mesh, schedule = mesh_of(this), schedule_of(this)
    results = pool.run(logged, this.layout.world, this, STEPS)
    records = [record for record, _ in results]
    errors = compare(together(this, records), truth(model, this.train.batch))
    assert {kind: error for kind, error in errors.items() if not error.value <= 1e-10} == {}
    assert all(record.losses == records[0].losses for record in records)
    assert differing(this, records) is None
    for rank, (_, steps) in enumerate(results):
        place = mesh.coordinate("pp", rank)
        wanted = list(map(str, schedule.instructions(place))), peaks(schedule)[place]
        assert steps == [wanted] * STEPS
    planned = [times(step_transfers(this, rank), STEPS) for rank in range(this.layout.world)]
    assert [row.difference() for row in audit(planned, [record.transfers for record in records]) if not row.ok] == []


def test_the_cases_cover_what_there_is():
    """Every schedule with flush on 2 and 4 ranks, tied and not; each axis that goes with it."""
    layouts = [(model, asked(model, layout).layout) for model, layout in CASES]
    flush = {name for name in SCHEDULES if not name.startswith("pipedream")}
    seen = Counter((layout.schedule, layout.pp) for _, layout in layouts)
    assert {(name, p) for name in flush for p in (2, 4)} | {("1f1b", 8), ("dualpipe", 8)} <= seen.keys()
    assert {(name, model) for name in flush for model in MODELS} <= {(layout.schedule, model) for model, layout in layouts}
