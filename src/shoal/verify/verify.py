"""`shoal verify`: does a layout compute what one process computes, and does it send what the plan says?"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import lcm

from shoal.axes.piece import Piece
from shoal.launch.pool import Pool
from shoal.plan.experts import Sent, routed_transfers
from shoal.plan.memory import memory
from shoal.plan.pieces import mesh_of, pieces_of
from shoal.plan.refusals import refuse, updates_between
from shoal.plan.stages import check_pipeline, layers_wanted, schedule_of
from shoal.plan.traffic import step_transfers, times
from shoal.spec.errors import divisors
from shoal.spec.fit import check_fit, exchanges, sequence_parts
from shoal.spec.job import DataSpec, Dtype, Job, TrainSpec
from shoal.spec.layout import Layout
from shoal.spec.model import ModelSpec
from shoal.spec.moe import MoESpec
from shoal.transfer import Transfer
from shoal.verify.assemble import disagreement, strayed_buffer, whole_record
from shoal.verify.audit import MemoryRow, Row, ScheduleRow, audit, audit_memory, audit_schedule
from shoal.verify.compare import Error, Record, compare
from shoal.verify.delayed import delayed
from shoal.verify.rounded import against_rounding
from shoal.verify.trial import trial

TOLERANCE = 1e-10  # relative, in float64, where rounding is 1e-16 (design, idea 4)

HEADS = ("hidden", "heads", "kv_heads", "head_size")  # sizes of a model that tensor and context ranks cut


@dataclass(frozen=True)
class Verdict:
    """What `verify` found. failures: one line for each thing that is not as it should be; empty when all is well.

    job: what was run, not what it was made from. In a type other than float64 see verify/rounded.py: errors are distances
    from one process in float64 that is led along the layout's path, and one of the job's own type says how large they may be.

    memory: by rank and category, of one more step in which every target counts. schedule: by rank of a pipeline, what was
    executed.
    """

    job: Job
    limits: dict[str, float]  # by kind, the largest relative error allowed where it is
    errors: dict[str, Error]
    rows: list[Row]
    memory: list[MemoryRow]
    schedule: list[ScheduleRow]
    failures: list[str]

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def layout(self) -> Layout:
        return self.job.layout

    @property
    def what(self) -> str:
        """The model and the batch that were run, in words."""
        model, train = self.job.model, self.job.train
        experts = f", {model.moe.experts} experts" if model.moe else ""
        return (
            f"{model.name}: {model.layers} layers, hidden {model.hidden}, {model.heads} heads, {model.kv_heads} KV heads, "
            f"ffn {model.ffn}, vocabulary {model.vocab}{experts}; {train.batch} x {self.job.data.sequence} tokens, {train.dtype}"
        )

    def as_dict(self) -> dict:
        """The document of `shoal verify --json`."""
        return {
            "ok": self.ok,
            "ran": self.what,
            "layout": str(self.layout),
            "world": self.layout.world,
            "max_rel_err": {
                kind: error.value if math.isfinite(error.value) else None for kind, error in self.errors.items()
            },
            "allowed": self.limits,
            "worst": {kind: error.where for kind, error in self.errors.items()},
            "transfers": [row.as_dict() for row in self.rows],
            "memory": [row.as_dict() for row in self.memory],
            "schedule": [row.as_dict() for row in self.schedule],
            "failures": self.failures,
        }


def small_job(job: Job, dtype: Dtype = "float64") -> Job:
    """The job as `verify` runs it: the same layout and the same kind of model, small enough for seconds.

    dtype: of its weights. Where gradients cannot be clipped, they are not.
    """
    layout = job.layout
    if job.model.moe:  # of the model that was asked for; what is made here always fits
        job.model.moe.check_ranks(layout.ep, layout.token_ranks)
    rows = layout.tp_grid[0] if layout.tp_grid else 1
    sequence = min(job.data.sequence, 16)
    if not job.data.pad:
        sequence = multiple(sequence, sequence_parts(layout))
    batch = multiple(2, rows) * layout.dp * layout.micro_batches
    train = replace(_trained_in(job, dtype), batch=batch, bucket_mb=0.05, warmup=0)
    if updates_between(layout):
        train = replace(train, clip=0.0)
    small = Job(
        shrink(job.model, layout),
        layout,
        job.machine,
        DataSpec(sequence=sequence, pad=job.data.pad, packing=job.data.packing),
        train,
    )
    check_fit(small.model, layout, small.sequence, batch, small.sequence - sequence)
    return small


def _trained_in(job: Job, dtype: Dtype) -> TrainSpec:
    reduce_dtype = job.train.reduce_dtype if dtype == "bfloat16" else "same"
    return replace(job.train, dtype=dtype, reduce_dtype=reduce_dtype)


def as_it_is(job: Job, dtype: Dtype = "float64") -> Job:
    """The job with its own model, sequence and batch, from its first step on at full learning rate."""
    train = replace(_trained_in(job, dtype), warmup=0)
    return replace(job, train=replace(train, clip=0.0) if updates_between(job.layout) else train)


def check_given(job: Job, small: Job, given: AbstractSet[str]) -> None:
    """Raises RequestError where a size that a person gave, by its field's name, does not fit the layout.

    What runs is `small`, which always fits; so that its success says nothing of a job that `shoal train` would refuse.
    """
    model = small.model
    if "model.preset" in given or not given.isdisjoint(f"model.{size}" for size in HEADS):
        model = replace(model, **{size: getattr(job.model, size) for size in HEADS})
    if not given.isdisjoint(("model.preset", "model.layers")):
        model = replace(model, layers=job.model.layers)
    chosen = job if "data.sequence" in given else small
    batch = (job if "train.batch" in given else small).train.batch
    model = replace(model, positions_max=max(model.positions_max, chosen.data.sequence))
    check_fit(model, job.layout, chosen.sequence, batch, chosen.sequence - chosen.data.sequence)


def shrink(model: ModelSpec, layout: Layout) -> ModelSpec:
    """A small model of the same kind which the layout can cut: two blocks of about four heads, all mathematics kept."""
    parts = layout.tp_grid[0] if layout.tp_grid else layout.tp_size
    across = {"ulysses": layout.cp, "hybrid": layout.ulysses}.get(layout.cp_kind, 1)
    heads, size = multiple(4, parts * across), 8
    shared = model.heads // model.kv_heads  # query heads to one KV head
    fitting = [kv for kv in divisors(heads) if kv % parts == 0 or parts % kv == 0]
    fitting = [kv for kv in fitting if exchanges(heads // parts, max(1, kv // parts), across)]
    wanted = 1 if model.kv_heads == 1 else heads // min(shared, 2)
    of_its_own = model.head_size * model.heads != model.hidden
    return replace(
        model,
        name=f"small {model.name}",
        layers=layers_wanted(layout) if layout.pp > 1 else min(model.layers, 2),
        hidden=heads * size,
        heads=heads,
        kv_heads=min(fitting, key=lambda kv: abs(kv - wanted)),
        head_size=2 * size if of_its_own else size,
        ffn=48,
        vocab=min(model.vocab, 131),
        positions_max=max(64, sequence_parts(layout)),
        window=min(model.window, 8) if model.window else None,
        moe=few_experts(model.moe, layout.ep) if model.moe else None,
    )


def few_experts(moe: MoESpec, ranks: int) -> MoESpec:
    """A small mixture of the same kind for two layers, one of which has experts: as many on each of `ranks` ranks."""
    top_k, groups = min(moe.top_k, 8), min(moe.groups, 4)
    kept = max(1, min(moe.groups_kept * groups // moe.groups, groups - 1)) if moe.limited else groups
    size = max(2, -(-top_k // kept))  # experts of a group that are enough to choose from
    return replace(
        moe,
        experts=multiple(max(groups * size, min(moe.experts, 8), top_k), lcm(ranks, groups)),
        top_k=top_k,
        groups=groups,
        groups_kept=kept,
        expert_ffn=24,
        shared_experts=min(moe.shared_experts, 2),
        shared_ffn=16,
        first_dense=min(moe.first_dense, 1),
        every=min(moe.every, 2),
    )


def multiple(number: int, of: int) -> int:
    """The smallest multiple of `of` that is not below `number`."""
    return -(-number // of) * of


def verify(job: Job, steps: int = 3, *, pool: Pool | None = None, run: Callable = trial) -> Verdict:
    """Runs the job's layout and one process for `steps` steps on the same tokens and compares everything.

    Under a schedule that updates weights between micro-batches, that process has every stage's weights with the schedule's
    delay.

    pool: warm workers to use, else fresh ones are started. run: what each rank does, for tests that break it.
    Raises RequestError for what cannot be run, and might wait for ever.
    """
    refuse(job)
    check_pipeline(job.layout, job.model.tied, job.model.layers)
    if pool is None:
        with Pool(job.layout.world) as fresh:
            return verify(job, steps, pool=fresh, run=run)
    with tempfile.TemporaryDirectory(prefix="shoal-") as out:  # for states on disk; never the folder of a real run
        return _verify(replace(job, train=replace(job.train, out=out)), steps, pool, run)


def alone(job: Job, as_many: bool = False) -> Job:
    """The same on one process; in as many micro-batches if asked for, or if something is taken over a micro-batch."""
    by_micro_batch = job.model.moe is not None and job.model.moe.balance == "micro_batch"
    layout = Layout(micro_batches=job.layout.micro_batches if as_many or by_micro_batch else 1)
    return replace(job, layout=layout, train=replace(job.train, offload="none"))


def planned(job: Job, rank: int, steps: int, sent: Mapping[int, Sent]) -> list[Transfer]:
    """The plan of `steps` steps on `rank`. sent: by rank what the routers sent, which decides where tokens go."""
    routed = routed_transfers(job, rank, sent, "step", steps, job.layout.micro_batches)
    return [*times(step_transfers(job, rank, tokens=False), steps), *routed]


def _verify(job: Job, steps: int, pool: Pool, run: Callable) -> Verdict:
    layout = job.layout
    records = pool.run(run, layout.world, job, steps)
    pieces = [pieces_of(job, rank) for rank in range(layout.world)]
    errors, limits = _errors(job, steps, records, pieces, pool)
    sent = {rank: record.sent for rank, record in enumerate(records)}
    predicted = [planned(job, rank, steps, sent) for rank in range(layout.world)]
    rows = audit(predicted, [record.transfers for record in records])
    routed = {rank: record.routed for rank, record in enumerate(records)}
    memory_rows = [
        row
        for rank, record in enumerate(records)
        for row in audit_memory(rank, memory(job, rank, routed), record.memory)
    ]
    schedule_rows = [
        audit_schedule(schedule_of(job), mesh_of(job).coordinate("pp", rank), rank, record.executed)
        for rank, record in enumerate(records)
        if record.executed
    ]
    failures = [
        f"{kind}: {error.where} is off by {error.value:.1e} (relative L2; {limits[kind]:.0e} is allowed)"
        for kind, error in errors.items()
        if not error.value <= limits[kind]
    ]
    audited: list[Row | MemoryRow | ScheduleRow] = [*rows, *memory_rows, *schedule_rows]
    failures += [row.difference() for row in audited if not row.ok]
    strayed = disagreement([record.weights for record in records], pieces)
    failures += filter(None, [strayed, strayed_buffer([record.buffers for record in records])])
    return Verdict(job, limits, errors, rows, memory_rows, schedule_rows, failures)


def _errors(
    job: Job, steps: int, records: Sequence[Record], pieces: Sequence[Sequence[Piece]], pool: Pool
) -> tuple[dict[str, Error], dict[str, float]]:
    """What differs from one process, by kind, and how much is allowed."""
    found, exact = whole_record(records, pieces), replace(job, train=_trained_in(job, "float64"))
    delays = updates_between(job.layout)
    if job.train.dtype != "float64":
        assert not delays, "the process that delays weights keeps no finer ones beside bfloat16"
        finer = job.train.reduce_dtype != "same"  # then micro-batches add up more finely than they are
        rough = alone(job, as_many=not finer)
        return against_rounding(found, records, alone(exact), rough, pool)
    (truth,) = pool.run(delayed, 1, exact, steps) if delays else pool.run(trial, 1, alone(exact), steps)
    errors = compare(found, truth)
    return errors, dict.fromkeys(errors, TOLERANCE)
