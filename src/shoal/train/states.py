"""Where a model's weights and gradients live on this rank: chosen by the layout, used by the trainer through one interface."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from shoal.axes.data.run import DataParallel
from shoal.axes.flat import Bucket
from shoal.axes.zero.cost import ROOT, kept_units
from shoal.axes.zero.run import ZeRO
from shoal.comm.world import World
from shoal.model.decoder import Decoder
from shoal.plan.traffic import parts_of, sharding
from shoal.spec.inventory import inventory
from shoal.spec.job import Job


class States(Protocol):
    """Weights and gradients under some layout; what each method does stands with those who have it.

    shared: whether the whole weights need all ranks, so that every rank must call what reads them.
    """

    @property
    def shared(self) -> bool: ...
    def micro_batch(self, first: bool, last: bool) -> AbstractContextManager[None]: ...
    def norm(self) -> float: ...
    def scale(self, factor: float) -> None: ...
    def runs(self) -> Iterator[tuple[Tensor, Tensor, bool]]: ...
    def spread(self) -> None: ...
    def gradients(self) -> Iterator[tuple[str, Tensor]]: ...
    def weights(self) -> Iterator[tuple[str, Tensor]]: ...


def data_states(model: Decoder, job: Job, world: World) -> States:
    """The states of `model` on this rank, as the job's layout wants them over the data axis."""
    parameters, cut = inventory(job.model), sharding(job)
    named, decays = dict(model.named_parameters()), {p.name for p in parameters if p.decay}
    runs = {name: [(p.name, named[p.name]) for p in run] for name, run in parts_of(job).items()}
    if not cut.stage:
        return DataParallel([Bucket(run, decays) for run in runs.values()], world.group("dp"))
    modules: dict[str, list[nn.Module]] = {}
    for name, module in model.units():
        modules.setdefault(name if name in runs else ROOT, []).append(module)
    return ZeRO(
        runs,
        decays,
        world.group(cut.shard_axis),
        stage=cut.stage,
        modules=modules if cut.stage == 3 else {},
        kept=kept_units(list(runs), cut) if cut.stage == 3 else set(),
        replicas=world.group("replicate") if cut.replicas > 1 else None,
        literal=cut.literal,
        gradient_dtype=torch.float32 if job.train.reduce_dtype == "float32" else None,
    )
