"""The most that a rank holds by category: the closed form against real runs, and against numbers worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.axes.expert import cost
from shoal.comm.ledger import Ledger
from shoal.comm.rehearsal import rehearsed
from shoal.comm.world import World
from shoal.kernels.linear import PutOff
from shoal.plan.memory import CATEGORIES, memory
from shoal.plan.pieces import mesh_of
from shoal.spec.build import job_from_tree
from shoal.spec.job import Job, TrainSpec
from shoal.spec.layout import Layout, layout_tree
from shoal.spec.model import ModelSpec
from shoal.train.trainer import Trainer
from shoal.verify.audit import MemoryRow
from shoal.verify.matrix import DEEPSEEK
from shoal.verify.measure import Kept, measured_step
from shoal.verify.rehearsal import Blank, WithoutValues
from shoal.verify.trial import MadeUpBatches, trial
from shoal.verify.verify import small_job, verify

LAYOUTS = {
    2: ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,zero=3,reshard=keep_last", "tp=2", "tp=2,sp,regather",
        "cp=2,cp_kind=ulysses", "pp=2", "pp=2,schedule=gpipe,recompute=1", "pp=2,schedule=zb-h2,recompute=full",
        "pp=2,schedule=pipedream"],
    4: ["dp=2,pp=2,zero=3,reshard=never", "dp=2,pp=2,zero=3,schedule=interleaved,v=2,reshard=keep_last",
        "dp=2,pp=2,zero=2,schedule=zb-v", "tp=2x2,recompute=full", "tp=2,sp,cp=2,recompute=selective", "dp=4,hsdp=2,zero=2",
        "pp=4,schedule=pipedream-vertical", "tp=2,pp=2,schedule=dualpipe"],
}  # fmt: skip
MODELS = [{"preset": "tiny"}, {"preset": "gpt2"}, {"preset": "mistral-7b", "tied": True}]


def job(layout, model=MODELS[0], **changes):
    small = small_job(job_from_tree({"model": model, "layout": layout_tree(layout)}))
    return replace(small, **changes)


def held(rank, world, jobs):
    """The most bytes by category of each job's second step on a rank of a real group."""
    found = []
    for this in jobs:
        mesh = mesh_of(this)
        here = World(mesh, rank, Ledger()) if world > 1 else World.single()
        trainer = Trainer(this, here, MadeUpBatches(this, mesh.coordinate("dp", rank), whole=True))
        trainer.step(0)
        found.append(measured_step(trainer, 1))
        here.close()
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_real_run_holds_what_is_planned(pool, world):
    """To the byte, for three kinds of models, every category, on every rank."""
    layouts = LAYOUTS.get(world, ["dp=1", "recompute=selective", "recompute=full", "recompute=1"])
    jobs = [job(layout, model) for model in MODELS for layout in layouts]
    jobs = [this for this in jobs if not (this.model.tied and "pipedream" in this.layout.schedule)]
    jobs += [replace(this, data=replace(this.data, packing="packed")) for this in jobs[:2]]
    for rank, results in enumerate(pool.run(held, world, jobs)):
        for this, found in zip(jobs, results, strict=True):
            assert found == memory(this, rank), f"{this.model.name}, {this.layout}, rank {rank}"


def test_one_layer_by_hand():
    """h = 8, two heads of 4, ffn 16, 32 ids, bfloat16; one sequence of 4 tokens."""
    model = ModelSpec(layers=1, hidden=8, heads=2, ffn=16, vocab=32)
    this = Job(model, Layout(), train=TrainSpec(batch=1, dtype="bfloat16"))
    this = replace(this, data=replace(this.data, sequence=4))
    parameters = 2 * 32 * 8 + 3 * 8 + 4 * 8 * 8 + 3 * 8 * 16
    token = 2 * 8 + 2 * 8  # the inputs of both norms, and what they give
    token += 2 * 8 + 8 + 8  # queries and keys, turned; values; the output
    token += 3 * 16  # gate, up and their product
    statistics = 2 + 2  # of the norms, and of each head's softmax, in float32
    token = 2 * token + 4 * statistics
    end = 8 + 2 * 8 + 4 + 2 * 8  # ids; the last norm's input and 1 / rms; the gradient of what it gives
    assert memory(this, 0) == {
        "weights": 2 * parameters,
        "gradients": 2 * parameters,
        "optimizer": 12 * parameters,
        "gathered": 0,
        "buckets": 0,
        "versions": 0,
        "activations": 4 * (token + end) + 4 * 32 * 8,  # the gradient of the head's weight is float32
    }


def test_everything_that_outlives_a_forward_is_counted():
    """Between forward and backward nothing lives but the states, the batch and what `memory` and its docstring name."""
    this = job("tp=2,dp=2", train=replace(job("tp=2,dp=2").train, dtype="float32"))
    this = replace(this, layout=Layout.parse("tp=2,sp"))
    mesh = mesh_of(this)
    lived = []
    with rehearsed(mesh, 0) as world, FakeTensorMode(), WithoutValues() as seen:
        trainer = Trainer(this, world, Blank(this), drawn=False)
        run = trainer.model.run

        def watched(batch):
            before = seen.now
            loss = run(batch)
            lived.append(seen.now - before)
            return loss

        trainer.model.run = watched
        trainer.step(0)
    b, s, d = this.micro_batch, this.sequence, this.model.head_size
    ids, rotation, loss = b * s * 8, 2 * s * d * 4, 4
    assert set(lived) == {memory(this, 0)["activations"] + rotation + loss}
    assert ids  # looked up on two ranks, so that copies of them are kept, which `activations` has


def test_what_waits_for_a_put_off_gradient_counts_until_it_is_made():
    kept, queue, weight = Kept([]), PutOff(), torch.nn.Parameter(torch.ones(3, 2))
    trainer = type("", (), {})()
    trainer.model = type("", (), {"blocks": {}})()
    trainer.pipeline = type("", (), {"engine": type("", (), {"queues": {0: queue}})()})()
    with kept.watching(trainer):
        x, gradient = torch.ones(5, 2), torch.ones(5, 3)
        queue.add(weight, lambda gradient, x: gradient.t() @ x, gradient, x)
        queue.add(weight, lambda x: torch.ones(3, 2), x[:2])
        assert kept.now == 0, "its block's graph may still be there"
        taken = queue.take()
        assert kept.now == x.nbytes + gradient.nbytes, "each storage once"
        taken.run()
        assert kept.now == 0 and kept.peak == x.nbytes + gradient.nbytes
    assert queue.add.__func__ is PutOff.add and weight.grad is not None


EXPERTS = {  # softmax and top 2 alone; groups, a bias and shared experts; losses and drops; a gate; one expert each
    "plain": {},
    "deepseek": DEEPSEEK["model"]["moe"] | {"experts": 8, "first_dense": 0},
    "drops": {"capacity": 1.0, "aux_loss": 0.01, "z_loss": 0.001},
    "gated": {"shared_experts": 1, "shared_gate": True, "router": "sigmoid", "z_loss": 0.01, "balance": "micro_batch"},
    "switch": {"top_k": 1, "normalised": False, "aux_loss": 0.01, "capacity": 0.5, "every": 2},
}
WITH_EXPERTS = {
    1: ["dp=1", "recompute=selective", "recompute=full", "micro_batches=3"],
    2: ["dp=2,ep=2", "dp=2,ep=2,dedup,recompute=selective", "tp=2", "tp=2,ep=2", "tp=2,sp,recompute=selective", "tp=2,etp=2",
        "tp=2,etp=2,sp,recompute=selective", "cp=2,ep=2,recompute=full", "pp=2,schedule=zb-h1,recompute=selective"],
    4: ["dp=2,ep=2,pp=2,schedule=zb-h1", "dp=2,ep=2,pp=2,zero=3,schedule=zb-v,dedup,recompute=selective", "tp=4,ep=4,dedup",
        "tp=2,ep=2,pp=2,sp,schedule=dualpipe,recompute=1", "tp=2,etp=2,dp=2,ep=2,sp,zero=3", "dp=4,ep=4,micro_batches=3",
        "dp=4,ep=2,zero=3,hsdp=2", "tp=2,etp=2,pp=2,schedule=zb-h2", "cp=2,ep=2,pp=2,schedule=interleaved,v=2,zero=2",
        "dp=2,ep=2,pp=2,schedule=pipedream"],
}  # fmt: skip


def held_and_routed(rank, world, jobs):
    """The most bytes by category of each job's last step, and what the rank's routers sent in it."""
    records = [trial(rank, world, this, 1) for this in jobs]
    return [(record.memory, record.routed) for record in records]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_hold_what_is_planned_from_their_routing(pool, kind, world):
    """To the byte, every category, on every rank: which differ, as tokens do not go everywhere alike."""
    preset = {"preset": "moe-tiny", "moe": {"experts": 8, "top_k": 2, "expert_ffn": 32} | EXPERTS[kind]}
    jobs = [job(layout, preset) for layout in WITH_EXPERTS[world]]
    results = [*zip(*pool.run(held_and_routed, world, jobs), strict=True)]  # by job, then by rank
    for this, of_ranks in zip(jobs, results, strict=True):
        routed = {rank: sent for rank, (_, sent) in enumerate(of_ranks)}
        for rank, (found, _) in enumerate(of_ranks):
            assert found == memory(this, rank, routed), f"{this.layout}, rank {rank}"
    if world > 1:
        even = [len({found["activations"] for found, _ in of_ranks}) == 1 for of_ranks in results]
        assert not all(even), "routing makes a difference"


@pytest.mark.parametrize(
    ("layout", "bucket_mb"),
    [("dp=2,zero=2", 0.05), ("dp=2,pp=2,zero=2,schedule=pipedream-2bw", 0.03), ("dp=4,ep=2,zero=2", 0.005)],
)
def test_matrices_of_one_operation_in_two_buckets(pool, layout, bucket_mb):
    """Experts' two matrices get their gradients at once, the one of the later bucket first; still no third is whole."""
    deep = job(layout, {"preset": "moe-tiny", "moe": EXPERTS["gated"] | {"experts": 8}})
    deep = replace(deep, model=replace(deep.model, layers=4), train=replace(deep.train, bucket_mb=bucket_mb))
    results = pool.run(held_and_routed, deep.layout.world, [deep])
    routed = {rank: sent for rank, [(_, sent)] in enumerate(results)}
    assert [found for [(found, _)] in results] == [memory(deep, rank, routed) for rank in range(deep.layout.world)]


@pytest.mark.parametrize(("tp", "etp", "ep"), [(4, 1, 1), (4, 1, 4), (3, 1, 1), (3, 3, 1), (4, 4, 1)])
@pytest.mark.parametrize("batch", [1, 2])
def test_ranks_with_few_tokens_and_none(pool, tp, etp, ep, batch):
    """Two tokens of a sequence for three or four tensor ranks."""
    few = job(f"tp={tp},etp={etp},ep={ep}", {"preset": "moe-tiny", "moe": EXPERTS["gated"]})
    few = replace(few, data=replace(few.data, sequence=2), train=replace(few.train, batch=batch))
    results = pool.run(held_and_routed, tp, [few])
    routed = {rank: sent for rank, [(_, sent)] in enumerate(results)}
    assert [found for [(found, _)] in results] == [memory(few, rank, routed) for rank in range(tp)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_routing_keeps_float32_at_least(pool, dtype):
    narrow = job("dp=2,ep=2", {"preset": "moe-tiny", "moe": EXPERTS["gated"], "dropout": 0.1, "norm": "layernorm"})
    narrow = replace(narrow, train=replace(narrow.train, dtype=dtype))
    results = pool.run(held_and_routed, 2, [narrow])
    routed = {rank: sent for rank, [(_, sent)] in enumerate(results)}
    assert [found for [(found, _)] in results] == [memory(narrow, rank, routed) for rank in range(2)]


def test_before_a_run_experts_hold_the_mean():
    """Without all-to-all and drops nothing depends on the routing; else all sets of experts are equally likely."""
    model = {"preset": "moe-tiny", "moe": {"experts": 8, "top_k": 2}}
    this = job("dp=2,micro_batches=2", model)
    routed = {rank: {} for rank in range(2)}
    assert memory(this, 0) == memory(this, 0, routed) == memory(this, 1)
    for dedup in (False, True):
        this = job("dp=4,ep=4" + ",dedup" * dedup, model)
        tokens = this.micro_batch * this.sequence
        random, found = np.random.default_rng(0), []
        for _ in range(200):
            chosen = [np.stack([random.permutation(8)[:2] for _ in range(tokens)]) for _ in range(4)]
            tables = cost.rows_between(chosen, 8), cost.rows_between(chosen, 8, dedup)
            routed = {
                rank: dict.fromkeys(range(this.model.layers), np.stack([table[rank] for table in tables])[None])
                for rank in range(4)
            }
            found.append(memory(this, 0, routed)["activations"])
        assert memory(this, 0)["activations"] == pytest.approx(np.mean(found), rel=0.005)
        assert set(memory(this, 0)) == set(CATEGORIES)


def keeps_more(rank, world, job, steps):
    """A trial that keeps what it should have made again."""
    from shoal.model import block

    recomputed = block.recomputed
    block.recomputed = lambda function, x, ledger: function(x)
    try:
        return trial(rank, world, job, steps)
    finally:
        block.recomputed = recomputed


def shards_nothing(rank, world, job, steps):
    """A trial whose optimizer keeps the states of all ranks."""
    from shoal.train import optimizer

    state_bytes = optimizer.AdamW.state_bytes
    optimizer.AdamW.state_bytes = lambda self: world * state_bytes(self)
    try:
        return trial(rank, world, job, steps)
    finally:
        optimizer.AdamW.state_bytes = state_bytes


def out_of_order(rank, world, job, steps):
    """A trial of another schedule than the one asked for, which computes the same and sends the same."""
    return trial(rank, world, replace(job, layout=replace(job.layout, schedule="gpipe")), steps)


@pytest.mark.parametrize(
    ("layout", "run", "failure"),
    [
        ("dp=2,recompute=full", keeps_more, "memory, activations: rank 0 planned"),
        ("dp=2,zero=1", shards_nothing, "memory, optimizer: rank 0 planned"),
        ("pp=2", out_of_order, "schedule: rank 0 planned B0 as instruction 2, executed F2"),
    ],
)
def test_verify_notices(pool, layout, run, failure):
    good = verify(job(layout), 1, pool=pool)
    assert good.ok and good.memory and bool(good.schedule) == ("pp" in layout)
    broken = verify(job(layout), 1, pool=pool, run=run)
    assert not broken.ok and any(line.startswith(failure) for line in broken.failures), broken.failures
    assert all(error.value <= broken.limits[kind] for kind, error in broken.errors.items()), "the numbers are right"


def test_one_percent():
    assert MemoryRow(0, "weights", 1000, 1010).ok and MemoryRow(0, "weights", 1000, 990).ok
    assert not MemoryRow(0, "weights", 1000, 1011).ok and not MemoryRow(0, "weights", 0, 1).ok
