"""Recomputation as a key of the layout: the trainer's numbers bit for bit, the forward's transfers once more and no other."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from shoal.axes.pipeline.stage import Stage
from shoal.axes.recompute import run
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.model import block
from shoal.model.decoder import Decoder
from shoal.model.init import initialise
from shoal.plan.pieces import mesh_of
from shoal.plan.traffic import evaluation_transfers, step_transfers, times
from shoal.spec.build import job_from_tree
from shoal.spec.errors import RequestError
from shoal.spec.layout import Layout
from shoal.spec.model import ModelSpec
from shoal.train.trainer import Trainer
from shoal.verify.audit import audit
from shoal.verify.trial import MadeUpBatches, trial
from shoal.verify.verify import small_job, verify

STEPS = 2
LLAMA = {"model": {"preset": "tiny"}, "train": {"clip": 0.0}}
GPT = {"model": {"preset": "gpt2", "dropout": 0.1}, "train": {"clip": 0.0}}  # tied
MOVES = {"tp", "row", "column", "cp", "ring", "ulysses"}  # the axes on which a block's forward sends


def job(layout, tree=LLAMA):
    return small_job(job_from_tree({**tree, "layout": layout}))


CASES = [
    ("dp=1", LLAMA), ("dp=2,zero=1", GPT), ("dp=2,zero=2,micro_batches=2", LLAMA), ("dp=2,zero=3", GPT),
    ("dp=2,zero=3,micro_batches=2,reshard=keep_last", LLAMA), ("tp=2", GPT), ("tp=2,sp", GPT),
    ("tp=2,sp,regather,dp=2,zero=3", LLAMA), ("tp=2x2", GPT), ("cp=2", LLAMA), ("cp=4,ulysses=2", LLAMA),
    ("pp=2", GPT), ("pp=2,schedule=interleaved", LLAMA), ("pp=2,schedule=zb-h1,tp=2,sp", GPT),
    ("pp=2,schedule=dualpipe,dp=2,zero=3", GPT), ("pp=2,schedule=zb-v,tp=2", LLAMA),
    ("pp=2,schedule=pipedream-2bw", LLAMA), ("pp=2,schedule=zb-h1,tp=2x2", LLAMA),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "tree"), CASES, ids=[layout for layout, _ in CASES])
def test_the_trainer_computes_and_sends_what_it_should(pool, layout, tree):
    """Losses, gradients and weights bit for bit; forward's transfers of full blocks in backward too; all as planned."""
    asked = {mode: job(f"{layout},recompute={mode}", tree) for mode in ("none", "selective", "full", 1)}
    ranks = asked["none"].layout.world
    records = {mode: pool.run(trial, ranks, each, STEPS, timeout=60) for mode, each in asked.items()}
    for mode, each in asked.items():
        planned = [times(step_transfers(each, rank), STEPS) for rank in range(ranks)]
        assert all(row.ok for row in audit(planned, [record.transfers for record in records[mode]])), mode
        for plain, again in zip(records["none"], records[mode], strict=True):
            assert plain.losses == again.losses and plain.grad_norms == again.grad_norms
            for a, b in zip(plain.gradients, again.gradients, strict=True):
                assert a and all(np.array_equal(a[name], b[name]) for name in a), mode
            assert all(np.array_equal(plain.weights[name], again.weights[name]) for name in plain.weights), mode
            more = sums(again) - sums(plain)
            assert not sums(plain) - sums(again)
            blocks = forwards_of_blocks(plain)
            assert {place[0] for place in blocks} <= MOVES
            if mode in ("none", "selective"):
                assert not more
            elif mode == "full":
                assert more == blocks
            else:
                assert all(count <= blocks[place] for place, count in more.items())
                assert bool(more) == bool(blocks)


def sums(record):
    """Bytes sent in backward, by axis, primitive, layer and micro-batch; other phases by their names."""
    found = Counter()
    for x in record.transfers:
        found[x.axis, x.op, x.layer, x.micro_batch, x.phase] += x.sent
        found[x.axis, f"{x.op}, calls", x.layer, x.micro_batch, x.phase] += x.calls
    return found


def forwards_of_blocks(record):
    """What the forwards of blocks sent, as if it had been in backward."""
    found = Counter()
    for x in record.transfers:
        if x.phase == "forward" and x.layer is not None and x.axis in MOVES:
            found[x.axis, x.op, x.layer, x.micro_batch, "backward"] += x.sent
            found[x.axis, f"{x.op}, calls", x.layer, x.micro_batch, "backward"] += x.calls
    return +found


def test_an_evaluation_computes_nothing_twice(pool):
    for layout in ("tp=2,sp,recompute=full", "pp=2,tp=2,recompute=1", "dp=2,zero=3,recompute=full"):
        asked = job(layout)
        ranks = range(asked.layout.world)
        measured = pool.run(evaluated, len(ranks), asked)
        planned = [evaluation_transfers(asked, rank, asked.layout.micro_batches) for rank in ranks]
        assert all(row.ok for row in audit(planned, measured))


def evaluated(rank, world, job):
    here = World(mesh_of(job), rank, Ledger())
    batches = MadeUpBatches(job, here.mesh.coordinates(rank)["dp"])
    trainer = Trainer(job, here, batches)
    here.ledger.clear()
    trainer.evaluate(batches.batch(0))
    here.close()
    return here.ledger.transfers()


def test_a_second_forward_with_other_numbers_is_caught(pool):
    verdict = verify(job("tp=2,recompute=full"), 1, pool=pool, run=trial_with_noise)
    assert any(line.startswith("grad: ") for line in verdict.failures)


def trial_with_noise(rank, world, job, steps):
    """Full recomputation whose second forward is not the first."""

    def careless(function, x, ledger):
        return run.recomputed(lambda x: function(x * 1.001 if torch.is_grad_enabled() else x), x, ledger)

    block.recomputed, right = careless, block.recomputed
    try:
        return trial(rank, world, job, steps)
    finally:
        block.recomputed = right


def test_a_second_forward_that_nobody_planned_is_named(pool, monkeypatch):
    monkeypatch.setattr(Stage, "full", lambda stage: [])
    verdict = verify(job("tp=2,recompute=full"), 1, pool=pool)
    assert verdict.failures and all("backward all_reduce over tp" in line for line in verdict.failures)


# ---- compiled

SPEC = ModelSpec(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61, positions_max=16)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_compiled_blocks_keep_as_little(kind, recompute):
    """The gradients and the bytes kept are those of blocks that are not compiled; equal blocks share what is compiled."""
    spec = SPEC
    if kind == "gpt":
        spec = replace(SPEC, norm="layernorm", positions="learned", mlp="gelu", mlp_bias=True)
    torch._dynamo.reset()
    plain, compiled = fresh(spec, recompute), fresh(spec, recompute)
    counting = CompileCounterWithBackend("aot_eager")
    for layer in compiled.blocks.values():
        layer.compile(backend=counting, fullgraph=recompute != "selective")
    expected = kept_in_a_forward(plain)
    assert kept_in_a_forward(compiled) == expected  # compiles
    once = counting.frame_count
    assert once <= {"none": 1, "selective": 12, "full": 2}[recompute]
    assert kept_in_a_forward(compiled) == expected and counting.frame_count == once
    for (name, a), b in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-9, atol=1e-12, msg=name)


def fresh(spec, recompute):
    stage = Stage(range(spec.layers), first=True, last=True, recompute=recompute)
    model = Decoder(spec, torch.float64, stages=[stage])
    initialise(model, spec, 0)
    return model


def kept_in_a_forward(model):
    """Bytes that autograd keeps, but for weights; walks back, too."""
    tokens = torch.arange(34).view(2, 17) % model.spec.vocab
    weights, kept = {p.untyped_storage()._cdata for p in model.parameters()}, {}

    def pack(x):
        if x.untyped_storage()._cdata not in weights:
            kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    found = sum(kept.values())
    loss.backward()
    return found


# ---- the key


def test_the_key_is_a_word_or_a_number_of_blocks():
    for text, value in (("full", "full"), ("2", 2), ("0", "none"), ("selective", "selective"), ("none", "none")):
        layout = Layout.parse(f"recompute={text}")
        assert layout.recompute == value and Layout.parse(str(layout)) == layout
    stage = Stage(range(4, 7), first=False, last=False, recompute=2)
    assert stage.full() == [4, 5] and stage.mode(6) == "none"
    assert replace(stage, recompute=9).full() == [4, 5, 6]  # as many as there are


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("ful", "layout.recompute = ful is not one of none, selective, full, a number of blocks; did you mean full?"),
        ("-1", "layout.recompute = -1 must be at least 0; none would do"),
        ("1.5", "layout.recompute = 1.5 is not one of none, selective, full, a number of blocks; full would do"),
    ],
)
def test_other_values_are_refused(value, line):
    with pytest.raises(RequestError) as refused:
        Layout.parse(f"recompute={value}")
    assert str(refused.value) == line and refused.value.field == "layout.recompute"
