"""GPipe, all forward then all backward (Huang et al. 2019): the bubble is (p - 1) / m of the useful time.

Every stage keeps all m micro-batches alive. Backwards run in the order of the forwards; the paper's reverse order takes
equally long.
"""

from shoal.axes.pipeline.schedules.instruction import B, F, Schedule, one_chunk_per_rank


def gpipe(p: int, m: int) -> Schedule:
    """Instructions of p stages for m micro-batches."""
    order = [F(i) for i in range(m)] + [B(i) for i in range(m)]
    return Schedule("gpipe", [order] * p, one_chunk_per_rank(p), [0] * m)
