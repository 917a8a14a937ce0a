"""Where a model's weights and gradients live on this rank: chosen by the layout, used by the trainer through one interface."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn

from shoal.axes.data.run import DataParallel
from shoal.axes.flat import Bucket, Held
from shoal.axes.piece import Piece
from shoal.axes.shares import Shares
from shoal.axes.zero.cost import kept_units
from shoal.axes.zero.run import ZeRO
from shoal.comm.world import World
from shoal.model.decoder import Decoder
from shoal.plan.traffic import Store
from shoal.spec.job import Job


class States(Protocol):
    """Weights and gradients under some layout; what each method does stands with those who have it.

    shared: whether this rank's weights need the ranks of the data axis too, so that all must call what reads them.
    """

    @property
    def shared(self) -> bool: ...
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


class Together:
    """Several states as one: of parameters whose gradients are summed over different ranks. All do everything in one order."""

    def __init__(self, states: Sequence[States]):
        self.states = states

    @property
    def shared(self) -> bool:
        return any(states.shared for states in self.states)

    @contextmanager
    def micro_batch(self, first: bool, last: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for states in self.states:
                stack.enter_context(states.micro_batch(first, last))
            yield

    @contextmanager
    def interleaved(self) -> Iterator[None]:
        with ExitStack() as stack:
            for states in self.states:
                stack.enter_context(states.interleaved())
            yield

    def finish(self, names: Collection[str], last: bool) -> None:
        for states in self.states:
            states.finish(names, last)

    def free(self, names: Collection[str]) -> None:
        for states in self.states:
            states.free(names)

    def held(self) -> Iterator[Held]:
        return chain.from_iterable(states.held() for states in self.states)

    def scale(self, factor: float) -> None:
        for states in self.states:
            states.scale(factor)

    def runs(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        return chain.from_iterable(states.runs() for states in self.states)

    def spread(self) -> None:
        for states in self.states:
            states.spread()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return chain.from_iterable(states.gradients() for states in self.states)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return chain.from_iterable(states.weights() for states in self.states)


def states_of(
    model: Decoder, job: Job, world: World, pieces: Sequence[Piece], stores: Sequence[Store]
) -> tuple[States, list[Shares]]:
    """The states of `model` on this rank, whose pieces these are, as the job's layout wants them, and what of each of
    their kinds several ranks keep.
    """
    states = [_stored(model, job, world, pieces, store) for store in stores]
    shares = []
    for each, store in zip(states, stores, strict=True):
        different = [each.shards, *(world.group(axis) for axis in store.summed)]
        shares.append(Shares(each.held(), pieces, world.group, different))
    return states[0] if len(states) == 1 else Together(states), shares


def _stored(model: Decoder, job: Job, world: World, pieces: Sequence[Piece], store: Store) -> DataParallel | ZeRO:
    cut = store.cut
    named, decays = dict(model.named_parameters()), {p.parameter.name for p in pieces if p.parameter.decay}
    runs = {name: [(p.name, named[p.name]) for p in run] for name, run in store.parts.items()}
    if not cut.stage:
        return DataParallel({name: Bucket(run, decays) for name, run in runs.items()}, world.group(store.axes))
    return ZeRO(
        runs,
        decays,
        world.group(tuple(cut.axis.split("+"))),
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
