"""1F1B with flush: warm up, then one forward for one backward, then drain (Narayanan et al. 2021).

Stage s keeps at most min(m, p - s) micro-batches alive; the bubble is (p - 1) / m of the useful time, as for GPipe.
"""

from collections.abc import Iterator

from shoal.axes.pipeline.schedules.instruction import B, F, Instruction, Schedule, one_chunk_per_rank


def one_f_one_b(p: int, m: int) -> Schedule:
    """Instructions of p stages for m micro-batches."""
    return Schedule("1f1b", [list(stage(s, p, m)) for s in range(p)], one_chunk_per_rank(p), [0] * m)


def stage(s: int, p: int, m: int) -> Iterator[Instruction]:
    """The order of one stage."""
    warm_up = min(p - 1 - s, m)
    yield from (F(i) for i in range(warm_up))
    for i in range(m - warm_up):
        yield F(warm_up + i)
        yield B(i)
    yield from (B(i) for i in range(m - warm_up, m))
