"""Where a model's weights and gradients live on this rank: chosen by the layout, used by the trainer through one interface."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from shoal.axes.data.cost import buckets
from shoal.axes.data.run import DataParallel
from shoal.axes.flat import Bucket
from shoal.comm.world import World
from shoal.spec.inventory import inventory
from shoal.spec.job import WIDTH, Job


class States(Protocol):
    """Weights and gradients under some layout; what each method does stands with those who have it."""

    def micro_batch(self, first: bool, last: bool) -> AbstractContextManager[None]: ...
    def norm(self) -> float: ...
    def scale(self, factor: float) -> None: ...
    def runs(self) -> Iterator[tuple[Tensor, Tensor, bool]]: ...
    def spread(self) -> None: ...
    def gradients(self) -> Iterator[tuple[str, Tensor]]: ...
    def weights(self) -> Iterator[tuple[str, Tensor]]: ...


def data_states(model: nn.Module, job: Job, world: World) -> States:
    """The states of `model` on this rank, as the job's layout wants them over the data axis."""
    parameters = inventory(job.model)
    named, decays = dict(model.named_parameters()), {p.name for p in parameters if p.decay}
    runs = buckets(parameters, job.train.bucket_mb * 1e6, WIDTH[job.train.dtype])
    return DataParallel([Bucket([(p.name, named[p.name]) for p in run], decays) for run in runs], world.group("dp"))
