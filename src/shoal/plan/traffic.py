"""Composes the axes' transfers into what one rank sends and receives in a step, an evaluation and a run. No torch."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from shoal.axes.context import cost as context
from shoal.axes.data import cost as data
from shoal.axes.piece import shared_runs
from shoal.axes.pipeline import cost as pipeline
from shoal.axes.pipeline.evaluation import forward_only
from shoal.axes.pipeline.stage import Stage
from shoal.axes.recompute.cost import repeated_transfers
from shoal.axes.tensor import cost as tensor
from shoal.axes.tensor2d import cost as tensor2d
from shoal.axes.zero import cost as zero
from shoal.mesh import Mesh
from shoal.plan.pieces import TIED, mesh_of, names_by_chunk, pieces_of
from shoal.plan.stages import chunks_of, mini_batches, schedule_of, stages_of
from shoal.spec.inventory import Parameter
from shoal.spec.job import WIDTH, Job
from shoal.transfer import Transfer, traffic

TWICE = "tied"  # the part of a matrix that two chunks of a rank use


def sharding(job: Job) -> zero.Sharding:
    """How the job cuts the model's states over the data axis."""
    width = WIDTH[job.train.dtype]
    return zero.Sharding(
        stage=job.layout.zero,
        ranks=job.layout.dp // job.layout.hsdp * job.layout.cp if job.layout.zero else 1,
        replicas=job.layout.hsdp if job.layout.zero else 1,
        literal=job.layout.zero1 == "ar+ag",
        reshard=job.layout.reshard,
        width=width,
        reduce_width=max(4, width) if job.train.reduce_dtype == "float32" else width,
        state_width=max(4, width),
        masters=width < 4,
        axis="+".join(job.layout.shard_axes),
    )


def parts_of(job: Job, rank: int) -> zero.Parts:
    """What one collective of the data axis moves at once, by name, on `rank`.

    In a pipeline no part reaches from one chunk into another, and a matrix that both ends share is a part of its own,
    so that both cut it alike.
    """
    kept = [piece.local for piece in pieces_of(job, rank)]
    bucket, width = job.train.bucket_mb * 1e6, WIDTH[job.train.dtype]
    if job.layout.pp == 1:
        return zero.partition(kept, job.layout.zero, bucket, width)
    parts: dict[str, Sequence[Parameter]] = {}
    chunks, by_chunk = chunks_of(job, mesh_of(job), rank), names_by_chunk(job, rank)
    # In the order of the model, which ranks that hold the same stages number differently, agree on.
    for chunk in sorted(range(len(chunks)), key=lambda chunk: chunks[chunk].layers.start):
        apart = {TIED} if job.model.tied else set()
        own = [parameter for parameter in kept if parameter.name in by_chunk[chunk] - apart]
        for name, part in zero.partition(own, job.layout.zero, bucket, width, ends_apart=True).items():
            parts[f"chunk {chunk} {name}"] = part
    if tied := [parameter for parameter in kept if parameter.name == TIED and job.model.tied]:
        users = [chunk for chunk, names in enumerate(by_chunk) if TIED in names]
        parts[TWICE if len(users) > 1 else f"chunk {users[0]} tied"] = tied
    return parts


def step_transfers(job: Job, rank: int) -> list[Transfer]:
    """Every transfer of one training step on `rank`, in closed form."""
    mesh, layout, updates = mesh_of(job), job.layout, mini_batches(job)
    transfers: list[Transfer] = [*data.loss_transfers(*_place(mesh, layout.data_axes, rank), len(updates))]
    for micro_batch in range(layout.micro_batches):
        transfers += _micro_batch(job, mesh, rank, micro_batch)
    if layout.pp > 1:
        stage = mesh.coordinate("pp", rank)
        transfers += pipeline.step_transfers(schedule_of(job), stage, _message(job))
        transfers += pipeline.scalar_transfers(layout.pp, stage)
    for run in updates:
        transfers += _update(job, mesh, rank, run)
    return transfers


def _update(job: Job, mesh: Mesh, rank: int, run: range) -> Iterator[Transfer]:
    """What it takes to update the weights of `rank` once, with the gradients of a run of micro-batches."""
    layout, cut, parts, shard = job.layout, sharding(job), parts_of(job, rank), _shard(job, mesh, rank)
    seen = len(run)  # by each stage; a stage that exists twice sees half
    if layout.pp > 1:
        seen //= len(schedule_of(job).routes)
    if cut.stage:
        # What two chunks of a rank use is summed at the end of the step alone.
        uses = {TWICE: seen * 2}, {TWICE: 1}
        for transfer in zero.step_transfers(parts, cut, shard, mesh.coordinate("replicate", rank), seen, *uses):
            within = transfer.micro_batch
            yield transfer if within is None else replace(transfer, micro_batch=run.start + within)
    else:
        ranks, place, axis = _place(mesh, layout.data_axes, rank)
        last = run.start + seen - 1
        yield from data.gradient_transfers(zero.sizes(parts), ranks, place, cut.width, last, axis)
    yield from _shared(job, parts, cut, mesh, rank)
    yield from tensor.norm_transfers(layout.tp_size, mesh.coordinate("tp", rank))
    if job.train.offload != "none":
        yield from zero.offload_transfers(parts, cut, shard, job.train.offload)


def evaluation_transfers(job: Job, rank: int, forwards: int) -> list[Transfer]:
    """Every transfer of one evaluation of `forwards` micro-batches on `rank`: weights, activations, loss, valid tokens."""
    mesh, parts, layout = mesh_of(job), parts_of(job, rank), job.layout
    place = mesh.coordinate("pp", rank)
    forward: list[Transfer] = []
    uses: dict[str, int] = {}
    if layout.pp > 1:
        schedule = forward_only(schedule_of(job), forwards)
        calls = Counter(x.chunk for x in schedule.instructions(place))
        uses = {name: calls[int(name.split()[1])] for name in parts if name != TWICE}
        uses |= {name: sum(calls.values()) for name in parts if name == TWICE}
        forward += pipeline.evaluation_transfers(schedule, place, _message(job))
        forward += pipeline.evaluation_scalar_transfers(layout.pp, place)
    for micro_batch in range(forwards):
        forward += [
            replace(transfer, phase="evaluate", micro_batch=None)
            for transfer in _micro_batch(job, mesh, rank, micro_batch)
            if transfer.phase == "forward"
        ]
    return [
        *data.evaluation_transfers(*_place(mesh, layout.data_axes, rank)),
        *zero.evaluation_transfers(parts, sharding(job), _shard(job, mesh, rank), forwards, uses),
        *forward,
    ]


def _place(mesh: Mesh, axes: tuple[str, ...], rank: int) -> tuple[int, int, str]:
    """(ranks, this one's number among them, the name) of the group along some axes."""
    ranks = mesh.group(axes, rank)
    return len(ranks), ranks.index(rank), "+".join(axes)


def _shard(job: Job, mesh: Mesh, rank: int) -> int:
    """Which piece of the model states `rank` has."""
    return _place(mesh, job.layout.shard_axes, rank)[1] if job.layout.zero else 0


def _message(job: Job) -> int:
    """Bytes of what goes from stage to stage for one micro-batch, on each rank."""
    layout, model = job.layout, job.model
    parts = layout.tp_size if layout.sp or layout.tp_grid else 1
    return pipeline.message_bytes(job.micro_batch, job.own_sequence, model.hidden, WIDTH[job.train.dtype], parts)


def _micro_batch(job: Job, mesh: Mesh, rank: int, micro_batch: int) -> Iterator[Transfer]:
    """What the tensor and the context axis move for one micro-batch, in the stages that `rank` has of it."""
    for stage in _stages_for(job, mesh, rank, micro_batch):
        moved = [*_tensor(job, mesh, rank, stage, micro_batch)]
        if job.layout.cp > 1:
            for layer in stage.layers:
                moved += context.transfers(crossing(job), layer, micro_batch)
        yield from moved
        yield from repeated_transfers(moved, stage.full())


def _tensor(job: Job, mesh: Mesh, rank: int, stage: Stage, micro_batch: int) -> Iterator[Transfer]:
    """What the tensor axis moves in one stage."""
    layout, model, width = job.layout, job.model, WIDTH[job.train.dtype]
    b, s = job.micro_batch, job.own_sequence
    if layout.tp_size == 1:
        return
    if layout.tp_grid:
        row, column = mesh.coordinate("column", rank), mesh.coordinate("row", rank)
        grid = tensor2d.Grid(layout.tp_grid[0], row, column, b, s, width)
        if stage.first:
            yield from tensor2d.embedding_transfers(grid, model, micro_batch)
        for layer in stage.layers:
            yield from tensor2d.block_transfers(grid, model, layer, micro_batch)
        if stage.last:
            yield from tensor2d.head_transfers(grid, model, micro_batch)
        return
    axis = tensor.Axis(layout.tp_size, mesh.coordinate("tp", rank), layout.sp, layout.regather)
    shape = tensor.Shape(b, s, model.hidden, width)
    if stage.first:
        yield from tensor.embedding_transfers(shape, axis, micro_batch)
    for layer in stage.layers:
        yield from tensor.block_transfers(shape, axis, layer, micro_batch)
    if stage.last:
        yield from tensor.head_transfers(shape, axis, model.vocab, micro_batch)


def crossing(job: Job) -> context.Crossing:
    """Attention of one layer and micro-batch, as it crosses the job's context ranks."""
    layout, model, width = job.layout, job.model, WIDTH[job.train.dtype]
    side = layout.tp_grid[0] if layout.tp_grid else 1
    parts = side if layout.tp_grid else layout.tp_size
    return context.Crossing(
        kind=layout.cp_kind,
        ranks=layout.cp,
        batch=job.micro_batch // side,
        sequence=job.own_sequence * layout.cp,
        heads=model.heads // parts,
        kv_heads=max(1, model.kv_heads // parts),
        head_size=model.head_size,
        width=width,
        accumulate_width=max(4, width),
        ulysses=layout.ulysses,
        window=model.window,
    )


def _stages_for(job: Job, mesh: Mesh, rank: int, micro_batch: int) -> list[Stage]:
    """The stages that a micro-batch goes through on `rank`."""
    if job.layout.pp == 1:
        return stages_of(job)
    schedule, stages, place = schedule_of(job), stages_of(job), mesh.coordinate("pp", rank)
    route = schedule.routes[schedule.route_of[micro_batch % schedule.micro_batches]]
    return [stage for stage, at in zip(stages, route, strict=True) if at.rank == place]


def _shared(job: Job, parts: zero.Parts, cut: zero.Sharding, mesh: Mesh, rank: int) -> Iterator[Transfer]:
    """Partial gradients of what several ranks keep, summed before an update in the buffers of the data axis."""
    pieces = pieces_of(job, rank)
    named = {piece.parameter.name: piece for piece in pieces}
    held = zero.held_spans(parts, cut, _shard(job, mesh, rank))
    for axis in dict.fromkeys(share.axis for piece in pieces for share in piece.shares):
        size = mesh.size(axis)
        runs = [run for spans in held for run in shared_runs(spans, named, axis)]
        if runs and size > 1:
            elements = sum(stop - start for start, stop in runs)
            moved = traffic("all_reduce", elements, cut.reduce_width, size, mesh.coordinate(axis, rank))
            yield Transfer("backward", axis, "all_reduce", *moved)


def times(transfers: Iterable[Transfer], count: int) -> list[Transfer]:
    """The same transfers made `count` times."""
    return [
        replace(transfer, sent=transfer.sent * count, received=transfer.received * count, calls=transfer.calls * count)
        for transfer in transfers
        if count
    ]
