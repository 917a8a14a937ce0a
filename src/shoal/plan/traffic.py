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
        literal=job.layout.zero1 == "ar+ag",
        reshard=job.layout.reshard,
        width=width,
        reduce_width=width,
        state_width=max(4, width),
        masters=width < 4,
    )


def step_transfers(job: Job, rank: int) -> list[Transfer]:
    """Every transfer of one training step on `rank`, in closed form."""
    mesh, layout, cut = Mesh.of(job.layout), job.layout, sharding(job)
    sizes = _sizes(job, cut)
    transfers = list(data.loss_transfers(layout.dp, mesh.coordinate("dp", rank)))
    if not cut.stage:
        width, last = cut.width, layout.micro_batches - 1
        return transfers + list(
            data.gradient_transfers(list(sizes.values()), layout.dp, mesh.coordinate("dp", rank), width, last)
        )
    kept = zero.kept_units(list(sizes), cut.reshard) if cut.stage == 3 else set()
    return transfers + list(
        zero.step_transfers(
            list(sizes.values()),
            cut,
            mesh.coordinate("shard", rank),
            mesh.coordinate("replicate", rank),
            layout.micro_batches,
            [name in kept for name in sizes],
        )
    )


def evaluation_transfers(job: Job, rank: int, forwards: int) -> list[Transfer]:
    """Every transfer of one evaluation of `forwards` micro-batches on `rank`: weights, the loss, the valid tokens."""
    mesh, cut = Mesh.of(job.layout), sharding(job)
    sizes = _sizes(job, cut)
    uses = [2 if name == zero.ROOT else 1 for name in sizes]
    return [
        *data.evaluation_transfers(job.layout.dp, mesh.coordinate("dp", rank)),
        *zero.evaluation_transfers(list(sizes.values()), cut, mesh.coordinate("shard", rank), forwards, uses),
    ]


def _sizes(job: Job, cut: zero.Sharding) -> dict[str, int]:
    """Elements of every part, by name."""
    parts = zero.partition(inventory(job.model), cut.stage, job.train.bucket_mb * 1e6, cut.width)
    return {name: sum(map(elements, part)) for name, part in parts.items()}


def times(transfers: Iterable[Transfer], count: int) -> list[Transfer]:
    """The same transfers made `count` times."""
    return [
        replace(transfer, sent=transfer.sent * count, received=transfer.received * count, calls=transfer.calls * count)
        for transfer in transfers
        if count
    ]
