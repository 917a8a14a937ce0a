"""Training under context parallelism: the same numbers as plain torch with a plain softmax on one process, the planned bytes."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from reference import STEPS, differing, plain_torch, together
from shoal.axes.context import kernel, order
from shoal.axes.context.cost import pairs
from shoal.axes.context.run import ContextAttention
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.model import attention, decoder
from shoal.plan.memory import memory
from shoal.plan.pieces import mesh_of
from shoal.plan.traffic import crossing, step_transfers, times
from shoal.spec.build import job_from_tree
from shoal.spec.fit import check_fit
from shoal.spec.layout import Layout
from shoal.train import trainer
from shoal.verify.audit import audit, audit_memory
from shoal.verify.compare import compare
from shoal.verify.trial import MadeUpBatches, trial
from shoal.verify.verify import verify

KINDS = ("ring", "zigzag", "striped", "ulysses", "allgather", "hybrid")
MASKS = {  # packed documents are some four to a sequence
    "causal": {},
    "documents": {"data.packing": "packed"},
    "window": {"model.window": 7},
    "documents, window": {"data.packing": "packed", "model.window": 7},
}
HEADS = {"mha": 1, "gqa": 2, "mqa": None}  # query heads to a KV head
GPT = {
    "norm": "layernorm",
    "positions": "learned",
    "mlp": "gelu",
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
}
TIED = {f"model.{key}": value for key, value in (GPT | {"tied": True, "dropout": 0.1}).items()}


def asked(layout, mask="causal", heads="gqa", **other):
    """A job of two small blocks over 48 tokens. other: fields by their dotted names."""
    size = 6 if "cp=3" in layout else 8
    tree = {
        "layout": layout,
        "model": {
            "layers": 2,
            "hidden": 4 * size,
            "heads": size,
            "kv_heads": size // (HEADS[heads] or size),
            "ffn": 40,
        },
        "data": {"sequence": 48},
        "train": {"batch": 4, "dtype": "float64", "warmup": 2, "steps": STEPS, "learning_rate": 3e-3, "clip": 0.5},
    }
    tree["model"] |= {"vocab": 61, "positions_max": 48}
    tree["train"]["bucket_mb"] = 0.02
    for name, value in (MASKS[mask] | other).items():
        section, field = name.split(".")
        tree[section][field] = value
    return job_from_tree(tree)


def dense_mask(sequence, window, documents, device):
    """(b or 1, 1, s, s): what a token sees, written out pair by pair."""
    rows = np.zeros((1, sequence), int) if documents is None else documents.numpy()
    seen = [
        [[q - (window or sequence) < k <= q and row[k] == row[q] for k in range(sequence)] for q in range(sequence)]
        for row in rows
    ]
    return torch.tensor(seen)[:, None]


def plain_softmax(q, k, v, mask, window):
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~mask, -math.inf).softmax(-1), v)


TRUTHS = {}


def truth(job, monkeypatch):
    """Five steps of plain torch on one process, with attention by a plain softmax over a dense mask."""
    job = replace(job, layout=Layout(), data=replace(job.data, pad=False))
    key = job.model, job.data
    if key not in TRUTHS:
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "visible", dense_mask)
            patch.setattr(attention, "attend", plain_softmax)
            TRUTHS[key] = plain_torch(job)
    return TRUTHS[key]


def check(job, records, monkeypatch):
    """Losses, every gradient of every step, weights after the last, norms; what every rank sent, and what it held."""
    check_fit(job.model, job.layout, job.sequence, job.train.batch, job.sequence - job.data.sequence)
    case = f"{job.layout}, {job.model.kv_heads} KV heads, window {job.model.window}, {job.data.packing}"
    for kind, error in compare(together(job, records), truth(job, monkeypatch)).items():
        assert error.value <= 1e-10, f"{case}: {kind}, {error.where} {error.value}"
    assert differing(job, records) is None, case
    planned = [times(step_transfers(job, rank), STEPS) for rank in range(job.layout.world)]
    rows = audit(planned, [record.transfers for record in records])
    rows += [row for rank, x in enumerate(records) for row in audit_memory(rank, memory(job, rank), x.memory)]
    assert [row.difference() for row in rows if not row.ok] == [], case


def trials(rank, world, jobs):
    return [trial(rank, world, job, STEPS) for job in jobs]


def alone(ranks):
    """Every kind under three masks with three kinds of heads, so that each mask meets each kind of heads at some kind."""
    cases = []
    for place, kind in enumerate(KINDS):
        ulysses = f",ulysses={3 if ranks == 3 else 2}" if kind == "hybrid" else ""
        for number, mask in enumerate(("causal", "documents", "window")):
            cases.append(asked(f"cp={ranks},cp_kind={kind}{ulysses}", mask, list(HEADS)[(place + number + ranks) % 3]))
    return cases


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_kind_trains_what_one_process_trains(pool, ranks, monkeypatch):
    jobs = alone(ranks)
    found = pool.run(trials, ranks, jobs)
    for job, *records in zip(jobs, *found, strict=True):
        check(job, records, monkeypatch)


TOGETHER = {
    2: [
        asked("cp=2,zero=3,recompute=full", "window", "mha"),
        asked("cp=2,micro_batches=2,cp_kind=striped,zero=1", "documents, window", "gqa"),
        asked("cp=2,cp_kind=allgather", "documents", "gqa", **TIED),
    ],
    4: [
        asked("cp=2,tp=2", "documents", "gqa", **{"model.qk_norm": True}),
        asked("cp=2,tp=2,order=cp-tp-dp-pp", "window", "mqa"),
        asked("cp=2,dp=2,cp_kind=allgather", "documents, window", "gqa"),
        asked("cp=2,pp=2", "documents", "gqa"),
        asked("cp=2,pp=2,cp_kind=ulysses", "causal", "mha", **TIED),
        asked("cp=2,dp=2,zero=3,order=dp-cp", "causal", "mqa", **TIED),
        asked("cp=4,zero=3,cp_kind=ulysses,recompute=selective", "documents", "mqa"),
        asked("cp=4,cp_kind=hybrid,ulysses=2", "window", "gqa", **TIED),
    ],
    6: [
        asked("cp=3,tp=2,sp,cp_kind=striped", "causal", "mha"),
        asked("cp=3,tp=2,sp,cp_kind=ulysses", "window", "mqa"),
        asked("cp=3,dp=2,zero=1,cp_kind=hybrid,ulysses=3", "documents", "gqa"),
        asked("cp=3,pp=2,cp_kind=ring", "documents", "mqa"),
    ],
    8: [
        asked("cp=4,tp=2,sp,cp_kind=ring", "window", "mqa"),
        asked("cp=4,tp=2,sp,ulysses=2", "documents", "gqa", **TIED),
        asked("cp=4,tp=2,sp,regather,zero=3", "documents, window", "gqa"),
        asked("cp=2,tp=2x2,cp_kind=ulysses", "documents", "mha"),
        asked("cp=8,zero=3,ulysses=4", "causal", "gqa"),
        asked("cp=2,dp=4,hsdp=2,zero=2,cp_kind=striped", "documents", "mha"),
        asked("cp=4,pp=2,cp_kind=striped", "window", "gqa"),
        asked("cp=2,tp=2,sp,pp=2,cp_kind=ulysses", "documents", "gqa"),
        asked("cp=2,pp=2,dp=2,zero=1,micro_batches=2,cp_kind=allgather", "causal", "mqa", **TIED),
    ],
}


@pytest.mark.parametrize("world", TOGETHER)
def test_with_other_axes_too(pool, world, monkeypatch):
    """With tensor, sequence, data and pipeline ranks, ZeRO, dropout and tied embeddings, under every mask."""
    found = pool.run(trials, world, TOGETHER[world])
    for job, *records in zip(TOGETHER[world], *found, strict=True):
        check(job, records, monkeypatch)


SHORT = {"data.sequence": 43, "data.pad": True, "model.positions_max": 43}
FILLED = {
    3: [asked("cp=3,ulysses=3", "documents", "gqa", **SHORT)],
    4: [
        asked("cp=2,dp=2,cp_kind=allgather,zero=3", "causal", "mha", **SHORT, **TIED),
        asked("cp=4", "documents", "gqa", **SHORT),
        asked("cp=4,cp_kind=ulysses", "window", "mqa", **SHORT),
        asked("cp=4,cp_kind=striped", "documents, window", "gqa", **SHORT),
    ],
    8: [
        asked("cp=4,tp=2,sp,cp_kind=ring", "documents", "mqa", **SHORT, **TIED),
        asked("cp=8", "causal", "mha", **SHORT),
    ],
}


@pytest.mark.parametrize("world", FILLED)
def test_sequences_that_are_filled_up_change_nothing(pool, world, monkeypatch):
    """43 tokens, a prime, against 43 tokens on one process; the model has no more positions than that."""
    found = pool.run(trials, world, FILLED[world])
    for job, *records in zip(FILLED[world], *found, strict=True):
        assert job.sequence > 43
        check(job, records, monkeypatch)


def summed_over_dp_alone(rank, world, job, steps):
    """A trial that forgets the context ranks where gradients are summed, or sharded."""
    right = trainer.stores_of

    def wrong(job, rank):
        return [replace(store, axes=("dp",), cut=replace(store.cut, axis="dp")) for store in right(job, rank)]

    trainer.stores_of = wrong
    try:
        return trial(rank, world, job, steps)
    finally:
        trainer.stores_of = right


def trials_that_see_all(rank, world, jobs):
    """Trials of models whose tokens see those after them too, which no field of a model asks for yet."""
    view = ContextAttention.view
    ContextAttention.view = lambda self, sequence, causal, **rest: view(self, sequence, causal=False, **rest)
    try:
        return trials(rank, world, jobs)
    finally:
        ContextAttention.view = view


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_attention_that_is_not_causal_trains_under_every_kind_too(pool, ranks, monkeypatch):
    ulysses = {"hybrid": f",ulysses={3 if ranks == 3 else 2}"}
    layouts = [f"cp={ranks},cp_kind={kind}{ulysses.get(kind, '')}" for kind in KINDS]
    layouts += ["cp=2,tp=2", "cp=2,tp=2,sp", "cp=2,dp=2,zero=3"] if ranks == 2 else []
    jobs = [asked(layout, "causal", list(HEADS)[place % 3]) for place, layout in enumerate(layouts)]
    causal = [truth(this, monkeypatch) for this in jobs]
    monkeypatch.setattr(decoder, "visible", lambda sequence, *_: torch.ones(1, 1, sequence, sequence, dtype=torch.bool))
    monkeypatch.setattr(attention, "attend", plain_softmax)
    for this, before in zip(jobs, causal, strict=True):
        records = [of_rank[0] for of_rank in pool.run(trials_that_see_all, this.layout.world, [this])]
        expected = plain_torch(replace(this, layout=Layout()))
        for kind, error in compare(together(this, records), expected).items():
            assert error.value <= 1e-10, f"{this.layout}: {kind}, {error.where} {error.value}"
        assert differing(this, records) is None
        assert abs(before.losses[0] - expected.losses[0]) > 1e-6, "a causal mask gives other numbers"


@pytest.mark.parametrize("layout", ["cp=2", "cp=4,cp_kind=ulysses", "cp=2,dp=2", "cp=2,dp=2,cp_kind=striped,zero=1"])
def test_gradients_that_are_not_summed_over_context_ranks_are_named(pool, layout):
    """A sum over dp instead of dp x cp: with dp = 1 no sum at all (as in picotron, whose losses look normal)."""
    job = asked(layout, "documents")
    assert verify(job, steps=2, pool=pool).failures == []
    broken = verify(job, steps=2, pool=pool, run=summed_over_dp_alone)
    assert any(line.startswith("grad: gradient of ") for line in broken.failures)
    assert any("which should hold the same bits" in line for line in broken.failures)
    op = "reduce_scatter" if job.layout.zero else "all_reduce"
    assert any(f"backward {op} over dp+cp: rank 0 planned " in line for line in broken.failures)
    assert broken.errors["grad"].value > 0.01


def places_of_a_ring(rank, world, job, steps):
    """A trial whose tokens and positions lie as in a contiguous ring, while attention believes in a zig-zag."""
    right = ContextAttention.places
    ContextAttention.places = lambda self, length: order.places("ring", length, self.group.size, self.group.index)
    try:
        return trial(rank, world, job, steps)
    finally:
        ContextAttention.places = right


def loss_times_the_ranks(rank, world, job, steps):
    """A trial whose losses are multiplied by the number of context ranks (Megatron-LM has had both)."""
    right = decoder.Decoder.run
    decoder.Decoder.run = lambda self, batch: right(self, batch) * job.layout.cp
    try:
        return trial(rank, world, job, steps)
    finally:
        decoder.Decoder.run = right


@pytest.mark.parametrize("fault", [places_of_a_ring, loss_times_the_ranks])
def test_other_faults_are_named(pool, fault):
    errors = verify(asked("cp=4"), steps=2, pool=pool, run=fault).errors
    assert errors["loss"].value > 1e-4 and errors["grad"].value > 1e-4


def counted_pairs(rank, world, job):
    """Pairs of query and key that this rank's kernels compute in a step, for one head and sample: forward, backward."""
    counts = Counter()
    forward, backward = kernel.forward, kernel.backward

    def count(name, q, k, seen):
        hidden = seen.sum() if isinstance(seen, torch.Tensor) else 0
        square = q.shape[1] * (q.shape[1] - 1) // 2 if isinstance(seen, str) and seen == "causal" else 0
        counts[name] += int(q.shape[1] * k.shape[1] - hidden - square)

    def counted_forward(q, k, v, seen, scale):
        count("forward", q, k, seen)
        return forward(q, k, v, seen, scale)

    def counted_backward(gradient, q, k, v, out, lse, seen, scale):
        count("backward", q, k, seen)
        return backward(gradient, q, k, v, out, lse, seen, scale)

    kernel.forward, kernel.backward = counted_forward, counted_backward
    try:
        trainer.Trainer(job, World(mesh_of(job), rank, Ledger()), MadeUpBatches(job, 0)).step(0)
    finally:
        kernel.forward, kernel.backward = forward, backward
    return counts["forward"], counts["backward"]


@pytest.mark.parametrize(
    ("kind", "each"), [("ring", [136, 392, 648, 904]), ("zigzag", [520] * 4), ("striped", [496, 512, 528, 544])]
)
def test_each_rank_computes_as_much_as_planned(pool, kind, each):
    """64 tokens on 4 ranks (spec CP-5), in forward and in backward; of two layers."""
    job = asked(f"cp=4,cp_kind={kind}", **{"data.sequence": 64, "model.positions_max": 64})
    assert pairs(crossing(job)).sum(1).tolist() == each
    assert pool.run(counted_pairs, 4, job) == [(2 * work, 2 * work) for work in each]


def test_each_rank_computes_as_much_as_planned_under_a_window(pool):
    job = asked("cp=4", "window")
    planned = pairs(crossing(job)).sum(1).tolist()
    assert sum(planned) == sum(min(7, place + 1) for place in range(48))
    assert pool.run(counted_pairs, 4, job) == [(2 * work, 2 * work) for work in planned]
