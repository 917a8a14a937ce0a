"""DualPipe-V (Sea AI Lab 2025): one half of DualPipe, folded; weights exist once.

Stages run down the ranks and up again, so that what comes from the last rank plays the part of DualPipe's other
direction. In times of one chunk the bubble is (p - 1)(F&B + B - 3W); 2p + 1 chunks of micro-batches stay alive.
"""

from shoal.axes.pipeline.schedules.dualpipe import eight_phases
from shoal.axes.pipeline.schedules.instruction import Schedule, v_shape


def dualpipe_v(p: int, m: int) -> Schedule:
    """Instructions of p ranks with two chunks each for m >= 2p micro-batches."""
    orders = [list(eight_phases(r, p, near=(0, 0), far=(1, 0), count=m)) for r in range(p)]
    return Schedule("dualpipe-v", orders, v_shape(p), [0] * m)
