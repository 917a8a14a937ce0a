"""Composes the axes' transfers into what one rank sends and receives in a step, an evaluation and a run. No torch."""

from collections.abc import Iterable
from dataclasses import replace

from shoal.axes.data import cost as data
from shoal.axes.zero import cost as zero
from shoal.mesh import Mesh
from shoal.spec.inventory import elements, inventory
from shoal.spec.job import WIDTH, Job
from shoal.transfer import Transfer


def sharding(job: Job) -> zero.Sharding:
    """How the job cuts the model's states over the data axis."""
    width = WIDTH[job.train.dtype]
    return zero.Sharding(
        stage=job.layout.zero,
        ranks=job.layout.dp // job.layout.hsdp,
        replicas=job.layout.hsdp,
        width=width,
        reduce_width=width,
        state_width=max(4, width),
        masters=width < 4,
    )


def step_transfers(job: Job, rank: int) -> list[Transfer]:
    """Every transfer of one training step on `rank`, in closed form."""
    mesh, layout, cut = Mesh.of(job.layout), job.layout, sharding(job)
    parts = zero.partition(inventory(job.model), layout.zero, job.train.bucket_mb * 1e6, cut.width)
    sizes = [sum(map(elements, part)) for part in parts]
    transfers = list(data.loss_transfers(layout.dp, mesh.coordinate("dp", rank)))
    if not layout.zero:
        width, last = cut.width, layout.micro_batches - 1
        transfers += data.gradient_transfers(sizes, layout.dp, mesh.coordinate("dp", rank), width, last)
    else:
        shard, replica = mesh.coordinate("shard", rank), mesh.coordinate("replicate", rank)
        transfers += zero.step_transfers(sizes, cut, shard, replica, layout.micro_batches)
    return transfers


def evaluation_transfers(job: Job, rank: int) -> list[Transfer]:
    """Every transfer of one evaluation on `rank`: the loss and the count of valid tokens."""
    return list(data.evaluation_transfers(job.layout.dp, Mesh.of(job.layout).coordinate("dp", rank)))


def times(transfers: Iterable[Transfer], count: int) -> list[Transfer]:
    """The same transfers made `count` times."""
    return [
        replace(transfer, sent=transfer.sent * count, received=transfer.received * count, calls=transfer.calls * count)
        for transfer in transfers
        if count
    ]
