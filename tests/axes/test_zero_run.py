"""ZeRO and hybrid shard running: every stage against plain torch, and every promise of bytes, order and memory."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from reference import MODELS, STEPS, differing, job, plain_torch
from shoal.axes.zero import cost
from shoal.axes.zero.part import Part
from shoal.axes.zero.run import ZeRO
from shoal.axes.zero.shard import shard
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.mesh import Mesh
from shoal.plan.traffic import parts_of, sharding, step_transfers, times
from shoal.spec.inventory import Parameter, inventory
from shoal.spec.layout import Layout
from shoal.spec.model import ModelSpec
from shoal.train.trainer import Trainer
from shoal.verify.audit import audit
from shoal.verify.compare import Record, compare
from shoal.verify.trial import MadeUpBatches, trial

LAYOUTS = [
    f"dp={ranks},zero={zero},micro_batches={micro_batches}"
    for zero in (1, 2, 3)
    for ranks in (1, 2, 4)
    for micro_batches in (1, 4)
] + [
    "dp=3,zero=1,zero1=ar+ag",
    "dp=4,zero=1,hsdp=2",
    "dp=4,zero=2,hsdp=2,micro_batches=4",
    "dp=4,hsdp=4,zero=2",
    "dp=4,zero=3,hsdp=2,micro_batches=4",
    "dp=2,zero=3,reshard=never,micro_batches=4",
    "dp=2,zero=3,reshard=keep_last,micro_batches=4",
]


def fitting(layout, model, **changes):
    """The reference job for a layout; 24 sequences where 16 do not divide."""
    asked = job(layout, model, **changes)
    return replace(asked, train=replace(asked.train, batch=24)) if asked.layout.dp == 3 else asked


@cache
def truth(model, batch):
    """What plain torch trains. The layout does not matter to it."""
    alone = job("dp=1", MODELS[model])
    return plain_torch(replace(alone, train=replace(alone.train, batch=batch)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_stage_trains_what_plain_torch_trains_and_sends_what_is_planned(pool, layout, model):
    """Tied embeddings, dropout, biases; sizes that no group divides. Numbers to 1e-10 after 5 AdamW steps, bytes exact."""
    asked = fitting(layout, MODELS[model])
    records = pool.run(trial, asked.layout.world, asked, STEPS)
    errors = compare(records[0], truth(model, asked.train.batch))
    assert {kind: error for kind, error in errors.items() if not error.value <= 1e-10} == {}
    assert differing(asked, records) is None
    world = range(asked.layout.world)
    rows = audit([times(step_transfers(asked, rank), STEPS) for rank in world], [r.transfers for r in records])
    assert [row.difference() for row in rows if not row.ok] == []


def one_part(count):
    """A model that is one matrix of `count` elements."""
    return {"all": [Parameter("w", (count,), "all", True, "zeros", 0.0, None)]}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_closed_forms_of_the_spec(zero):
    """Psi = 1000, N = 4, 16 bit: 3000 B for stages 1 and 2, 4500 for AR+AG and stage 3; 8 micro-batches 36,000."""
    cut = cost.Sharding(stage=zero, ranks=4, width=2, reduce_width=2)

    def sent(cut, micro_batches=1):
        transfers = cost.step_transfers(one_part(1000), cut, 0, 0, micro_batches)
        return sum(t.sent for t in transfers if t.op in ("reduce_scatter", "all_gather") or t.phase == "backward")

    assert sent(cut) == {1: 3000, 2: 3000, 3: 4500}[zero]
    assert sent(cut, 8) == {1: 3000, 2: 1500 * 9, 3: 36_000}[zero]
    if zero == 1:
        assert sent(replace(cut, literal=True)) == 4500


def test_memory_of_the_spec():
    """Psi = 7.5e9, N = 64: 31.4, 16.6 and 1.9 GB; Psi = 1e9, N = 8: 5.5, 3.75 and 2 GB (spec MEM-2)."""
    for psi, ranks, wanted in ((7_500_000_000, 64, (31.4, 16.6, 1.875)), (1_000_000_000, 8, (5.5, 3.75, 2.0))):
        for zero, gigabytes in zip((1, 2, 3), wanted, strict=True):
            cut = cost.Sharding(stage=zero, ranks=ranks, width=2, reduce_width=2, state_width=4, masters=True)
            held = sum(cost.resting_bytes(one_part(psi), cut, 0).values()) / 1e9
            assert abs(held - gigabytes) < 0.05


def test_stage_3_gathers_forward_and_backward_and_reduces_in_order(pool):
    """Spec Z-3: AG 1..U, AG U..1, RS U..1; U = embedding, two blocks, head."""
    asked = job("dp=2,zero=3", MODELS["llama-like"])
    (first, later), _ = pool.run(calls_of_steps, 2, asked)
    units = ["embedding", "blocks.0", "blocks.1", "head"]
    for calls in (first, later):
        assert [unit for op, unit in calls if op == "forward gather"] == units
        assert [unit for op, unit in calls if op == "backward gather"] == units[::-1]
        assert [unit for op, unit in calls if op == "reduce"] == units[::-1]
    # from the second step on, the next unit is fetched before this one computes, and the last is still on its way
    assert later.index(("forward gather", "blocks.1")) < later.index(("free", "blocks.0"))
    assert later.index(("backward gather", "blocks.0")) < later.index(("reduce", "blocks.1"))


def calls_of_steps(rank, world, job):
    here = World(Mesh.of(job.layout), rank, Ledger())
    trainer = Trainer(job, here, MadeUpBatches(job, rank))
    names = {id(part): part.slots[0].name for part in trainer.states.parts}
    calls = []

    def watched(method, words):
        original = getattr(Part, method)

        def watching(part, *arguments):
            name = names[id(part)].removesuffix(".weight")
            unit = ".".join(name.split(".")[:2]) if name.startswith("blocks") else name.split(".")[0]
            busy = part.gathered or part._gathering is not None
            if (method, busy) in (("gather", False), ("free", True)) or method == "reduce":
                phase = f"{here.ledger.place.phase} " if method == "gather" else ""
                calls.append((phase + words, unit))
            return original(part, *arguments)

        setattr(Part, method, watching)
        return original

    originals = {method: watched(method, method) for method in ("gather", "free", "reduce")}
    try:
        steps = []
        for step in range(2):
            calls.clear()
            trainer.step(step)
            steps.append(list(calls))
    finally:
        for method, original in originals.items():
            setattr(Part, method, original)
    here.close()
    return steps


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if "dp=1" not in layout])
@pytest.mark.parametrize("model", MODELS)
def test_memory_is_what_the_formulas_say(pool, layout, model):
    """Resting and peak, per category and rank, exactly."""
    asked = fitting(layout, MODELS[model])
    cut, mesh = sharding(asked), Mesh.of(asked.layout)
    parts = parts_of(asked, 0)
    for rank, (now, peak, optimizer) in enumerate(pool.run(memory_after_steps, asked.layout.world, asked)):
        resting = cost.resting_bytes(parts, cut, mesh.coordinate("shard", rank))
        on_top = cost.peak_bytes(parts, cut)
        assert now == {"weights": resting["weights"], "gradients": resting["gradients"], "gathered": 0, "buckets": 0}
        assert optimizer == resting["optimizer"]
        assert peak == {"weights": resting["weights"], "gradients": resting["gradients"], **on_top}


def memory_after_steps(rank, world, job):
    here = World(Mesh.of(job.layout), rank, Ledger())
    trainer = Trainer(job, here, MadeUpBatches(job, here.group("dp").index))
    trainer.states.memory.peak.update(dict.fromkeys(("gathered", "buckets"), -(10**12)))  # forget the start
    trainer.states.memory.peak["gathered"] = trainer.states.memory.peak["buckets"] = 0
    for step in range(2):
        trainer.step(step)
    memory = trainer.states.memory
    here.close()
    names = ("weights", "gradients", "gathered", "buckets")
    return (
        {name: memory.now[name] for name in names},
        {name: memory.peak[name] for name in names},
        trainer.optimizer.state_bytes(),
    )


@pytest.mark.parametrize("layout", ["dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,zero=3,reshard=never"])
@pytest.mark.parametrize("model", MODELS)
def test_the_books_agree_with_torchs_own_storages(pool, layout, model):
    """Whenever the books grow, and so at every peak, they say what the tensors' storages really hold."""
    asked = job(layout, MODELS[model])
    for growths, at_rest in pool.run(storages_during_steps, 2, asked):
        assert len(growths) > 5 or asked.layout.zero == 1
        assert all(books == storages for books, storages in growths)
        assert at_rest[0] == at_rest[1]


def storages_during_steps(rank, world, job):
    here = World(Mesh.of(job.layout), rank, Ledger())
    trainer = Trainer(job, here, MadeUpBatches(job, rank))
    states, growths = trainer.states, []

    def held():
        tensors = [
            t for p in states.parts for t in (p.whole, p.weights, p.gradients, p.whole_gradient) if t is not None
        ]
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())

    take = states.memory.take

    def watched(category, size):
        take(category, size)
        growths.append((states.memory.now.total(), held()))

    states.memory.take = watched
    for step in range(2):
        trainer.step(step)
    assert all(p.grad is None for p in trainer.model.parameters())
    here.close()
    return growths, (states.memory.now.total(), held())


def peaks(model, zero, bucket_bytes=20_000.0):
    cut = cost.Sharding(stage=zero, ranks=4, width=4, reduce_width=4)
    return cost.peak_bytes(cost.partition(inventory(model), zero, bucket_bytes, 4), cut)


def test_stage_3s_peak_depends_on_the_largest_units_and_not_on_depth():
    shallow, deep, wide = (ModelSpec(layers=n, hidden=h, heads=4, vocab=61) for n, h in ((4, 32), (40, 32), (4, 64)))
    assert peaks(shallow, 3) == peaks(deep, 3)
    assert peaks(wide, 3)["gathered"] > 3 * peaks(deep, 3)["gathered"]


def test_stage_2s_peak_depends_on_the_bucket():
    model = ModelSpec(layers=8, hidden=64, heads=4, vocab=61)
    small, large = peaks(model, 2, 10_000.0)["buckets"], peaks(model, 2, 400_000.0)["buckets"]
    assert small < large / 2


@pytest.mark.parametrize("zero", [1, 2])
def test_without_the_all_gather_replicas_diverge(pool, zero):
    asked = job(f"dp=2,zero={zero}", MODELS["llama-like"])
    records = pool.run(trial_without_spread, 2, asked)
    assert "differs between rank 0 and rank 1" in differing(asked, records)
    assert compare(records[0], first_steps(asked, 2))["weights"].value > 1e-4


def trial_without_spread(rank, world, job):
    spread, ZeRO.spread = ZeRO.spread, lambda self: None
    try:
        return trial(rank, world, job, 2)
    finally:
        ZeRO.spread = spread


def test_without_the_reduce_scatter_gradients_are_wrong(pool):
    for zero in (1, 2, 3):
        asked = job(f"dp=2,zero={zero}", MODELS["llama-like"])
        records = pool.run(trial_without_sum, 2, asked)
        assert compare(records[0], first_steps(asked, 2))["grad"].value > 1e-3


def trial_without_sum(rank, world, job):
    """Each rank keeps its own piece of its own gradient: what a forgotten sum leaves."""
    from shoal.comm.collectives import Handle

    def keep_own(part, literal):
        return Handle(part.whole_gradient[part.mine].clone())

    reduce, Part.reduce = Part.reduce, keep_own
    try:
        return trial(rank, world, job, 2)
    finally:
        Part.reduce = reduce


def first_steps(job, steps):
    """The reference's losses, norms and gradients of the first steps; its weights are those after all of them."""
    truth = plain_torch(job)
    return Record(truth.losses[:steps], truth.grad_norms[:steps], truth.gradients[:steps], truth.weights, [])


@pytest.mark.parametrize("reduce_dtype", ["same", "float32"])
@pytest.mark.parametrize("layout", ["dp=2,zero=1", "dp=2,zero=2,micro_batches=4", "dp=4,zero=3"])
def test_bfloat16_keeps_its_masters_in_the_shards(pool, layout, reduce_dtype):
    """Close to float64's first gradients, to bfloat16's rounding; 16 bytes per parameter, 18 with float32 gradients.

    The usual 20 counts a bfloat16 gradient beside the float32 one; here each is taken up and freed as backward makes it.
    """
    asked = job(layout, MODELS["llama-like"], "bfloat16")
    asked = replace(asked, train=replace(asked.train, reduce_dtype=reduce_dtype))
    truth = plain_torch(replace(asked, train=replace(asked.train, dtype="float64", reduce_dtype="same")))
    records = pool.run(trial, asked.layout.world, asked, 3)
    first = Record(truth.losses[:1], truth.grad_norms[:1], truth.gradients[:1], truth.weights, [])
    found = Record(records[0].losses[:1], records[0].grad_norms[:1], records[0].gradients[:1], records[0].weights, [])
    errors = compare(found, first)
    assert errors["loss"].value < 5e-3 and errors["grad_norm"].value < 2e-2 and errors["grad"].value < 8e-2
    assert differing(asked, records) is None
    rows = audit(
        [times(step_transfers(asked, r), 3) for r in range(asked.layout.world)], [r.transfers for r in records]
    )
    assert [row.difference() for row in rows if not row.ok] == []
    cut, parts = sharding(asked), parts_of(asked, 0)
    for rank, (now, _, optimizer) in enumerate(pool.run(memory_after_steps, asked.layout.world, asked)):
        resting = cost.resting_bytes(parts, cut, rank)
        assert (now["weights"], now["gradients"], optimizer) == tuple(resting.values())
    everything = cost.resting_bytes(parts, replace(cut, ranks=1), 0)
    per_parameter = sum(everything.values()) / sum(cost.sizes(parts))
    assert per_parameter == (16 if reduce_dtype == "same" else 18)


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("layout", ["dp=1", "dp=2,zero=1", "dp=2,zero=3"])
def test_offload_changes_where_states_are_and_nothing_else(pool, tmp_path, place, layout):
    asked = job(layout, MODELS["llama-like"])
    moved = replace(asked, train=replace(asked.train, offload=place, out=str(tmp_path)))
    plain, offloaded = (pool.run(trial, asked.layout.world, one, 3) for one in (asked, moved))
    errors = compare(offloaded[0], plain[0])
    assert max(error.value for error in errors.values()) == 0
    for record, twin in zip(offloaded, plain, strict=True):
        crossings = {t.op: t for t in record.transfers if t.axis == place}
        assert crossings["fetch"].received == crossings["store"].sent > 0
        assert [t for t in record.transfers if t.axis != place] == twin.transfers
    rows = audit(
        [times(step_transfers(moved, r), 3) for r in range(moved.layout.world)], [r.transfers for r in offloaded]
    )
    assert [row.difference() for row in rows if not row.ok] == []


class Tail(nn.Module):
    """A unit that is always called, with a layer inside that a call may not use."""

    def __init__(self):
        super().__init__()
        self.sometimes = nn.Linear(7, 7, dtype=torch.float64)
        self.last = nn.Linear(7, 3, dtype=torch.float64)

    def forward(self, x, use):
        return self.last(self.sometimes(x) if use else x)


class Odd(nn.Module):
    """A stranger's module: a frozen layer, a layer used twice, units and layers that a step may not use, odd sizes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7, dtype=torch.float64)
        self.frozen = nn.Linear(7, 7, dtype=torch.float64).requires_grad_(False)
        self.twice = nn.Linear(7, 7, dtype=torch.float64)
        self.skipped = nn.Linear(7, 7, dtype=torch.float64)
        self.tail = Tail()

    def forward(self, x, use, skip):
        x = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.tail(x if skip else self.skipped(x), use)

    def units(self):
        return [self.first, self.frozen, self.twice, self.skipped, self.tail]


def odd_batch(step):
    random = np.random.default_rng(step)
    return torch.from_numpy(random.normal(size=(8, 5))), torch.from_numpy(random.normal(size=(8, 3)))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("pattern", ["same on all ranks", "other ranks, other uses"])
def test_any_module_with_a_list_of_units(pool, stage, ranks, pattern):
    """Frozen, shared, and unused in a step, also on some ranks only: as one process, and without a hang."""
    outcomes = pool.run(train_odd, ranks, stage, pattern)
    torch.set_num_threads(1)
    model = Odd()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for step in range(5):
        x, y = odd_batch(step)
        optimizer.zero_grad(set_to_none=False)
        for rank, (x_part, y_part) in enumerate(zip(x.chunk(ranks), y.chunk(ranks), strict=True)):
            (((model(x_part, uses(step, rank, pattern), step == 3) - y_part) ** 2).sum() / 8).backward()
        for parameter in model.parameters():  # a parameter that no rank used has a zero gradient, as in the shards
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for outcome in outcomes:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                truth = parameter.detach().numpy()
                assert np.linalg.norm(outcome[name] - truth) <= 1e-10 * np.linalg.norm(truth), name


def uses(step, rank, pattern):
    return step % 2 == 1 if pattern.startswith("same") else (step + rank) % 2 == 1


def train_odd(rank, world, stage, pattern):
    here = World(Mesh.of(Layout(dp=world)), rank, Ledger())
    model = Odd()
    states = shard(model, model.units(), here.group("dp"), stage=stage)
    runs = list(states.runs())
    optimizer = torch.optim.AdamW([nn.Parameter(w) for w, _, _ in runs], lr=1e-2, weight_decay=0.1)
    masters = optimizer.param_groups[0]["params"]
    for step in range(5):
        x, y = (part.chunk(world)[rank] for part in odd_batch(step))
        with states.micro_batch(first=True, last=True):
            (((model(x, uses(step, rank, pattern), step == 3) - y) ** 2).sum() / 8).backward()
        for master, (_, gradient, _) in zip(masters, runs, strict=True):
            master.grad = gradient
        optimizer.step()
        states.spread()
    whole = {name: weight.numpy().copy() for name, weight in states.weights()}
    here.close()
    return whole
