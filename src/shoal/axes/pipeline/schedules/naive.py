"""Naive: one micro-batch goes down through all stages and back up before the next one starts.

One stage works at a time, so the bubble is p - 1 times the useful time, whatever the number of micro-batches.
"""

from shoal.axes.pipeline.schedules.instruction import B, F, Schedule, one_chunk_per_rank


def naive(p: int, m: int) -> Schedule:
    """Instructions of p stages for m micro-batches."""
    order = [step for i in range(m) for step in (F(i), B(i))]
    return Schedule("naive", [order] * p, one_chunk_per_rank(p), [0] * m)
