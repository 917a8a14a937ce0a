"""ZB-H1 (Qi et al. 2023): 1F1B whose backward is split; weight halves wait and fill the gaps of the drain.

Stage s puts s weight halves off, so that every stage holds p micro-batches, as 1F1B's first does. The bubble is
(p - 1)(F + I - W) where W is no longer than F and I, against 1F1B's (p - 1)(F + I + W).
"""

from collections.abc import Iterator

from shoal.axes.pipeline.schedules.instruction import F, I, Instruction, Schedule, W, one_chunk_per_rank


def zb_h1(p: int, m: int) -> Schedule:
    """Instructions of p stages for m micro-batches."""
    return Schedule("zb-h1", [list(stage(p - 1 - s, s, m)) for s in range(p)], one_chunk_per_rank(p), [0] * m)


def stage(ahead: int, put_off: int, m: int) -> Iterator[Instruction]:
    """The order of a stage that runs `ahead` forwards before its first pair, and whose Ws come `put_off` Is later."""
    yield from (F(i) for i in range(min(ahead, m)))
    for i in range(m):
        if ahead + i < m:
            yield F(ahead + i)
        yield I(i)
        if i >= put_off:
            yield W(i - put_off)
    yield from (W(i) for i in range(max(m - put_off, 0), m))
