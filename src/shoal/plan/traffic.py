"""Composes the axes' transfers into what one rank sends and receives in a step, an evaluation and a run. No torch."""

from collections.abc import Iterable
from dataclasses import replace

from shoal.axes.data import cost as data
from shoal.mesh import Mesh
from shoal.spec.inventory import inventory
from shoal.spec.job import WIDTH, Job
from shoal.transfer import Transfer


def step_transfers(job: Job, rank: int) -> list[Transfer]:
    """Every transfer of one training step on `rank`, in closed form."""
    return list(
        data.step_transfers(
            inventory(job.model),
            job.layout.dp,
            Mesh.of(job.layout).coordinates(rank)["dp"],
            width=WIDTH[job.train.dtype],
            bucket_bytes=job.train.bucket_mb * 1e6,
            micro_batches=job.layout.micro_batches,
        )
    )


def evaluation_transfers(job: Job, rank: int) -> list[Transfer]:
    """Every transfer of one evaluation on `rank`: the loss and the count of valid tokens."""
    return list(data.evaluation_transfers(job.layout.dp, Mesh.of(job.layout).coordinates(rank)["dp"]))


def times(transfers: Iterable[Transfer], count: int) -> list[Transfer]:
    """The same transfers made `count` times."""
    return [
        replace(transfer, sent=transfer.sent * count, received=transfer.received * count, calls=transfer.calls * count)
        for transfer in transfers
        if count
    ]
