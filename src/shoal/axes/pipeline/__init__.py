"""Pipelines as data: make a schedule or write one, check it, and see what it takes and keeps. No torch.

    schedule = make("zb-h1", 4, 8)                     # p = 4 ranks, m = 8 micro-batches
    check(schedule)                                    # ValueError, naming the instruction at fault
    timeline = simulate(schedule, stage_times(schedule, forward=1, backward=2))
    timeline.makespan, timeline.bubble, peaks(schedule)

The engine that runs one is in run.py.
"""

from shoal.axes.pipeline.check import check
from shoal.axes.pipeline.live import live_versions, peaks, uses
from shoal.axes.pipeline.schedules.files import from_csv, load, to_csv
from shoal.axes.pipeline.schedules.instruction import (
    B,
    F,
    I,
    Instruction,
    Overlap,
    Place,
    Schedule,
    U,
    W,
    looped,
    one_chunk_per_rank,
    v_shape,
)
from shoal.axes.pipeline.schedules.registry import BUILT_IN, Recipe, make, names
from shoal.axes.pipeline.simulate import Span, Timeline, simulate, stage_times

__all__ = [
    "BUILT_IN",
    "B",
    "F",
    "I",
    "Instruction",
    "Overlap",
    "Place",
    "Recipe",
    "Schedule",
    "Span",
    "Timeline",
    "U",
    "W",
    "check",
    "from_csv",
    "live_versions",
    "load",
    "looped",
    "make",
    "names",
    "one_chunk_per_rank",
    "peaks",
    "simulate",
    "stage_times",
    "to_csv",
    "uses",
    "v_shape",
]
