"""Where a model's weights and gradients live on this rank: chosen by the layout, used by the trainer through one interface."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from shoal.axes.data.run import DataParallel
from shoal.axes.flat import Bucket
from shoal.axes.memory import Memory
from shoal.axes.zero.cost import Sharding, partition
from shoal.axes.zero.part import Part
from shoal.axes.zero.run import ZeRO
from shoal.comm.world import World
from shoal.model.decoder import Decoder
from shoal.plan.traffic import sharding
from shoal.spec.inventory import inventory
from shoal.spec.job import Job

Named = Sequence[tuple[str, nn.Parameter]]


class States(Protocol):
    """Weights and gradients under some layout; what each method does stands with those who have it."""

    def micro_batch(self, first: bool, last: bool) -> AbstractContextManager[None]: ...
    def norm(self) -> float: ...
    def scale(self, factor: float) -> None: ...
    def runs(self) -> Iterator[tuple[Tensor, Tensor, bool]]: ...
    def spread(self) -> None: ...
    def gradients(self) -> Iterator[tuple[str, Tensor]]: ...
    def weights(self) -> Iterator[tuple[str, Tensor]]: ...


def data_states(model: Decoder, job: Job, world: World) -> States:
    """The states of `model` on this rank, as the job's layout wants them over the data axis."""
    parameters = inventory(job.model)
    named, decays = dict(model.named_parameters()), {p.name for p in parameters if p.decay}
    cut = sharding(job)
    runs = partition(parameters, job.layout.zero, job.train.bucket_mb * 1e6, cut.width)
    pairs = [[(p.name, named[p.name]) for p in run] for run in runs]
    if not job.layout.zero:
        return DataParallel([Bucket(run, decays) for run in pairs], world.group("dp"))
    return zero_states(pairs, decays, model, cut, world)


def zero_states(pairs: Sequence[Named], decays: set[str], model: Decoder, cut: Sharding, world: World) -> ZeRO:
    """ZeRO's states: one part per run of parameters, in stage 3 one unit per run."""
    group = world.group(cut.shard_axis)
    replicas = world.group("replicate") if cut.replicas > 1 else None
    memory = Memory()
    parts = [Part(run, decays, group, cut.stage, memory) for run in pairs]
    return ZeRO(parts, group, stage=cut.stage, replicas=replicas, literal=cut.literal, memory=memory)
