"""A layout that computes in float32 or bfloat16, held against one process that is led along the layout's own path.

Rounding alone makes two runs of the same training part: AdamW's first steps turn a gradient of the size of rounding into a
whole step one way or the other, and a router's near tie sends a token elsewhere. So every link of the chain is held by
itself: the gradients of each step against those of float64 at the weights that the layout had, its tokens with the
experts that they chose; its weights against torch's AdamW that is fed the layout's gradients; and its choices of experts
against float64's scores. One process of the layout's type, led along the same path, says how much is rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.comm.world import World
from shoal.launch.pool import Pool
from shoal.spec.job import Job, TrainSpec
from shoal.train.schedule import learning_rate
from shoal.train.trainer import CLIP_EPS, DTYPES, Trainer
from shoal.verify.choices import beaten, chosen_again, of_all
from shoal.verify.compare import Error, Record, by_parameter, compare
from shoal.verify.delayed import adamw
from shoal.verify.trial import MadeUpBatches, arrays

MARGIN = 4  # how much further from float64 a layout may come out than one process; 2.7 at most was seen, of one bias
NORM = 2**-20  # allowed of a gradient norm, which is that of the layout's own gradients: squares are added in float64
LOSS = {
    "float32": 2**-20,
    "bfloat16": 2**-11,
}  # allowed of a loss at least: a mean over tokens, which round each its way
FLOOR = {"float32": 2**-20, "bfloat16": 2**-8}  # allowed at least, as one process may come near float64 by luck

Named = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Path:
    """What a layout did, step by step: the weights that each began with, its gradients, and by layer its tokens' experts.

    dtype: of its weights.
    """

    before: Sequence[Named]
    gradients: Sequence[Named]
    choices: Mapping[int, np.ndarray]
    dtype: str


@dataclass(frozen=True)
class Led:
    """What a process found that was led along a path. scores: by layer, what it would have chosen experts by."""

    record: Record
    scores: Mapping[int, np.ndarray]


def against_rounding(
    found: Record, ranks: Sequence[Record], exact: Job, rough: Job, pool: Pool
) -> tuple[dict[str, Error], dict[str, float]]:
    """Errors by kind, and how large each may be where it is. found: what all ranks together saw, `ranks` what each.

    exact, rough: the job on one process, in float64 and in the layout's own type.
    """
    steps, dtype = len(found.losses), rough.train.dtype
    choices = of_all([record.chosen for record in ranks], exact, steps)
    path = Path(found.before, found.gradients, choices, dtype)
    (truth,), (near,) = (pool.run(led, 1, job, steps, path) for job in (exact, rough))
    errors, rounding = compare(found, truth.record), compare(near.record, truth.record)
    floors = {**dict.fromkeys(errors, FLOOR[dtype]), "loss": LOSS[dtype]}
    limits = {kind: _limit(rounding[kind].value, floors[kind]) for kind in errors}
    limits["grad_norm"] = NORM
    errors["grad"], limits["grad"] = _gradient(found, near.record, truth.record, FLOOR[dtype])
    if exact.model.moe is not None and choices:
        size = {layer: float(np.abs(scores).max()) for layer, scores in truth.scores.items()}
        lags = {layer: beaten(truth.scores[layer], choices[layer], exact.model.moe) for layer in choices}
        value, layer = max((lag / size[layer], layer) for layer, lag in lags.items())
        errors["routing"] = Error(value, f"a choice of experts in layer {layer}")
        spread = max(float(np.abs(near.scores[layer] - truth.scores[layer]).max()) / size[layer] for layer in choices)
        limits["routing"] = 2 * MARGIN * spread  # both scores may be off
    return errors, limits


def _gradient(found: Record, near: Record, truth: Record, floor: float) -> tuple[Error, float]:
    """The gradient that is furthest off for what rounding does to it, and what is allowed of it.

    Each has a limit of its own; but not below that of the middle one, as a small number of elements may round by luck.
    """
    rounding = {name: error.value for name, error in by_parameter(near, truth).items()}
    floor = _limit(float(np.median([*rounding.values()])), floor)
    limits = {name: _limit(value, floor) for name, value in rounding.items()}
    errors = by_parameter(found, truth)
    name = max(errors, key=lambda name: errors[name].value / limits[name])
    return errors[name], limits[name]


def _limit(rounding: float, floor: float) -> float:
    """What is allowed where one process is off by `rounding`, which is not finite where the path leads nowhere."""
    return max(MARGIN * rounding, floor) if np.isfinite(rounding) else floor


def led(rank: int, world: int, job: Job, steps: int, path: Path) -> Led:
    """Runs `steps` steps of a job on one process, each from the weights and with the experts of `path`.

    The record's weights and gradient norms are those that the path's gradients make of the first weights. rank, world: of a
    pool's only rank.
    """
    trainer = Trainer(job, World.single(), MadeUpBatches(job, 0))
    weights = dict(trainer.states.weights())
    updated, norms = updates(weights, path, job.train)
    losses: list[float] = []
    gradients: list[dict[str, np.ndarray]] = []
    with chosen_again(trainer, path.choices) as scores:
        for step in range(steps):
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.copy_(torch.as_tensor(path.before[step].get(name, np.nan)))
            result = trainer.step(step, inspect=lambda states: gradients.append(arrays(states.gradients())))
            losses.append(result.loss)
    return Led(Record(losses, norms, gradients, updated, [], arrays(trainer.model.named_buffers())), scores)


def updates(first: Mapping[str, Tensor], path: Path, train: TrainSpec) -> tuple[dict[str, np.ndarray], list[float]]:
    """The weights that torch's AdamW makes of `first`, as the path's type holds them, with the path's gradients; their norms.

    In the type of `train`, with float32 copies of bfloat16 weights.
    """
    own = DTYPES[train.dtype]
    accurate = torch.promote_types(own, torch.float32)
    summed = torch.float32 if train.reduce_dtype == "float32" else own
    copies = {name: weight.detach().to(DTYPES[path.dtype]).to(accurate) for name, weight in first.items()}
    optimizer = adamw(copies.values(), train)
    norms = []
    for step, gradients in enumerate(path.gradients):
        norm = float(np.sqrt(sum(np.square(gradient, dtype=np.float64).sum() for gradient in gradients.values())))
        factor = min(1.0, train.clip / (norm + CLIP_EPS)) if train.clip else 1.0
        for name, copy in copies.items():
            gradient = torch.as_tensor(gradients.get(name, np.nan)).to(summed)
            copy.grad = (gradient * factor).to(accurate).expand(copy.shape)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, train)
        optimizer.step()
        norms.append(norm)
    return arrays((name, copy.to(own)) for name, copy in copies.items()), norms
