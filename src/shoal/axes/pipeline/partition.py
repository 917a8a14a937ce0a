"""Which layers make up which stage: as equal as can be in cost, with the ends weighing in, or by hand (spec PP-1). No torch."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from shoal.spec.errors import RequestError, shown
from shoal.spec.inventory import elements, inventory, used
from shoal.spec.model import ModelSpec
from shoal.transfer import pieces


@dataclass(frozen=True)
class Costs:
    """What each part of a model costs, in any one unit. first: the embedding; last: the head; layers: one by one."""

    first: float
    layers: tuple[float, ...]
    last: float


def work(model: ModelSpec, sequence: int) -> Costs:
    """Forward FLOPs per token: 2 per weight of a matrix product, and attention's two products; a look-up costs nothing.

    Counted as flops_per_token counts, of which it is a third.
    """
    seen = min(model.window or sequence, sequence)
    attention = 4.0 * model.heads * model.head_size * (seen - seen * seen / (2 * sequence))
    products = dict.fromkeys((f"blocks.{layer}" for layer in range(model.layers)), attention)
    for parameter in inventory(model):
        if parameter.decay and parameter.unit in products:
            products[parameter.unit] += 2.0 * used(parameter, model)
    return Costs(0.0, tuple(products.values()), 2.0 * model.vocab * model.hidden)


def weights(model: ModelSpec) -> Costs:
    """Parameters. A tied head has a copy of the embedding's matrix, which its stage holds where that is another one."""
    by_unit: dict[str, int] = {}
    for parameter in inventory(model):
        by_unit[parameter.unit] = by_unit.get(parameter.unit, 0) + elements(parameter)
    copy = model.vocab * model.hidden if model.tied else 0
    layers = tuple(float(by_unit[f"blocks.{layer}"]) for layer in range(model.layers))
    return Costs(float(by_unit["embedding"]), layers, float(by_unit["head"] + copy))


def even(layers: int, stages: int) -> list[int]:
    """Layers per stage: as equal in number as can be, the first ones longer. Raises RequestError."""
    _check_enough(layers, stages)
    return pieces(layers, stages)


def balanced(costs: Costs, stages: int) -> list[int]:
    """Layers per stage, at least one each, such that the costliest stage costs as little as can be. Raises RequestError.

    Exact, by dynamic programming. Of the partitions with that maximum it takes the one with the least sum of squares, so
    that the other stages are even too, and of equals the one whose later stages have more: 1F1B keeps least alive there.
    """
    count = len(costs.layers)
    _check_enough(count, stages)
    prefix = np.concatenate([[0.0], np.cumsum(costs.layers)])
    run = prefix[None, :] - prefix[:, None]  # run[i, j]: layers i to j - 1
    run[np.tril_indices(count + 1)] = np.inf
    by_stage = np.repeat(run[None], stages, 0)
    by_stage[0] += costs.first
    by_stage[-1] += costs.last
    edges = _cut(by_stage, np.maximum)
    largest = max(by_stage[stage, start, end] for stage, (start, end) in enumerate(pairwise(edges)))
    allowed = np.where(by_stage <= largest * (1 + 1e-12), by_stage, np.inf)
    edges = _cut(allowed * allowed, np.add)
    return [end - start for start, end in pairwise(edges)]


def by_hand(text: str, layers: int, stages: int, field: str = "layout.stages") -> list[int]:
    """Layers per stage from a list such as "9-8-8-7". Raises RequestError, with values that would do, about `field`."""
    would_do = f"{'-'.join(map(str, even(layers, stages)))} would do"
    words = [word.strip() for word in text.split("-")]
    if not all(re.fullmatch(r"[1-9]\d{0,5}", word) for word in words):
        raise RequestError(field, f"{field} = {shown(text)} is not a list of numbers of layers; {would_do}")
    sizes = [int(word) for word in words]
    if len(sizes) != stages:
        given = f"{len(sizes)} stage{'s' if len(sizes) > 1 else ''}"
        raise RequestError(field, f"{field} = {shown(text)} has {given}, the pipeline {stages}; {would_do}")
    if sum(sizes) != layers:
        raise RequestError(field, f"{field} = {shown(text)} adds up to {sum(sizes)} layers, not {layers}; {would_do}")
    return sizes


def runs(sizes: Sequence[int]) -> list[range]:
    """The layers of each stage."""
    return [range(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]


def stage_costs(costs: Costs, sizes: Sequence[int]) -> list[float]:
    """What each stage costs."""
    totals = [sum(costs.layers[layer] for layer in run) for run in runs(sizes)]
    totals[0] += costs.first
    totals[-1] += costs.last
    return totals


def _check_enough(layers: int, stages: int) -> None:
    if stages > layers:
        raise RequestError(
            "layout.pp",
            f"{stages} stages want as many layers, the model has {layers}; at most {layers} stages would do",
        )


def _cut(cost: np.ndarray, join: Callable[..., np.ndarray]) -> list[int]:
    """Where to cut (0, ..., number of layers) so that the stages' costs, joined, are least.

    cost (stages, layers + 1, layers + 1): of a stage that goes from one layer to before another.
    """
    best, choices = cost[0, 0], []
    for stage in cost[1:]:
        joined = join(best[:, None], stage)
        choices.append(joined.argmin(0))  # the earliest cut of equals
        best = joined.min(0)
    edges = [cost.shape[1] - 1]
    for choice in reversed(choices):
        edges.append(int(choice[edges[-1]]))
    return [0, *reversed(edges)]
