"""Grids of tensor ranks in training: losses, every gradient, norms and 5 steps' weights of plain torch, and the planned bytes."""

from dataclasses import replace
from functools import cache

import pytest

from reference import STEPS, differing, job, plain_torch, together
from shoal.plan.traffic import step_transfers, times
from shoal.spec.job import DataSpec
from shoal.spec.model import ModelSpec
from shoal.verify.audit import audit
from shoal.verify.compare import compare
from shoal.verify.trial import trial

MODELS = {
    # 2 x 2: KV heads that are cut; one that both columns keep, with sizes that no side divides; all of them, tied
    "cut": ModelSpec(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61, positions_max=12, qk_norm=True),
    "kept": ModelSpec(
        layers=2, hidden=32, heads=4, kv_heads=1, ffn=51, vocab=67, positions_max=12, window=5, qkv_bias=True, dropout=0.2
    ),
    "all": ModelSpec(
        layers=2, hidden=32, heads=4, ffn=48, vocab=61, positions_max=12, norm="layernorm", positions="learned", mlp="gelu",
        qkv_bias=True, output_bias=True, mlp_bias=True, tied=True, dropout=0.1,
    ),
    # 3 x 3: the same three cases
    "cut in three": ModelSpec(layers=2, hidden=36, heads=6, kv_heads=3, head_size=6, ffn=50, vocab=67, positions_max=12),
    "kept by three": ModelSpec(
        layers=2, hidden=36, heads=6, kv_heads=1, head_size=6, ffn=48, vocab=61, positions_max=12, tied=True, dropout=0.1
    ),
    "all, in three": ModelSpec(layers=2, hidden=36, heads=6, head_size=6, ffn=48, vocab=61, positions_max=12, qk_norm=True),
}  # fmt: skip
CASES = [
    ("cut", "tp=2x2"),
    ("cut", "dp=2,tp=2x2,zero=3"),
    ("kept", "tp=2x2,micro_batches=2"),
    ("kept", "dp=2,tp=2x2,zero=1"),
    ("all", "tp=2x2"),
    ("all", "dp=2,tp=2x2,zero=2,micro_batches=3"),
    ("cut in three", "tp=3x3"),
    ("kept by three", "tp=3x3,micro_batches=2"),
    ("all, in three", "tp=3x3"),
]


def asked(model, layout):
    this = job(layout, MODELS[model])
    return replace(this, data=DataSpec(sequence=12), train=replace(this.train, batch=12))


@cache
def truth(model):
    return plain_torch(asked(model, "dp=1"))


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_a_grid_trains_what_plain_torch_trains(pool, model, layout):
    this = asked(model, layout)
    records = pool.run(trial, this.layout.world, this, STEPS)
    errors = compare(together(this, records), truth(model))
    assert {kind: error for kind, error in errors.items() if not error.value <= 1e-10} == {}
    assert differing(this, records) is None
    planned = [times(step_transfers(this, rank), STEPS) for rank in range(this.layout.world)]
    assert [row.difference() for row in audit(planned, [r.transfers for r in records]) if not row.ok] == []
