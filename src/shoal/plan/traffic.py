"""Composes the axes' transfers into what one rank sends and receives in a step, an evaluation and a run. No torch."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shoal.axes.data import cost as data
from shoal.axes.piece import Piece, shared_runs
from shoal.axes.tensor import cost as tensor
from shoal.axes.tensor2d import cost as tensor2d
from shoal.axes.zero import cost as zero
from shoal.mesh import Mesh
from shoal.plan.pieces import mesh_of, pieces_of
from shoal.spec.job import WIDTH, Job
from shoal.transfer import Transfer, traffic


def sharding(job: Job) -> zero.Sharding:
    """How the job cuts the model's states over the data axis."""
    width = WIDTH[job.train.dtype]
    return zero.Sharding(
        stage=job.layout.zero,
        ranks=job.layout.dp // job.layout.hsdp if job.layout.zero else 1,
        replicas=job.layout.hsdp if job.layout.zero else 1,
        literal=job.layout.zero1 == "ar+ag",
        reshard=job.layout.reshard,
        width=width,
        reduce_width=max(4, width) if job.train.reduce_dtype == "float32" else width,
        state_width=max(4, width),
        masters=width < 4,
    )


def parts_of(job: Job, pieces: Sequence[Piece]) -> zero.Parts:
    """What one collective of the data axis moves at once, by name, on the rank that keeps these pieces."""
    kept = [piece.local for piece in pieces]
    return zero.partition(kept, job.layout.zero, job.train.bucket_mb * 1e6, WIDTH[job.train.dtype])


def step_transfers(job: Job, rank: int) -> list[Transfer]:
    """Every transfer of one training step on `rank`, in closed form."""
    mesh, layout, cut, pieces = mesh_of(job), job.layout, sharding(job), pieces_of(job, rank)
    parts = parts_of(job, pieces)
    place = mesh.coordinate("dp", rank)
    shard = mesh.coordinate("shard", rank) if cut.stage else 0
    transfers: list[Transfer] = [*data.loss_transfers(layout.dp, place)]
    for micro_batch in range(layout.micro_batches):
        transfers += _micro_batch(job, mesh, rank, micro_batch)
    if cut.stage:
        replica = mesh.coordinate("replicate", rank)
        transfers += zero.step_transfers(parts, cut, shard, replica, layout.micro_batches)
    else:
        last = layout.micro_batches - 1
        transfers += data.gradient_transfers(zero.sizes(parts), layout.dp, place, cut.width, last)
    transfers += _shared(pieces, parts, cut, shard, mesh, rank)
    transfers += tensor.norm_transfers(layout.tp_size, mesh.coordinate("tp", rank))
    if job.train.offload != "none":
        transfers += zero.offload_transfers(parts, cut, shard, job.train.offload)
    return transfers


def evaluation_transfers(job: Job, rank: int, forwards: int) -> list[Transfer]:
    """Every transfer of one evaluation of `forwards` micro-batches on `rank`: weights, activations, loss, valid tokens."""
    mesh = mesh_of(job)
    forward = [
        replace(transfer, phase="evaluate", micro_batch=None)
        for transfer in _micro_batch(job, mesh, rank, 0)
        if transfer.phase == "forward"
    ]
    parts = parts_of(job, pieces_of(job, rank))
    return [
        *data.evaluation_transfers(job.layout.dp, mesh.coordinate("dp", rank)),
        *zero.evaluation_transfers(parts, sharding(job), mesh.coordinate("shard", rank), forwards),
        *times(forward, forwards),
    ]


def _micro_batch(job: Job, mesh: Mesh, rank: int, micro_batch: int) -> Iterable[Transfer]:
    """What the tensor axis moves for one micro-batch."""
    layout, width, b, s = job.layout, WIDTH[job.train.dtype], job.micro_batch, job.data.sequence
    if layout.tp_grid:
        row, column = mesh.coordinate("column", rank), mesh.coordinate("row", rank)
        grid = tensor2d.Grid(layout.tp_grid[0], row, column, b, s, width)
        return tensor2d.micro_batch_transfers(grid, job.model, micro_batch)
    axis = tensor.Axis(layout.tp_size, mesh.coordinate("tp", rank), layout.sp, layout.regather)
    return tensor.micro_batch_transfers(tensor.Shape(b, s, job.model.hidden, width), axis, job.model, micro_batch)


def _shared(
    pieces: Sequence[Piece], parts: zero.Parts, cut: zero.Sharding, shard: int, mesh: Mesh, rank: int
) -> Iterable[Transfer]:
    """Partial gradients of what several ranks keep, summed once a step in the buffers of the data axis."""
    named = {piece.parameter.name: piece for piece in pieces}
    held = zero.held_spans(parts, cut, shard)
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
