"""Where a model's weights and gradients live on this rank: chosen by the layout, used by the trainer through one interface."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from shoal.axes.data.run import DataParallel
from shoal.axes.flat import Bucket, Held
from shoal.axes.piece import Piece
from shoal.axes.zero.cost import Parts, kept_units
from shoal.axes.zero.run import ZeRO
from shoal.comm.world import Group, World
from shoal.model.decoder import Decoder
from shoal.plan.traffic import sharding
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
    def interleaved(self) -> AbstractContextManager[None]: ...
    def finish(self, names: Collection[str], last: bool) -> None: ...
    def free(self, names: Collection[str]) -> None: ...
    def held(self) -> Iterator[Held]: ...
    def scale(self, factor: float) -> None: ...
    def runs(self) -> Iterator[tuple[Tensor, Tensor, bool]]: ...
    def spread(self) -> None: ...
    def gradients(self) -> Iterator[tuple[str, Tensor]]: ...
    def weights(self) -> Iterator[tuple[str, Tensor]]: ...


def data_states(model: Decoder, job: Job, world: World, pieces: Sequence[Piece], parts: Parts) -> States:
    """The states of `model` on this rank, whose pieces these are, as the job's layout wants them over the data axis."""
    cut = sharding(job)
    named, decays = dict(model.named_parameters()), {p.parameter.name for p in pieces if p.parameter.decay}
    runs = {name: [(p.name, named[p.name]) for p in run] for name, run in parts.items()}
    if not cut.stage:
        return DataParallel(
            {name: Bucket(run, decays) for name, run in runs.items()}, world.group(job.layout.data_axes)
        )
    return ZeRO(
        runs,
        decays,
        world.group(job.layout.shard_axes),
        stage=cut.stage,
        modules=_users(model, runs) if cut.stage == 3 else {},
        kept=kept_units(list(runs), cut) if cut.stage == 3 else set(),
        replicas=world.group("replicate") if cut.replicas > 1 else None,
        literal=cut.literal,
        gradient_dtype=torch.float32 if job.train.reduce_dtype == "float32" else None,
    )


def _users(model: Decoder, runs: Mapping[str, Sequence[tuple[str, nn.Parameter]]]) -> dict[str, list[nn.Module]]:
    """The modules that use each run's parameters when they are called: its own unit's, of a tied matrix both ends'."""
    units = dict(model.units())
    users: dict[str, list[nn.Module]] = {}
    for name, run in runs.items():
        wanted = {".".join(parameter.split(".")[: 2 if parameter.startswith("blocks.") else 1]) for parameter, _ in run}
        if model.spec.tied and any(parameter == "embedding.weight" for parameter, _ in run):
            wanted.add("head")
        users[name] = [module for unit, module in units.items() if unit in wanted]
    return users
