"""Which schedule a job's pipeline follows and which part of the model each of its chunks is. No torch."""

from functools import lru_cache

from shoal.axes.pipeline.partition import balanced, by_hand, runs, work
from shoal.axes.pipeline.schedules.instruction import Schedule
from shoal.axes.pipeline.schedules.registry import make
from shoal.axes.pipeline.stage import Stage
from shoal.mesh import Mesh
from shoal.spec.job import Job


def schedule_of(job: Job) -> Schedule:
    """The job's schedule, over its pipeline ranks and micro-batches. Raises RequestError."""
    layout = job.layout
    return _made(layout.schedule, layout.pp, layout.micro_batches, layout.v)


@lru_cache(maxsize=64)
def _made(name: str, pp: int, micro_batches: int, v: int) -> Schedule:
    return make(name, pp, micro_batches, v)


def stages_of(job: Job) -> list[Stage]:
    """The stages of the model, in its order: by hand, or balanced by the work in them. Raises RequestError."""
    if job.layout.pp == 1:
        return [Stage(range(job.model.layers), first=True, last=True)]
    count, layers = schedule_of(job).stages, job.model.layers
    if job.layout.stages:
        sizes = by_hand(job.layout.stages, layers, count)
    else:
        sizes = balanced(work(job.model, job.data.sequence), count)
    cut = runs(sizes)
    return [Stage(run, first=number == 0, last=number == count - 1) for number, run in enumerate(cut)]


def chunks_of(job: Job, mesh: Mesh, rank: int) -> list[Stage]:
    """The stages that `rank` holds, as its schedule numbers its chunks."""
    stages = stages_of(job)
    if job.layout.pp == 1:
        return stages
    schedule, place = schedule_of(job), mesh.coordinate("pp", rank)
    return [stages[schedule.stage_of(place, chunk)] for chunk in range(schedule.chunks(place))]
