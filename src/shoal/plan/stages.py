"""Which schedule a job's pipeline follows and which part of the model each of its chunks is. No torch."""

from functools import lru_cache
from itertools import pairwise
from typing import NoReturn

from shoal.axes.pipeline.partition import balanced, by_hand, even, runs, work
from shoal.axes.pipeline.schedules.instruction import Schedule
from shoal.axes.pipeline.schedules.registry import make
from shoal.axes.pipeline.stage import Stage
from shoal.mesh import Mesh
from shoal.spec.errors import RequestError, shown
from shoal.spec.job import Job
from shoal.spec.layout import Layout


def check_pipeline(layout: Layout, tied: bool, layers: int | None = None) -> None:
    """Raises RequestError, with values that would do, for a pipeline that cannot be run.

    tied: whether the model's head uses the embedding's matrix. layers: of the model; None where it is going to be given
    as many as the stages want.
    """
    if layout.pp == 1:
        return
    schedule = scheduled(layout)
    _check_places(schedule, tied)
    wanted = layers_wanted(layout) if layers is None else layers
    even(wanted, schedule.stages)
    if layout.stages:
        by_hand(layout.stages, wanted, schedule.stages)


def _check_places(schedule: Schedule, tied: bool) -> None:
    """Refuses a schedule, sound as it may be, whose copies of weights lie where no ranks sum their gradients."""
    last, routes = schedule.ranks - 1, schedule.routes
    held = {place.rank for place in routes[0]}
    if empty := sorted(set(range(schedule.ranks)) - held):
        _refuse(schedule, f"gives rank {empty[0]} no stage of route 0", "at least one per rank")
    if len(routes) == 1:
        ends = {routes[0][0].rank, routes[0][-1].rank}
        if tied and len(ends) == 2 and ends != {0, last}:
            places = f"{routes[0][0]} and {routes[0][-1]}"
            _refuse(
                schedule, f"has the ends of a tied model at {places}", f"both on one rank, or on ranks 0 and {last},"
            )
        return
    mirrored = all(other.rank == last - one.rank for one, other in zip(*routes[:2], strict=True))
    if len(routes) > 2 or not mirrored or schedule.ranks % 2:
        why = f"has {len(routes)} routes that are not two through an even number of ranks, one the other's mirror image"
        _refuse(schedule, why, "one route")
    if 2 * sum(schedule.route_of) != schedule.micro_batches:
        _refuse(schedule, "does not send half of the micro-batches along each route", "as many on 0 as on 1")
    begin, end = routes[0][0], routes[0][-1]
    if tied and end.rank not in (begin.rank, last - begin.rank):
        mirror = f"both on one rank, or on ranks {begin.rank} and {last - begin.rank},"
        _refuse(schedule, f"has the ends of a tied model at {begin} and {end}", mirror)


def _refuse(schedule: Schedule, why: str, would_do: str) -> NoReturn:
    raise RequestError("layout.schedule", f"layout.schedule: {shown(schedule.name)} {why}; {would_do} would do")


def layers_wanted(layout: Layout) -> int:
    """How many layers a model has that is made for a pipeline: those of its stages by hand, else two for each."""
    count = scheduled(layout).stages
    if not layout.stages:
        return 2 * count
    return max(count, sum(int(size) for size in layout.stages.split("-") if size.strip().isdecimal()))


def schedule_of(job: Job) -> Schedule:
    """The job's schedule, over its pipeline ranks and micro-batches. Raises RequestError."""
    return scheduled(job.layout)


def scheduled(layout: Layout) -> Schedule:
    """The schedule of a layout. Raises RequestError."""
    from_file = layout.schedule.endswith(".csv") and layout.v == 1  # the file says how many chunks there are
    return _made(layout.schedule, layout.pp, layout.micro_batches, None if from_file else layout.v)


@lru_cache(maxsize=64)
def _made(name: str, pp: int, micro_batches: int, v: int | None) -> Schedule:
    return make(name, pp, micro_batches, v)


def mini_batches(job: Job) -> list[range]:
    """Micro-batches of a step in runs whose gradients go into one update: all, unless the schedule updates in between."""
    count = job.layout.micro_batches
    if job.layout.pp == 1:
        return [range(count)]
    ends = [x.micro_batch + 1 for x in schedule_of(job).instructions(0) if x.kind == "U"]
    return [range(*run) for run in pairwise([0, *(ends or [count])])]


def stages_of(job: Job) -> list[Stage]:
    """The stages of the model, in its order: by hand, or balanced by the work in them. Raises RequestError."""
    if job.layout.pp == 1:
        return [Stage(range(job.model.layers), first=True, last=True, recompute=job.layout.recompute)]
    count, layers = schedule_of(job).stages, job.model.layers
    if job.layout.stages:
        sizes = by_hand(job.layout.stages, layers, count)
    else:
        sizes = balanced(work(job.model, job.data.sequence), count)
    cut = runs(sizes)
    again = job.layout.recompute
    return [Stage(run, number == 0, number == count - 1, again) for number, run in enumerate(cut)]


def chunks_of(job: Job, mesh: Mesh, rank: int) -> list[Stage]:
    """The stages that `rank` holds, as its schedule numbers its chunks."""
    stages = stages_of(job)
    if job.layout.pp == 1:
        return stages
    schedule, place = schedule_of(job), mesh.coordinate("pp", rank)
    return [stages[schedule.stage_of(place, chunk)] for chunk in range(schedule.chunks(place))]


def stages_for(job: Job, mesh: Mesh, rank: int, micro_batch: int) -> list[Stage]:
    """The stages that a micro-batch goes through on `rank`."""
    if job.layout.pp == 1:
        return stages_of(job)
    schedule, stages, place = schedule_of(job), stages_of(job), mesh.coordinate("pp", rank)
    route = schedule.routes[schedule.route_of[micro_batch % schedule.micro_batches]]
    return [stage for stage, at in zip(stages, route, strict=True) if at.rank == place]
