"""Composes the axes' transfers into what one rank sends and receives in a step, an evaluation and a run. No torch."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.axes.context import cost as context
from shoal.axes.data import cost as data
from shoal.axes.expert import cost as expert
from shoal.axes.piece import Piece, shared_runs
from shoal.axes.pipeline import cost as pipeline
from shoal.axes.pipeline.evaluation import forward_only
from shoal.axes.pipeline.stage import Stage
from shoal.axes.recompute.cost import repeated_transfers
from shoal.axes.tensor import cost as tensor
from shoal.axes.tensor2d import cost as tensor2d
from shoal.axes.zero import cost as zero
from shoal.mesh import Mesh
from shoal.plan import experts
from shoal.plan.pieces import TIED, mesh_of, names_by_chunk, pieces_of
from shoal.plan.stages import chunks_of, mini_batches, schedule_of, stages_for
from shoal.spec.inventory import Parameter
from shoal.spec.job import WIDTH, Job
from shoal.transfer import Transfer, traffic

TWICE = "tied"  # the part of a matrix that two chunks of a rank use
EXPERTS = "experts"  # the word in the names of parts whose gradients the expert axis keeps apart


@dataclass(frozen=True)
class Store:
    """A part of a rank's states: parameters whose gradients are summed over the same ranks, those along `axes`.

    parts, cut: as in sharding. shard: this rank's number in the shard group. summed: the axes whose ranks keep other
    elements, over which squares add up to a norm, beside the shards.
    """

    parts: zero.Parts
    cut: zero.Sharding
    shard: int
    axes: tuple[str, ...]
    summed: tuple[str, ...]


def stores_of(job: Job, rank: int) -> list[Store]:
    """The states of `rank`: of what the data axes share, and of experts that the expert axis cuts, if it holds any."""
    layout, mesh, parts = job.layout, mesh_of(job), parts_of(job, rank)
    apart = {name for name in parts if EXPERTS in name.split()}
    shared = {name: part for name, part in parts.items() if name not in apart}
    stores = [Store(shared, sharding(job), shard_of(job, mesh, rank), layout.data_axes, ("tp",))]
    if layout.ep > 1:
        cut = sharding(job)
        own = "eshard" if cut.replicas > 1 else "edp"
        cut = replace(cut, ranks=mesh.size(own) if cut.stage else 1, axis=own)
        shard = mesh.coordinate(own, rank) if cut.stage else 0
        axes = ("ep", "tp") if layout.etp > 1 else ("ep",)
        stores.append(Store({name: parts[name] for name in parts if name in apart}, cut, shard, ("edp",), axes))
    return stores


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
    so that both cut it alike. Experts that the expert axis cuts are in parts of their own, whose names say so.
    """
    kept = [piece.local for piece in pieces_of(job, rank)]
    if job.layout.pp == 1:
        return _partition(job, kept)
    parts: dict[str, Sequence[Parameter]] = {}
    chunks, by_chunk = chunks_of(job, mesh_of(job), rank), names_by_chunk(job, rank)
    # In the order of the model, which ranks that hold the same stages number differently, agree on.
    for chunk in sorted(range(len(chunks)), key=lambda chunk: chunks[chunk].layers.start):
        apart = {TIED} if job.model.tied else set()
        own = [parameter for parameter in kept if parameter.name in by_chunk[chunk] - apart]
        for name, part in _partition(job, own, ends_apart=True).items():
            parts[f"chunk {chunk} {name}"] = part
    if tied := [parameter for parameter in kept if parameter.name == TIED and job.model.tied]:
        users = [chunk for chunk, names in enumerate(by_chunk) if TIED in names]
        parts[TWICE if len(users) > 1 else f"chunk {users[0]} tied"] = tied
    return parts


def _partition(job: Job, kept: Sequence[Parameter], ends_apart: bool = False) -> zero.Parts:
    """Those of one chunk, or of the whole model."""
    bucket, width, apart = job.train.bucket_mb * 1e6, WIDTH[job.train.dtype], job.layout.ep > 1
    shared = [parameter for parameter in kept if not (apart and parameter.experts)]
    own = [parameter for parameter in kept if apart and parameter.experts]
    parts = dict(zero.partition(shared, job.layout.zero, bucket, width, ends_apart))
    if own:
        of_experts = zero.partition(own, job.layout.zero, bucket, width, ends_apart=True)
        parts |= {f"{EXPERTS} {name}": part for name, part in of_experts.items()}
    return parts


def step_transfers(job: Job, rank: int, tokens: bool = True) -> list[Transfer]:
    """Every transfer of one training step on `rank`, in closed form.

    tokens: with what tokens move on their way to experts, on average; experts.routed_transfers has it exactly, after a run.
    """
    mesh, layout, updates = mesh_of(job), job.layout, mini_batches(job)
    transfers: list[Transfer] = [*data.loss_transfers(*_place(mesh, layout.data_axes, rank), len(updates))]
    for micro_batch in range(layout.micro_batches):
        transfers += _micro_batch(job, mesh, rank, micro_batch, tokens)
    if job.model.moe:
        transfers += _statistics(job, mesh, rank)
    if layout.pp > 1:
        stage = mesh.coordinate("pp", rank)
        transfers += pipeline.step_transfers(schedule_of(job), stage, _message(job))
        transfers += pipeline.scalar_transfers(layout.pp, stage)
    stores, pieces = stores_of(job, rank), pieces_of(job, rank)
    for run in updates:
        transfers += _update(job, mesh, rank, run, stores, pieces)
    return transfers


def _update(
    job: Job, mesh: Mesh, rank: int, run: range, stores: Sequence[Store], pieces: Sequence[Piece]
) -> Iterator[Transfer]:
    """What it takes to update the weights of `rank` once, with the gradients of a run of micro-batches.

    stores, pieces: of the rank.
    """
    seen = len(run)  # by each stage; a stage that exists twice sees half
    if job.layout.pp > 1:
        seen //= len(schedule_of(job).routes)
    for store in stores:
        parts, cut = store.parts, store.cut
        if cut.stage:
            # What two chunks of a rank use is summed at the end of the step alone.
            uses = {TWICE: seen * 2}
            if job.layout.pp > 1:  # what is kept gathered stays until the last micro-batch
                uses |= dict.fromkeys(zero.kept_units(list(parts), cut), 1)
            replica = mesh.coordinate("replicate", rank)
            for transfer in zero.step_transfers(parts, cut, store.shard, replica, seen, uses, {TWICE: 1}):
                within = transfer.micro_batch
                yield transfer if within is None else replace(transfer, micro_batch=run.start + within)
        else:
            ranks, place, axis = _place(mesh, store.axes, rank)
            last = run.start + seen - 1
            yield from data.gradient_transfers(zero.sizes(parts), ranks, place, cut.width, last, axis)
        yield from _shared(store, pieces, mesh, rank)
        for axis in store.summed:
            yield from tensor.norm_transfers(mesh.size(axis), mesh.coordinate(axis, rank), axis)
        if job.train.offload != "none":
            yield from zero.offload_transfers(parts, cut, store.shard, job.train.offload)


def _statistics(job: Job, mesh: Mesh, rank: int) -> Iterator[Transfer]:
    """Once a step: the loads of all experts, and the auxiliary losses where tensor ranks have other shares of them."""
    moe = job.model.moe
    assert moe is not None
    ranks, place, axis = _place(mesh, experts.load_axes(job.layout), rank)
    yield from expert.load_transfers(axis, ranks, place, len(job.model.mixtures), moe.experts)
    if moe.losses and job.layout.routes_apart:
        yield from tensor.norm_transfers(job.layout.tp_size, mesh.coordinate("tp", rank))


def evaluation_transfers(job: Job, rank: int, forwards: int, tokens: bool = True) -> list[Transfer]:
    """Every transfer of one evaluation of `forwards` micro-batches on `rank`: weights, activations, loss, valid tokens.

    tokens: as in step_transfers.
    """
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
        forward += experts.evaluated(_micro_batch(job, mesh, rank, micro_batch, tokens))
    return [
        *data.evaluation_transfers(*_place(mesh, layout.data_axes, rank)),
        *(
            transfer
            for store in stores_of(job, rank)
            for transfer in zero.evaluation_transfers(store.parts, store.cut, store.shard, forwards, uses)
        ),
        *forward,
    ]


def _place(mesh: Mesh, axes: tuple[str, ...], rank: int) -> tuple[int, int, str]:
    """(ranks, this one's number among them, the name) of the group along some axes."""
    ranks = mesh.group(axes, rank)
    return len(ranks), ranks.index(rank), "+".join(axes)


def shard_of(job: Job, mesh: Mesh, rank: int) -> int:
    """Which piece of the model states `rank` has."""
    return _place(mesh, job.layout.shard_axes, rank)[1] if job.layout.zero else 0


def _message(job: Job) -> int:
    """Bytes of what goes from stage to stage for one micro-batch, on each rank."""
    layout, model = job.layout, job.model
    parts = layout.tp_size if layout.sp or layout.tp_grid else 1
    return pipeline.message_bytes(job.micro_batch, job.own_sequence, model.hidden, WIDTH[job.train.dtype], parts)


def _micro_batch(job: Job, mesh: Mesh, rank: int, micro_batch: int, tokens: bool) -> Iterator[Transfer]:
    """What the tensor, context and expert axes move for one micro-batch, in the stages that `rank` has of it."""
    mixtures = set(job.model.mixtures)
    for stage in stages_for(job, mesh, rank, micro_batch):
        moved = [*_tensor(job, mesh, rank, stage, micro_batch)]
        if job.layout.cp > 1:
            for layer in stage.layers:
                moved += context.transfers(crossing(job), layer, micro_batch)
        for layer in mixtures & set(stage.layers):
            moved += experts.fixed_transfers(job, mesh, rank, layer, micro_batch)
            if tokens:
                moved += experts.expected_transfers(job, mesh, rank, layer, micro_batch)
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
        pairs = 1 if model.moe and model.moe.at(layer) else 2
        yield from tensor.block_transfers(shape, axis, layer, micro_batch, pairs)
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


def _shared(store: Store, pieces: Sequence[Piece], mesh: Mesh, rank: int) -> Iterator[Transfer]:
    """Partial gradients of what several ranks keep, summed before an update in the buffers of the data axis."""
    named = {piece.parameter.name: piece for piece in pieces}
    held = zero.held_spans(store.parts, store.cut, store.shard)
    for axis in dict.fromkeys(share.axis for piece in pieces for share in piece.shares):
        size = mesh.size(axis)
        runs = [run for spans in held for run in shared_runs(spans, named, axis)]
        if runs and size > 1:
            elements = sum(stop - start for start, stop in runs)
            moved = traffic("all_reduce", elements, store.cut.reduce_width, size, mesh.coordinate(axis, rank))
            yield Transfer("backward", axis, "all_reduce", *moved)


def times(transfers: Iterable[Transfer], count: int) -> list[Transfer]:
    """The same transfers made `count` times."""
    return [
        replace(transfer, sent=transfer.sent * count, received=transfer.received * count, calls=transfer.calls * count)
        for transfer in transfers
        if count
    ]
