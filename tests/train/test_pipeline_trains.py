"""Pipelines through the trainer: against a loop in plain torch, in the schedule's order, byte for byte, and broken on purpose."""

from collections import Counter
from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from faults import counted_by_all, sum_of_all_but
from reference import STEPS, differing, job, plain_torch, together
from shoal.axes import shares
from shoal.axes.pipeline.communication import Exchange
from shoal.axes.pipeline.cost import activation_bytes
from shoal.axes.pipeline.live import peaks
from shoal.axes.pipeline.run import Engine, _Run
from shoal.axes.shares import Shares
from shoal.axes.tensor.cost import Axis, Shape
from shoal.axes.tensor.memory import block_activations
from shoal.comm.collectives import all_reduce
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.kernels.linear import PutOff
from shoal.model.decoder import Decoder
from shoal.model.init import initialise
from shoal.plan.pieces import mesh_of
from shoal.plan.stages import schedule_of, stages_of
from shoal.plan.traffic import evaluation_transfers, step_transfers, times
from shoal.spec.job import DataSpec
from shoal.spec.layout import SCHEDULES
from shoal.spec.model import ModelSpec
from shoal.train import trainer
from shoal.train.trainer import Trainer
from shoal.verify.audit import audit
from shoal.verify.compare import compare
from shoal.verify.trial import MadeUpBatches, trial
from shoal.verify.verify import small_job, verify

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
    ("untied", "pp=2,micro_batches=4,dp=2,cp=2,zero=2"),
    ("untied", "pp=2,micro_batches=5,dp=2,zero=3,reshard=never"),
    ("tied", "pp=2,schedule=zb-v,micro_batches=4,dp=2,zero=3,reshard=keep_last"),
    ("tied", "pp=4,schedule=dualpipe-v,micro_batches=8,dp=2,zero=3,reshard=never"),
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
        assert len(steps) >= STEPS and all(step == wanted for step in steps)
    planned = [times(step_transfers(this, rank), STEPS) for rank in range(this.layout.world)]
    assert [row.difference() for row in audit(planned, [record.transfers for record in records]) if not row.ok] == []


def test_the_cases_cover_what_there_is():
    """Every schedule with flush on 2 and 4 ranks, tied and not; each axis that goes with it."""
    layouts = [(model, asked(model, layout).layout) for model, layout in CASES]
    flush = {name for name in SCHEDULES if not name.startswith("pipedream")}
    seen = Counter((layout.schedule, layout.pp) for _, layout in layouts)
    assert {(name, p) for name in flush for p in (2, 4)} | {("1f1b", 8), ("dualpipe", 8)} <= seen.keys()
    assert {(name, model) for name in flush for model in MODELS} <= {
        (layout.schedule, model) for model, layout in layouts
    }


COUNTS = (1, 3, 8)  # micro-batches of an evaluation


def evaluated(rank, world, job):
    """(loss, transfers) of evaluations of so many micro-batches on each data rank, with the weights of the start."""
    mesh = mesh_of(job)
    here = World(mesh, rank, Ledger())
    batches = MadeUpBatches(job, mesh.coordinate("dp", rank))
    this, found = Trainer(job, here, batches), []
    for count in COUNTS:
        here.ledger.clear()
        found.append((this.evaluate(first_of(batches, count)), here.ledger.transfers()))
    here.close()
    return found


def first_of(batches, count):
    """The first `count` micro-batches."""
    return [micro_batch for step in range(count) for micro_batch in batches.batch(step)][:count]


def mean_loss(job, count):
    """The same evaluation by one process: without dropout, over the valid tokens of all data ranks."""
    alone = Decoder(job.model, torch.float64)
    initialise(alone, job.model, job.train.seed)
    total = valid = 0
    for data_rank in range(job.layout.dp):
        for micro_batch in first_of(MadeUpBatches(job, data_rank), count):
            tokens, targets = torch.from_numpy(micro_batch.tokens), torch.from_numpy(micro_batch.targets)
            with torch.no_grad():
                logits = alone(tokens).flatten(0, 1)
            total += float(F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum"))
            valid += int((targets >= 0).sum())
    return total / valid


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("tied", "pp=4,micro_batches=2"),
        ("untied", "pp=2,schedule=interleaved,micro_batches=4,dp=2,zero=3"),
        ("tied", "pp=2,schedule=zb-v,micro_batches=2,dp=2,tp=2,sp"),
        ("tied", "pp=4,schedule=dualpipe,micro_batches=8,zero=3,dp=2"),
        ("untied", "pp=2,schedule=dualpipe-v,micro_batches=4,tp=2x2"),
    ],
)
def test_evaluation_of_any_length_is_that_of_one_process_as_planned(pool, model, layout):
    """Whatever the number of micro-batches in a training step."""
    this = asked(model, layout)
    results = pool.run(evaluated, this.layout.world, this)
    for place, count in enumerate(COUNTS):
        losses, moved = zip(*(found[place] for found in results), strict=True)
        assert len(set(losses)) == 1 and losses[0] == pytest.approx(mean_loss(this, count), rel=1e-12)
        planned = [evaluation_transfers(this, rank, count) for rank in range(this.layout.world)]
        assert [row.difference() for row in audit(planned, moved) if not row.ok] == []


def boundary(records):
    """By rank: (bytes, messages) sent forward, and backward, over the pipeline; and nothing else moves with them."""
    found = []
    for record in records:
        moved = [transfer for transfer in record.transfers if transfer.axis == "pp" and transfer.phase != "optimizer"]
        assert {transfer.op for transfer in moved} <= {"send", "receive"}
        sums = Counter()
        for transfer in moved:
            sums[transfer.phase, "bytes"] += transfer.sent
            sums[transfer.phase, "messages"] += transfer.calls if transfer.op == "send" else 0
        found.append(sums)
    return found


@pytest.mark.parametrize(
    ("layout", "p", "chunks", "dp", "parts"),
    [
        ("pp=4,schedule=gpipe", 4, 1, 1, 1),
        ("pp=2,schedule=zb-h1,dp=2", 2, 1, 2, 1),
        ("pp=2,tp=2,schedule=naive", 2, 1, 1, 1),
        ("pp=2,tp=2,sp,dp=2", 2, 1, 2, 2),
        ("pp=4,schedule=interleaved", 4, 2, 1, 1),
    ],
)
def test_boundary_bytes_do_not_depend_on_the_number_of_micro_batches(pool, layout, p, chunks, dp, parts):
    """PP-11 at a fixed batch: 2 (p v - 1) B s h bytes per element for each pipeline, half each way; messages go with m."""
    batch, borders = 32 // dp, p * chunks - 1
    size = batch * SEQUENCE * MODELS["untied"].hidden * 8
    for m in (1, 2, 4, 8):
        this = asked("untied", f"{layout},micro_batches={m}")
        assert this.train.batch == 32
        tensor = this.layout.tp_size
        found = boundary(pool.run(trial, this.layout.world, this, 1))
        for phase in ("forward", "backward"):
            assert sum(sums[phase, "bytes"] for sums in found) == borders * size * dp * tensor // parts
            assert sum(sums[phase, "messages"] for sums in found) == borders * m * dp * tensor
        if chunks == 1:  # ends send one way alone, the others both ways
            mesh = mesh_of(this)
            for rank, sums in enumerate(found):
                ends = mesh.coordinate("pp", rank) in (0, p - 1)
                sent = sums["forward", "bytes"] + sums["backward", "bytes"]
                assert sent == size // parts * (1 if ends else 2)


class Kept:
    """Storages that backward keeps alive, each once with its bytes, but for those of `others`; the most there were."""

    def __init__(self, others):
        self.others = {x.untyped_storage().data_ptr() for x in others}
        self.storages = {}
        self.most = 0

    def add(self, x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.others:
            self.storages[StorageWeakRef(storage)] = storage.nbytes()
        return x

    def watched(self, forward):
        """`forward` as it is, and then a count of what is alive."""

        def watching(x, batch):
            self.others |= {y.untyped_storage().data_ptr() for y in (batch.tokens, batch.targets)}
            with saved_tensors_hooks(self.add, lambda x: x):
                y = forward(x, batch)
            for gradient in getattr(y.grad_fn, "gradients", ()):  # of the loss, made in forward
                self.add(gradient)
            self.storages = {ref: size for ref, size in self.storages.items() if not ref.expired()}
            self.most = max(self.most, sum(self.storages.values()))
            return y

        return watching

    def putting_off(self, add):
        """PutOff.add as it is; what the gradient is computed from stays alive too."""

        def adding(queue, parameter, compute, *inputs):
            for x in inputs:
                self.add(x)
            add(queue, parameter, compute, *inputs)

        return adding


class EveryTarget(MadeUpBatches):
    """Batches all of whose targets count."""

    def batch(self, step):
        return [replace(micro_batch, targets=micro_batch.tokens) for micro_batch in super().batch(step)]


def measured(rank, world, job):
    """The most bytes of activations at the end of a forward."""
    mesh = mesh_of(job)
    here = World(mesh, rank, Ledger())
    this = Trainer(job, here, EveryTarget(job, mesh.coordinate("dp", rank)))
    kept, engine = Kept(this.model.parameters()), this.pipeline.engine
    engine.chunks = [kept.watched(chunk) for chunk in engine.chunks]
    with patch.object(PutOff, "add", kept.putting_off(PutOff.add)):
        this.step(0)
    here.close()
    return kept.most


def planned_bytes(this):
    """(by stage: what one micro-batch keeps from F to B or I; what it keeps from I to W), float64."""
    spec, tensor = this.model, this.layout.tp_size
    axis = Axis(tensor, 0, this.layout.sp)
    tokens = this.micro_batch * SEQUENCE
    part = tokens // tensor if axis.sequence else tokens
    block = block_activations(spec, Shape(this.micro_batch, SEQUENCE, spec.hidden, 8), axis).total
    shared = 2 * SEQUENCE * spec.head_size * 8 if spec.positions == "rope" else 0  # sine and cosine, for all blocks
    looked_up = part * spec.hidden if spec.dropout else 0  # a mask, the places, and which ids are this rank's and where
    looked_up += (SEQUENCE * 8 if spec.positions == "learned" else 0) + (tokens * 9 if tensor > 1 else 0)
    statistics = 1 if spec.norm == "rmsnorm" else 2
    normed = part * (spec.hidden + statistics) * 8
    loss = (tokens + -(-spec.vocab // tensor)) * spec.hidden * 8
    stages = stages_of(this)
    whole = [
        block * len(stage.layers) + shared + stage.first * looked_up + stage.last * (normed + loss) for stage in stages
    ]
    # inputs and output gradients of the four linear layers
    up = spec.ffn * (2 if spec.mlp == "swiglu" else 1)
    into = 2 * spec.hidden + spec.heads * spec.head_size + spec.ffn
    out = 2 * spec.hidden + (spec.heads + 2 * spec.kv_heads) * spec.head_size + up
    return whole, [tokens * (into + out) * 8 * len(stage.layers) for stage in stages]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("tied", "pp=4,schedule=gpipe,micro_batches=4"),
        ("untied", "pp=4,micro_batches=8,stages=2-1-3-2"),
        ("tied", "pp=2,tp=2,sp,micro_batches=4"),
        ("untied", "pp=2,schedule=interleaved,micro_batches=4"),
        ("tied", "pp=4,schedule=zb-h1,micro_batches=8"),
        ("untied", "pp=2,schedule=zb-v,micro_batches=8"),
        ("untied", "pp=4,schedule=dualpipe,micro_batches=8"),
    ],
)
def test_bytes_of_activations_are_those_of_the_plan(pool, model, layout):
    """To the byte, on every rank: blocks in closed form, times what the schedule keeps alive, and the ends of the model."""
    this = asked(model, layout)
    schedule, mesh = schedule_of(this), mesh_of(this)
    whole, waiting = planned_bytes(this)
    found = pool.run(measured, this.layout.world, this)
    places = [mesh.coordinate("pp", rank) for rank in range(this.layout.world)]
    assert found == [activation_bytes(schedule, place, whole, waiting) for place in places]


# Faults, each as other frameworks had it or a new engine could, put into the running code on every rank.


def seeds_of_single_micro_batches(self, batches, seeds, *arguments):
    return ENGINE_STEP(self, batches, [seed * len(batches) for seed in seeds], *arguments)


def nothing_over_the_pipeline(x, group, *arguments, **options):
    return x if group.axis == "pp" else all_reduce(x, group, *arguments, **options)


def order_reversed_on_rank_1(self, schedule, group, *arguments, **options):
    ENGINE_INIT(self, schedule, group, *arguments, **options)
    if group.index == 1:
        self.program = tuple(other_way_round(action, schedule.micro_batches) for action in self.program)


def other_way_round(action, m):
    if isinstance(action, Exchange):
        sides = [
            [x._replace(micro_batch=m - 1 - x.micro_batch) for x in side] for side in (action.sends, action.receives)
        ]
        return Exchange(*map(tuple, sides))
    return replace(action, micro_batch=m - 1 - action.micro_batch)


def backward_of_the_newest(self, x, gradient):
    newest = max(place for place in self.kept if place[0] == x.chunk)
    here = x.chunk, x.micro_batch
    if self.rank == 0:
        self.kept[here], self.kept[newest] = self.kept[newest], self.kept[here]
    BACKWARD(self, x, gradient)


def nothing_put_off(self, schedule, group, *arguments, **options):
    ENGINE_INIT(self, schedule, group, *arguments, **options)
    kinds = [getattr(action, "kind", None) for action in self.program]
    self.program = [
        made
        for kind, action in zip(kinds, self.program, strict=True)
        for made in ([action, replace(action, kind="W")] if kind == "I" else [] if kind == "W" else [action])
    ]


def weight_gradients_of_the_queue(self):
    taken = PutOff()
    for parameter in list(self._waiting)[1:]:  # one is forgotten
        taken._waiting[parameter] = self._waiting.pop(parameter)
    return taken


ENGINE_STEP, ENGINE_INIT, BACKWARD = Engine.step, Engine.__init__, _Run._backward

FAULTS = {  # the model and layout; of what, which name becomes what; what verify says
    "loss not divided by the micro-batches": (
        "untied", "pp=2", Engine, "step", seeds_of_single_micro_batches, ["grad: gradient of ", "grad_norm: "]),
    "tied matrix not summed": (
        "tied", "pp=2", Shares, "sum", sum_of_all_but("ends"),
        ["grad: gradient of embedding.weight", "backward all_reduce over ends", "embedding.weight differs between rank 0"]),
    "copies not summed": (
        "untied", "pp=2,schedule=dualpipe", Shares, "sum", sum_of_all_but("twin"),
        ["grad: gradient of ", "backward all_reduce over twin", "differs between rank 0 and rank 1"]),
    "tied matrix counted twice in the norm": ("tied", "pp=2", shares, "counted_runs", counted_by_all, ["grad_norm: "]),
    "loss and norm of one stage": (
        "untied", "pp=2", trainer, "all_reduce", nothing_over_the_pipeline,
        ["loss: ", "grad_norm: ", "optimizer all_reduce over pp: rank 0 planned"]),
    "micro-batches in another order on one rank": (
        "untied", "pp=2,schedule=gpipe", Engine, "__init__", order_reversed_on_rank_1, ["loss: ", "grad: gradient of "]),
    "an order that changes no number": (
        "untied", "pp=2,schedule=zb-h1", Engine, "__init__", nothing_put_off,
        ["schedule: rank 1 planned F1 as instruction 2, executed W0"]),
    "activations of another micro-batch": (
        "untied", "pp=2,schedule=gpipe", _Run, "_backward", backward_of_the_newest, ["grad: gradient of "]),
    "a weight gradient left in the queue": (
        "untied", "pp=2,schedule=zb-h1", PutOff, "take", weight_gradients_of_the_queue, ["grad: gradient of blocks."]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_and_named_by_verify(pool, fault):
    model, layout, *_, said = FAULTS[fault]
    small = small_job(asked(model, layout))
    verdict = verify(small, 1, pool=pool, run=partial(trial_with, fault))
    assert not verdict.ok
    assert [words for words in said if not any(words in line for line in verdict.failures)] == []
    assert verify(small, 1, pool=pool).ok, "caught without the fault too"


def trial_with(fault, rank, world, job, steps):
    _, _, where, name, broken, _ = FAULTS[fault]
    with patch.object(where, name, broken):  # and no longer: the pool's ranks live on
        return trial(rank, world, job, steps)
