"""The experts that tokens chose: written down on a layout's ranks, chosen again by one process, and held against the scores.

Where two experts score nearly alike, rounding decides, and what a token meets from there on is another function. So a
layout that rounds is compared with a process that chooses as the layout did, and its choices by themselves: a token may
take an expert only if none was better by more than rounding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.axes.expert.route import Choose, best
from shoal.axes.expert.run import MixtureOfExperts, own_part
from shoal.axes.tensor.run import SEQUENCE
from shoal.spec.job import Job
from shoal.spec.moe import MoESpec
from shoal.train.trainer import Trainer
from shoal.transfer import pieces
from shoal.verify.compare import Chosen

Written = dict[int, list[tuple[np.ndarray, np.ndarray]]]
# (layer, places (T,) of the tokens in all samples, what they choose by (T, E), what their router chose (T, k)) -> (T, k)
Revise = Callable[[int, Tensor, Tensor, Tensor], Tensor]
NOBODY = -1  # stands for the choice of a token that no rank routed


@contextmanager
def written_down(trainer: Trainer) -> Iterator[Written]:
    """Inside, what this rank's routers choose is written down, by layer: tokens and their experts, again where computed again.

    Tokens are numbered through all samples; those that only fill a sequence up have no number.
    """
    job, written = trainer.job, Written()

    def choose(layer: int, places: Tensor, values: Tensor, own: Tensor) -> Tensor:
        sample, place = (x.cpu().numpy() for x in (places // job.sequence, places % job.sequence))
        real = place < job.data.sequence
        tokens = sample * job.data.sequence + place
        written.setdefault(layer, []).append((tokens[real], own.cpu().numpy()[real]))
        return own

    with _choosing(trainer, choose):
        yield written


def joined(written: Written) -> Chosen:
    """What was written down, one table of a layer."""
    return {layer: tuple(map(np.concatenate, zip(*parts, strict=True))) for layer, parts in written.items()}  # type: ignore[misc]


def of_all(chosen: Sequence[Chosen], job: Job, steps: int) -> dict[int, np.ndarray]:
    """By layer, the experts of every token (n, k), each from the first rank that routed it. chosen: by rank."""
    if job.model.moe is None:
        return {}
    shape = (steps * job.train.batch * job.data.sequence, job.model.moe.top_k)
    tables = {layer: np.full(shape, NOBODY) for layer in job.model.mixtures}
    for of_rank in reversed(chosen):
        for layer, (tokens, experts) in of_rank.items():
            tables[layer][tokens] = experts
    return tables


@contextmanager
def chosen_again(trainer: Trainer, choices: Mapping[int, np.ndarray]) -> Iterator[dict[int, np.ndarray]]:
    """Inside, tokens of one process take the experts of `choices`, by layer (n, k), and where NOBODY is there their own.

    Yields what they would have chosen by, by layer (n, E).
    """
    moe = trainer.job.model.moe
    seen = {layer: np.zeros((len(table), moe.experts)) for layer, table in choices.items() if moe}

    def choose(layer: int, places: Tensor, values: Tensor, own: Tensor) -> Tensor:
        tokens = places.cpu().numpy()
        seen[layer][tokens] = values.double().cpu().numpy()
        experts = torch.from_numpy(choices[layer][tokens]).to(values.device)
        return torch.where((experts == NOBODY).any(1, keepdim=True), own, experts)

    with _choosing(trainer, choose):
        yield seen


def beaten(values: np.ndarray, chosen: np.ndarray, spec: MoESpec) -> float:
    """The most by which an expert that a token did not take was better than one that it took. (n, E), (n, k)."""
    if (chosen == NOBODY).any():
        return float("inf")
    right = np.sort(best(torch.from_numpy(values), spec).numpy(), axis=1)
    others = np.flatnonzero((np.sort(chosen, axis=1) != right).any(axis=1))
    return max((_beaten(values[token], chosen[token], spec) for token in others), default=0.0)


def _beaten(values: np.ndarray, chosen: np.ndarray, spec: MoESpec) -> float:
    """The same of one token, (E,), (k,), with those groups kept that make it least."""
    by_group = values.reshape(spec.groups, -1)
    used = np.unique(chosen // by_group.shape[1])
    if len(used) > spec.groups_kept or len(np.unique(chosen)) < len(chosen):
        return float("inf")
    count = 2 if spec.limited and spec.group_score == "top2" else 1
    scores = np.sort(by_group, axis=1)[:, -count:].mean(axis=1)  # of one expert, that the limit is the same
    rest = np.setdiff1d(np.arange(spec.groups), used)
    return min(
        max(_lag(scores, kept), _lag(np.where(np.isin(_groups(spec), kept), values, -np.inf), chosen))
        for more in combinations(rest, spec.groups_kept - len(used))
        for kept in [np.array([*used, *more], dtype=np.int64)]
    )


def _lag(values: np.ndarray, taken: np.ndarray) -> float:
    """By how much the best that was not taken is better than the worst that was; 0 where it is not."""
    left = np.delete(values, taken)
    return max(0.0, float(left.max(initial=-np.inf) - values[taken].min()))


def _groups(spec: MoESpec) -> np.ndarray:
    """The group of each expert."""
    return np.arange(spec.experts) // (spec.experts // spec.groups)


@contextmanager
def _choosing(trainer: Trainer, choose: Revise) -> Iterator[None]:
    """Inside, the routers' choices are what `choose` makes of them."""
    with ExitStack() as stack:
        for layer, mixture in trainer.mixtures.layers.items():
            if mixture is not None:
                chooser = _Chooser(layer, choose, mixture.router.choose)
                stack.callback(mixture.register_forward_pre_hook(chooser.come).remove)
                stack.callback(setattr, mixture.router, "choose", mixture.router.choose)
                mixture.router.choose = chooser
        yield


class _Chooser:
    """Chooses for one layer, and knows which tokens come."""

    def __init__(self, layer: int, choose: Revise, own: Choose):
        self.layer, self.choose, self.own = layer, choose, own
        self.places: Tensor | None = None

    def come(self, mixture: MixtureOfExperts, arguments: tuple[Any, ...]) -> None:
        x, _, order = arguments
        group = mixture.ranks.same_tokens
        self.places = own_part(order, group, pieces(x.shape[SEQUENCE], group.size))

    def __call__(self, values: Tensor, spec: MoESpec) -> Tensor:
        assert self.places is not None
        return self.choose(self.layer, self.places, values, self.own(values, spec))
