"""The schedules there are by name, what each asks of a layout, and how to get one. No torch.

A schedule of your own is one more entry: `make("mine", p, m, known={**BUILT_IN, "mine": Recipe(mine)})`, or a CSV file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from shoal.axes.pipeline.schedules.breadth_first import breadth_first
from shoal.axes.pipeline.schedules.dualpipe import dualpipe
from shoal.axes.pipeline.schedules.dualpipe_v import dualpipe_v
from shoal.axes.pipeline.schedules.files import load
from shoal.axes.pipeline.schedules.gpipe import gpipe
from shoal.axes.pipeline.schedules.instruction import Schedule
from shoal.axes.pipeline.schedules.interleaved import interleaved
from shoal.axes.pipeline.schedules.naive import naive
from shoal.axes.pipeline.schedules.one_f_one_b import one_f_one_b
from shoal.axes.pipeline.schedules.pipedream import pipedream
from shoal.axes.pipeline.schedules.zb_h1 import zb_h1
from shoal.axes.pipeline.schedules.zb_h2 import zb_h2
from shoal.axes.pipeline.schedules.zb_v import zb_v
from shoal.spec.errors import RequestError, multiples_around, refuse_choice


@dataclass(frozen=True)
class Recipe:
    """How to make a schedule, and what it asks of a layout.

    build: called with (p, m), or with (p, m, v) where v can be chosen. v: chunks per rank; least_v: where it can be chosen,
    the least (None: it cannot). even: whether ranks and micro-batches must be even. rounds: at least so many
    micro-batches per rank.
    """

    build: Callable[..., Schedule]
    v: int = 1
    least_v: int | None = None
    even: bool = False
    rounds: int = 0

    def check(self, name: str, p: int, m: int, v: int) -> None:
        """Raises RequestError, with values that would do, where the schedule cannot be made for p ranks, m micro-batches."""
        least = max(1, self.rounds * p)
        if self.even and p % 2:
            refuse("pp", p, f"{name} pairs ranks from both ends and wants an even number", multiples_around(p, 2))
        if self.least_v is None and v != self.v:
            refuse("v", v, f"{name} has {self.v} {'chunks' if self.v > 1 else 'chunk'} per rank", str(self.v))
        if self.least_v is not None and v < self.least_v:
            refuse("v", v, f"{name} wants at least {self.least_v} chunks per rank", str(self.v))
        if m < least:
            refuse("micro_batches", m, f"{name} wants at least {least} with pp = {p}", str(least))
        if self.even and m % 2:
            refuse("micro_batches", m, f"{name} sends half from each end", multiples_around(m, 2))


BUILT_IN: Mapping[str, Recipe] = MappingProxyType(
    {
        "naive": Recipe(naive),
        "gpipe": Recipe(gpipe),
        "1f1b": Recipe(one_f_one_b),
        "interleaved": Recipe(interleaved, v=2, least_v=2),
        "breadth-first": Recipe(breadth_first, v=2, least_v=1),
        "zb-h1": Recipe(zb_h1),
        "zb-h2": Recipe(zb_h2),
        "zb-v": Recipe(zb_v, v=2),
        "dualpipe": Recipe(dualpipe, even=True, rounds=2),
        "dualpipe-v": Recipe(dualpipe_v, v=2, rounds=2),
        "pipedream": Recipe(pipedream),
        "pipedream-vertical": Recipe(partial(pipedream, versions="vertical")),
        "pipedream-2bw": Recipe(partial(pipedream, versions="2bw")),
    }
)


def names() -> tuple[str, ...]:
    """The names of the schedules that come with shoal."""
    return tuple(BUILT_IN)


def needs(name: str, known: Mapping[str, Recipe] = BUILT_IN) -> Recipe:
    """What a schedule asks of a layout: its `v`, `least_v`, `even` and `rounds`. Raises RequestError."""
    if name not in known:
        raise refuse_choice("layout.schedule", name, tuple(known), "1f1b")
    return known[name]


def make(name: str, p: int, m: int, v: int | None = None, known: Mapping[str, Recipe] = BUILT_IN) -> Schedule:
    """The schedule `name` on p ranks for m micro-batches, with v chunks per rank where v can be chosen.

    name: one of `known`, or a CSV file (ends in .csv), which must be for p ranks and m micro-batches. v: None takes what the
    schedule has by default. Raises RequestError, with values that would do.
    """
    if name.endswith(".csv"):
        return _from_file(name, p, m, v)
    recipe = needs(name, known)
    chunks = recipe.v if v is None else v
    recipe.check(name, p, m, chunks)
    return recipe.build(p, m) if recipe.least_v is None else recipe.build(p, m, chunks)


def refuse(key: str, value: int, why: str, would_do: str) -> None:
    """Raises the RequestError for one key of a layout."""
    raise RequestError(f"layout.{key}", f"layout.{key} = {value}, but {why}; {would_do} would do")


def _from_file(path: str, p: int, m: int, v: int | None) -> Schedule:
    schedule = load(Path(path))
    if schedule.ranks != p:
        refuse("pp", p, f"{path} has {schedule.ranks} ranks", str(schedule.ranks))
    if schedule.micro_batches != m:
        refuse("micro_batches", m, f"{path} has {schedule.micro_batches} micro-batches", str(schedule.micro_batches))
    chunks = -(-schedule.stages // p)
    if v not in (None, chunks):
        refuse("v", v, f"{path} has {schedule.stages} stages on {p} ranks", str(chunks))
    return schedule
