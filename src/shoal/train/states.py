"""Where a model's weights and gradients live on this rank: chosen by the layout, used by the trainer through one interface."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from shoal.axes.data.run import DataParallel
from shoal.axes.flat import Bucket, Held
from shoal.axes.piece import Piece
from shoal.axes.zero.cost import ROOT, kept_units
from shoal.axes.zero.run import ZeRO
from shoal.comm.world import Group, World
from shoal.model.decoder import Decoder
from shoal.plan.traffic import parts_of, sharding
from shoal.spec.job import Job


class States(Protocol):
    """Weights and gradients under some layout; what each method does stands with those who have it.

    shared: whether this rank's weights need the ranks of the data axis too, so that all must call what reads them.
    shards: the group over which gradients lie in pieces; of one rank where all of them have all.
    """

    @property
    def shared(self) -> bool: ...
    @property
    def shards(self) -> Group: ...
    def micro_batch(self, first: bool, last: bool) -> AbstractContextManager[None]: ...
    def held(self) -> Iterator[Held]: ...
    def scale(self, factor: float) -> None: ...
    def runs(self) -> Iterator[tuple[Tensor, Tensor, bool]]: ...
    def spread(self) -> None: ...
    def gradients(self) -> Iterator[tuple[str, Tensor]]: ...
    def weights(self) -> Iterator[tuple[str, Tensor]]: ...


def data_states(model: Decoder, job: Job, world: World, pieces: Sequence[Piece]) -> States:
    """The states of `model` on this rank, whose pieces these are, as the job's layout wants them over the data axis."""
    cut = sharding(job)
    named, decays = dict(model.named_parameters()), {p.parameter.name for p in pieces if p.parameter.decay}
    runs = {name: [(p.name, named[p.name]) for p in run] for name, run in parts_of(job, pieces).items()}
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
