"""ZeRO and hybrid shard running: every stage against plain torch, and every promise of bytes, order and memory."""

import pytest

from reference import MODELS, STEPS, job, plain_torch
from shoal.verify.compare import compare, differing_replicas
from shoal.verify.trial import trial

LAYOUTS = [
    f"dp={ranks},zero={zero},micro_batches={micro_batches}"
    for zero in (1, 2)
    for ranks in (1, 2, 4)
    for micro_batches in (1, 4)
] + ["dp=4,zero=1,hsdp=2", "dp=4,zero=2,hsdp=2,micro_batches=4", "dp=4,hsdp=4,zero=2"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_stage_trains_what_plain_torch_trains(pool, layout, model):
    asked = job(layout, MODELS[model])
    records = pool.run(trial, asked.layout.world, asked, STEPS)
    errors = compare(records[0], plain_torch(asked))
    assert {kind: error for kind, error in errors.items() if error.value > 1e-10} == {}
    assert differing_replicas(records) is None
