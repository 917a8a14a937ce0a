"""ZB-H2 (Qi et al. 2023): ZB-H1 with twice the forwards ahead and twice the weight halves put off.

Every stage holds 2p - 1 micro-batches. With m >= 2p - 1 and W no longer than F and I, a stage that has begun stands still
for (p - 1)(F + I - 2W) only: nothing where the three take equally long. Stages begin and end one after the other, so a
step alone still takes p - 1 forwards longer than its work; in a row of steps the next one fills that.
"""

from shoal.axes.pipeline.schedules.instruction import Schedule, one_chunk_per_rank
from shoal.axes.pipeline.schedules.zb_h1 import stage


def zb_h2(p: int, m: int) -> Schedule:
    """Instructions of p stages for m micro-batches."""
    orders = [list(stage(2 * (p - 1 - s), 2 * s, m)) for s in range(p)]
    return Schedule("zb-h2", orders, one_chunk_per_rank(p), [0] * m)
