"""One training step, from tokens to updated weights, as one rank of a layout runs it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.axes.shares import Shares
from shoal.comm.collectives import all_reduce
from shoal.comm.world import World
from shoal.kernels.dropout import DropoutKey
from shoal.model.decoder import Decoder
from shoal.model.init import initialise
from shoal.plan.pieces import pieces_of
from shoal.spec.job import Job
from shoal.train.data.share import MicroBatch
from shoal.train.host import keep_freed_memory
from shoal.train.layers import layers_of
from shoal.train.optimizer import AdamW
from shoal.train.schedule import learning_rate
from shoal.train.states import States, data_states

CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds to the norm, so that runs can be held against plain torch
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Batches(Protocol):
    """What a trainer reads: this rank's micro-batches of a step, in order."""

    def batch(self, step: int) -> Sequence[MicroBatch]: ...


@dataclass(frozen=True)
class StepResult:
    """What every rank knows after a step. loss: mean over the `tokens` valid tokens of the whole batch, in nats."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    skipped: bool


class Trainer:
    """A job's model, gradients and optimizer on one rank of `world`; `step` trains, `evaluate` only looks.

    Everything random is a function of the seed and global numbers, so every layout trains the same model (design, idea 4).
    """

    def __init__(self, job: Job, world: World, batches: Batches):
        self.job, self.world, self.batches = job, world, batches
        self.data_group = world.group("dp")
        keep_freed_memory(world.device)
        self.model_group = world.group(("tp", "pp"))  # the ranks that together hold the model once
        self.dtype = DTYPES[job.train.dtype]
        self.pieces = pieces_of(job, world.rank)
        self.model = Decoder(job.model, self.dtype, world.device, layers_of(job, world))
        initialise(self.model, job.model, job.train.seed, self.pieces)
        self.states = data_states(self.model, job, world, self.pieces)
        self.shares = Shares(self.states.held(), self.pieces, world.group)
        folder = Path(job.train.out) / "optimizer" / f"rank{world.rank}"
        self.optimizer = AdamW(self.states.runs(), job.train, world.ledger, folder)
        if job.train.compile:
            self.model.compile_blocks()

    def step(self, step: int, inspect: Callable[[States], None] | None = None) -> StepResult:
        """Trains on the step's batch. A step whose gradients are not finite changes no weight and says so.

        inspect: is shown the states when the gradients are complete and not yet clipped.
        """
        ledger, train = self.world.ledger, self.job.train
        micro_batches = [self._tensors(micro_batch, step) for micro_batch in self.batches.batch(step)]
        with ledger.at(phase="forward"):
            counted = self._sum_over_ranks(sum(int((targets >= 0).sum()) for _, targets, _ in micro_batches))
        valid = int(counted)
        loss_sum = 0.0
        last = len(micro_batches) - 1
        for place, (tokens, targets, dropout) in enumerate(micro_batches):
            with ledger.at(phase="backward", micro_batch=place), self.states.micro_batch(place == 0, place == last):
                with ledger.at(phase="forward"):
                    loss = self.model.loss(tokens, targets, dropout=dropout)
                (loss / max(1, valid)).backward()
            loss_sum += float(loss.detach())
        with ledger.at(phase="backward"):
            self.shares.sum()
        if inspect:
            inspect(self.states)
        with ledger.at(phase="optimizer"):
            mean_loss = self._sum_over_ranks(loss_sum) / max(1, valid)
            rate = learning_rate(step, train)
            norm = self._norm()
            finite = math.isfinite(norm) and math.isfinite(mean_loss)
            if finite:
                if 0 < train.clip < norm + CLIP_EPS:
                    self.states.scale(train.clip / (norm + CLIP_EPS))
                self.optimizer.step(rate)
                self.states.spread()
        return StepResult(step, mean_loss, norm, rate, valid, skipped=not finite)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> float:
        """Mean loss per valid token over all ranks' batches, in nats; nan when no token is valid."""
        with self.world.ledger.at(phase="evaluate"):
            loss_sum, valid = 0.0, 0
            for micro_batch in batches:
                tokens, targets, _ = self._tensors(micro_batch, step=0)
                loss_sum += float(self.model.loss(tokens, targets))
                valid += int((targets >= 0).sum())
            total, counted = self._sum_over_ranks(loss_sum), self._sum_over_ranks(valid)
        return total / counted if counted else math.nan

    def _tensors(self, micro_batch: MicroBatch, step: int) -> tuple[Tensor, Tensor, DropoutKey | None]:
        """(tokens, targets, dropout key) on this rank's device."""
        device = self.world.device
        tokens, targets = (torch.from_numpy(array).to(device) for array in (micro_batch.tokens, micro_batch.targets))
        if not self.job.model.dropout:
            return tokens, targets, None
        samples = torch.from_numpy(np.asarray(micro_batch.samples, dtype=np.int64)).to(device)
        positions = torch.arange(tokens.shape[1], device=device)
        return tokens, targets, DropoutKey(self.job.train.seed, step, samples, positions)

    def _norm(self) -> float:
        """Global L2 norm of the gradients, each element counted once, whatever the layout."""
        squares = self.shares.squares(self.world.device)
        for group in (self.states.shards, self.world.group("tp")):
            squares = all_reduce(squares, group)
        return float(squares) ** 0.5

    def _sum_over_ranks(self, value: float) -> float:
        """Sum over the data axis: one float64, exact for counts below 2^53."""
        scalar = torch.tensor([value], dtype=torch.float64, device=self.world.device)
        return float(all_reduce(scalar, self.data_group))
