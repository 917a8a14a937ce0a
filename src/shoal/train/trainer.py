"""One training step, from tokens to updated weights, as one rank of a layout runs it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.comm.collectives import all_reduce
from shoal.comm.world import Group, World
from shoal.kernels.dropout import DropoutKey
from shoal.model.batch import Batch
from shoal.model.decoder import Decoder
from shoal.model.init import initialise
from shoal.plan.pieces import pair_of, pieces_of
from shoal.plan.stages import chunks_of, mini_batches
from shoal.plan.traffic import parts_of, stores_of
from shoal.spec.job import Job
from shoal.train.data.share import MicroBatch, filled
from shoal.train.experts import LayerLoad, Mixtures, mixture_of
from shoal.train.host import keep_freed_memory
from shoal.train.layers import crossing_of, layers_of
from shoal.train.optimizer import AdamW
from shoal.train.pipeline import Pipeline
from shoal.train.schedule import learning_rate
from shoal.train.states import States, states_of

CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds to the norm, so that runs can be held against plain torch
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Batches(Protocol):
    """What a trainer reads: this rank's micro-batches of a step, in order."""

    def batch(self, step: int) -> Sequence[MicroBatch]: ...


@dataclass(frozen=True)
class StepResult:
    """What every rank knows after a step. loss: mean over the `tokens` valid tokens of the whole batch, in nats.

    grad_norm: before clipping; of a step of several updates the root of the mean square of theirs. loads: of experts.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    skipped: bool
    loads: tuple[LayerLoad, ...] = ()


class Trainer:
    """A job's model, gradients and optimizer on one rank of `world`; `step` trains, `evaluate` only looks.

    Everything random is a function of the seed and global numbers, so every layout trains the same model (design, idea 4).
    drawn: False leaves the weights as memory was found.
    """

    def __init__(self, job: Job, world: World, batches: Batches, drawn: bool = True):
        self.job, self.world, self.batches = job, world, batches
        self.data_group = world.group(job.layout.data_axes)
        keep_freed_memory(world.device)
        # the ranks that together hold the model once, or with experts apart a few times
        self.model_group = world.group(("tp", "pp") if job.layout.ep == 1 else ("dp", "cp", "tp", "pp"))
        if pair := pair_of(job):
            world.group(pair)  # a collective; later those alone ask for it who keep what another keeps too
        self.dtype = DTYPES[job.train.dtype]
        self.pieces = pieces_of(job, world.rank)
        stages = chunks_of(job, world.mesh, world.rank)
        crossing = crossing_of(job, world)
        # of the tokens that are here
        self.places = np.arange(job.sequence) if crossing is None else crossing.places(job.sequence)
        layers, mixture = layers_of(job, world), mixture_of(job, world)
        self.model = Decoder(job.model, self.dtype, world.device, layers, crossing, stages, mixture)
        if drawn:
            initialise(self.model, job.model, job.train.seed, self.pieces)
        self.mixtures = Mixtures(job, world, self.model)
        self.states, self.shares = states_of(self.model, job, world, self.pieces, stores_of(job, world.rank))
        pipelined = job.layout.pp > 1
        parts = parts_of(job, world.rank)
        self.pipeline = Pipeline(job, world, self.model, self.states, parts) if pipelined else None
        self.mini_batches = mini_batches(job)
        folder = Path(job.train.out) / "optimizer" / f"rank{world.rank}"
        self.optimizer = AdamW(self.states.runs(), job.train, world.ledger, folder)
        if job.train.compile:
            self.model.compile_blocks()

    def step(self, step: int, inspect: Callable[[States], None] | None = None) -> StepResult:
        """Trains on the step's batch. A step whose gradients are not finite changes no weight and says so.

        Where the schedule updates weights between micro-batches, every mini-batch between two updates has a mean loss of
        its own, and what is not finite makes single updates of single stages fall out.

        inspect: is shown the states when the gradients, of the last mini-batch, are complete and not yet clipped.
        """
        ledger, train, rate = self.world.ledger, self.job.train, learning_rate(step, self.job.train)
        batches = [self._batch(micro_batch, step) for micro_batch in self.batches.batch(step)]
        with ledger.at(phase="forward"):
            valid = self._valid(batches)
        seeds = [1 / max(1, count) for run, count in zip(self.mini_batches, valid, strict=True) for _ in run]
        updating = self.pipeline is not None and self.pipeline.updating
        run = partial(self._updating, rate=rate) if updating else self._accumulating
        batches = [replace(batch, seed=seed) for batch, seed in zip(batches, seeds, strict=True)]
        loss_sum, squares = run(batches, seeds)
        if inspect:
            inspect(self.states)
        with ledger.at(phase="optimizer"):
            loss_sum += self.mixtures.auxiliary()
            mean_loss = self._sum_over_stages(self._sum_over_samples(loss_sum)) / max(1, sum(valid))
            norm = float(all_reduce(squares, self.world.group("pp"))) ** 0.5
            finite = math.isfinite(norm) and math.isfinite(mean_loss)
            if finite and not updating:
                if 0 < train.clip < norm + CLIP_EPS:
                    self.states.scale(train.clip / (norm + CLIP_EPS))
                self._update(rate)
            loads = self.mixtures.settle(moves_bias=finite)
        return StepResult(step, mean_loss, norm, rate, sum(valid), skipped=not finite, loads=loads)

    def _accumulating(self, batches: Sequence[Batch], seeds: Sequence[float]) -> tuple[float, Tensor]:
        """Forwards and backwards of all micro-batches, and no update: the sum of losses, the squares of the gradients."""
        loss_sum = self.pipeline.step(batches, seeds) if self.pipeline else self._one_by_one(batches, seeds[0])
        return loss_sum, self._complete()

    def _updating(self, batches: Sequence[Batch], seeds: Sequence[float], rate: float) -> tuple[float, Tensor]:
        """The same where each mini-batch is followed by an update: the mean over them of the squares.

        A stage updates by itself when its gradients are there and finite. Those of the other stages are not there yet, so
        nothing can be clipped to a norm of all.
        """
        assert self.pipeline is not None
        squares: list[Tensor] = []

        def update() -> None:
            squares.append(self._complete())
            if torch.isfinite(squares[-1]):
                self._update(rate)

        loss_sum = self.pipeline.step(batches, seeds, update)
        return loss_sum, torch.stack(squares).mean(0)

    def _complete(self) -> Tensor:
        """Completes the gradients; the sum of their squares over the ranks of this stage, each element counted once."""
        with self.world.ledger.at(phase="backward"):
            for shares in self.shares:
                shares.sum()
        with self.world.ledger.at(phase="optimizer"):
            return torch.stack([shares.squares(self.world.device) for shares in self.shares]).sum(0)

    def _update(self, rate: float) -> None:
        """One update of this rank's weights with the gradients as they are."""
        self.optimizer.step(rate)
        self.states.spread()

    def _one_by_one(self, batches: Sequence[Batch], seed: float) -> float:
        """Forward and backward of one micro-batch after the other; the sum of losses."""
        ledger, last, loss_sum = self.world.ledger, len(batches) - 1, 0.0
        for place, batch in enumerate(batches):
            with ledger.at(phase="backward", micro_batch=place), self.states.micro_batch(place == 0, place == last):
                with ledger.at(phase="forward"):
                    loss = self.model.run(batch)
                (loss * seed).backward()
            loss_sum += float(loss.detach())
        return loss_sum

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Mean loss per valid token over all ranks' batches, in nats; nan when no token is valid."""
        batches = [replace(self._batch(micro_batch, step=0), dropout=None) for micro_batch in micro_batches]
        with self.world.ledger.at(phase="evaluate"):
            if self.pipeline:
                loss_sum = self.pipeline.evaluate(batches)
            else:
                loss_sum = sum(float(self.model.run(batch)) for batch in batches)
            total = self._sum_over_stages(self._sum_over_samples(loss_sum))
            counted = self._sum_over_samples(sum(map(_counted, batches)))
        return total / counted if counted else math.nan

    def _batch(self, micro_batch: MicroBatch, step: int) -> Batch:
        """What this rank has of the micro-batch, on its device: its part of every sequence, filled up where need be."""
        whole = filled(micro_batch, self.job.sequence)
        tensor = partial(torch.as_tensor, device=self.world.device)
        tokens, targets = (tensor(np.ascontiguousarray(x[:, self.places])) for x in (whole.tokens, whole.targets))
        documents = None if whole.documents is None else tensor(whole.documents)
        places = tensor(self.places)
        positions = None
        if self.job.layout.cp > 1 or self.job.data.pad:
            positions = places.clamp(max=self.job.model.positions_max - 1)[None]  # beyond are only filled-up ones
        dropout = None
        if self.job.model.dropout:
            samples = tensor(np.asarray(micro_batch.samples, dtype=np.int64))
            dropout = DropoutKey(self.job.train.seed, step, samples, places)
        order = None
        if self.job.model.moe:
            order = tensor(np.asarray(micro_batch.samples, dtype=np.int64))[:, None] * self.job.sequence + places
        return Batch(tokens, targets, positions, documents, dropout, order)

    def _valid(self, batches: Sequence[Batch]) -> list[int]:
        """Valid tokens of each mini-batch over all ranks, exact below 2^53."""
        here = [float(sum(_counted(batches[i]) for i in run)) for run in self.mini_batches]
        return [int(count) for count in all_reduce(self._float64(here), self.data_group)]

    def _sum_over_samples(self, value: float) -> float:
        """Sum over the data axis, exact for counts below 2^53."""
        return self._sum(value, self.data_group)

    def _sum_over_stages(self, value: float) -> float:
        """Sum over the pipeline: of what one stage knows and the others hold as 0."""
        return self._sum(value, self.world.group("pp"))

    def _sum(self, value: float, group: Group) -> float:
        return float(all_reduce(self._float64([value]), group))

    def _float64(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.world.device)


def _counted(batch: Batch) -> int:
    assert batch.targets is not None
    return int((batch.targets >= 0).sum())
