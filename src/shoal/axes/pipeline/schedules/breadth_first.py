"""Breadth-first, a looped GPipe (Lamy-Poirier 2023): every micro-batch through a chunk before the next chunk's turn.

With m >= p the bubble is (p - 1) / (v m) of the useful time. All m v chunks of micro-batches stay alive, but each chunk's
weights are used in one run per direction: sharded weights are gathered twice a step, not twice per micro-batch.
"""

from shoal.axes.pipeline.schedules.instruction import B, F, Schedule, looped


def breadth_first(p: int, m: int, v: int) -> Schedule:
    """Instructions of p ranks with v chunks each for m micro-batches."""
    order = [F(i, chunk) for chunk in range(v) for i in range(m)]
    order += [B(i, chunk) for chunk in reversed(range(v)) for i in range(m)]
    return Schedule("breadth-first", [order] * p, looped(p, v), [0] * m)
