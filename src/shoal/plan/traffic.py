"""Composes the axes' transfers into what one rank sends and receives in a step, an evaluation and a run. No torch."""

from collections.abc import Iterable
from dataclasses import replace

from shoal.axes.data import cost as data
from shoal.axes.zero import cost as zero
from shoal.mesh import Mesh
from shoal.spec.inventory import inventory
from shoal.spec.job import WIDTH, Job
from shoal.transfer import Transfer


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


def parts_of(job: Job) -> zero.Parts:
    """What one collective of the data axis moves at once, by name."""
    return zero.partition(inventory(job.model), job.layout.zero, job.train.bucket_mb * 1e6, WIDTH[job.train.dtype])


def step_transfers(job: Job, rank: int) -> list[Transfer]:
    """Every transfer of one training step on `rank`, in closed form."""
    mesh, layout, cut, parts = Mesh.of(job.layout), job.layout, sharding(job), parts_of(job)
    place = mesh.coordinate("dp", rank)
    shard = mesh.coordinate("shard", rank) if cut.stage else 0
    transfers: list[Transfer] = [*data.loss_transfers(layout.dp, place)]
    if cut.stage:
        replica = mesh.coordinate("replicate", rank)
        transfers += zero.step_transfers(parts, cut, shard, replica, layout.micro_batches)
    else:
        last = layout.micro_batches - 1
        transfers += data.gradient_transfers(zero.sizes(parts), layout.dp, place, cut.width, last)
    if job.train.offload != "none":
        transfers += zero.offload_transfers(parts, cut, shard, job.train.offload)
    return transfers


def evaluation_transfers(job: Job, rank: int, forwards: int) -> list[Transfer]:
    """Every transfer of one evaluation of `forwards` micro-batches on `rank`: weights, the loss, the valid tokens."""
    mesh = Mesh.of(job.layout)
    return [
        *data.evaluation_transfers(job.layout.dp, mesh.coordinate("dp", rank)),
        *zero.evaluation_transfers(parts_of(job), sharding(job), mesh.coordinate("shard", rank), forwards),
    ]


def times(transfers: Iterable[Transfer], count: int) -> list[Transfer]:
    """The same transfers made `count` times."""
    return [
        replace(transfer, sent=transfer.sent * count, received=transfer.received * count, calls=transfer.calls * count)
        for transfer in transfers
        if count
    ]
