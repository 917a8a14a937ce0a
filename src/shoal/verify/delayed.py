"""What PipeDream computes, without a pipeline: one process and the whole model, each stage of it with delayed weights.

The truth for schedules that no plain training equals (spec PP-7). It knows the delays by the spec's own formulas, and
nothing of schedules, engines and buffers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from shoal.comm.world import World
from shoal.kernels.dropout import DropoutKey
from shoal.model.batch import Batch
from shoal.model.decoder import Decoder
from shoal.model.init import initialise
from shoal.plan.stages import stages_of
from shoal.spec.inventory import inventory
from shoal.spec.job import Job, TrainSpec
from shoal.spec.layout import Layout
from shoal.train.data.share import MicroBatch, filled
from shoal.train.experts import Mixtures
from shoal.train.schedule import learning_rate
from shoal.train.trainer import DTYPES
from shoal.verify.compare import Record
from shoal.verify.trial import MadeUpBatches

# How many of a step's updates micro-batch i meets in stage s of p.
DELAYED = {
    "pipedream": lambda p, s, i: max(0, i - (p - 1 - s)),
    "pipedream-vertical": lambda p, s, i: max(0, i - (p - 1)),
    "pipedream-2bw": lambda p, s, i: max(0, i // p - 1),
}


def delayed(rank: int, world: int, job: Job, steps: int) -> Record:
    """What `steps` steps of a job with such a schedule do, on the tokens of `trial`. Gradients: of each step's last update.

    For weights in float64 or float32. rank, world: of a pool's only rank.
    """
    layout = job.layout
    version, p, m = DELAYED[layout.schedule], layout.pp, layout.micro_batches
    size = p if layout.schedule == "pipedream-2bw" else 1  # of a mini-batch, in micro-batches
    batches = MadeUpBatches(replace(job, layout=Layout(micro_batches=m)), 0)
    model = Decoder(job.model, DTYPES[job.train.dtype])
    initialise(model, job.model, job.train.seed)
    experts = Mixtures(replace(job, layout=Layout()), World.single(), model)
    named = dict(model.named_parameters())
    stages = [_Stage({name: named[name].detach().clone() for name in names}, job.train) for names in _names(job)]
    losses, norms, gradients = [], [], []
    for step in range(steps):
        micro_batches = batches.batch(step)
        tokens = [int((micro_batch.targets >= 0).sum()) for micro_batch in micro_batches]
        for stage in stages:
            stage.begin()
        summed, squares = 0.0, list[float]()
        for start in range(0, m, size):
            mini_batch = range(start, min(start + size, m))
            count = max(1, sum(tokens[i] for i in mini_batch))
            for i in mini_batch:
                for s, stage in enumerate(stages):
                    stage.show(version(p, s, i), named)
                loss = _loss(model, job, micro_batches[i], step, 1 / count)
                (loss / count).backward()  # adds up in .grad
                summed += float(loss.detach()) + experts.auxiliary()
            found = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
            for stage in stages:
                stage.update(found, learning_rate(step, job.train))
            squares.append(sum([float(gradient.double().square().sum()) for gradient in found.values()]))
            model.zero_grad()
        experts.settle(moves_bias=True)
        losses.append(summed / max(1, sum(tokens)))
        norms.append(float(np.sqrt(np.mean(squares))))
        gradients.append({name: gradient.numpy() for name, gradient in found.items()})
    weights = {name: weight.detach().numpy() for stage in stages for name, weight in stage.newest.items()}
    buffers = {name: buffer.numpy() for name, buffer in model.named_buffers()}
    return Record(losses, norms, gradients, weights, [], buffers)


def adamw(weights: Iterable[Tensor], train: TrainSpec) -> torch.optim.AdamW:
    """torch's own, which decays matrices alone."""
    weights = list(weights)
    return torch.optim.AdamW(
        [
            {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": train.weight_decay},
            {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
        ],
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        foreach=False,
    )


class _Stage:
    """The weights of one stage in every version of a step, and an AdamW of its own."""

    def __init__(self, weights: Mapping[str, Tensor], train: TrainSpec):
        self.newest = weights
        self.versions: list[dict[str, Tensor]] = []
        self.optimizer = adamw(weights.values(), train)

    def begin(self) -> None:
        """A step begins: the pipeline is empty, and the weights as they are are version 0."""
        self.versions = [self._copies()]

    def show(self, version: int, parameters: Mapping[str, Tensor]) -> None:
        """Gives the parameters of this stage the values of a version."""
        for name, weight in self.versions[version].items():
            parameters[name].data.copy_(weight)

    def update(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        """One more version, from the newest one."""
        for name, weight in self.newest.items():
            weight.grad = gradients[name]
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.versions.append(self._copies())

    def _copies(self) -> dict[str, Tensor]:
        return {name: weight.clone() for name, weight in self.newest.items()}


def _names(job: Job) -> Sequence[Sequence[str]]:
    """The parameters of each stage."""
    return [
        [parameter.name for parameter in inventory(job.model) if parameter.unit in stage.units()]
        for stage in stages_of(job)
    ]


def _loss(model: Decoder, job: Job, micro_batch: MicroBatch, step: int, seed: float) -> Tensor:
    """Sum of the losses of a micro-batch of all ranks. seed: what its gradient will be."""
    whole = filled(micro_batch, job.sequence)
    places = torch.arange(job.sequence)
    dropout = DropoutKey(job.train.seed, step, torch.from_numpy(whole.samples), places) if job.model.dropout else None
    return model.run(
        Batch(
            torch.from_numpy(whole.tokens),
            torch.from_numpy(whole.targets),
            places.clamp(max=job.model.positions_max - 1)[None],
            None if whole.documents is None else torch.from_numpy(whole.documents),
            dropout,
            seed=seed,
        )
    )
