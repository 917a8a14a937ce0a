"""Interleaved 1F1B (Narayanan et al. 2021): v chunks per rank in loops, a group of micro-batches through each in turn.

With groups of at least p the bubble is (p - 1) / (v m) of the useful time. Rank d keeps at most 2 (p - 1 - d) +
(v - 1) g + 1 chunks of a micro-batch alive, g the largest group, which is more than 1F1B's v (p - d).
"""

from collections.abc import Iterator, Sequence

from shoal.axes.pipeline.schedules.instruction import B, F, Instruction, Schedule, looped


def interleaved(p: int, m: int, v: int, groups: Sequence[int] | None = None) -> Schedule:
    """Instructions of p ranks with v chunks each for m micro-batches.

    groups: how many micro-batches each group has. By default p each; where p does not divide m, some have more, which
    costs memory. Cutting the last group short instead, as first described, costs time, and can end in deadlock.
    Raises ValueError for groups that are not all micro-batches.
    """
    count = max(1, m // p)
    sizes = groups or [m // count + (index < m % count) for index in range(count)]
    if sum(sizes) != m or min(sizes) < 1:
        wanted = "-".join(str(m // count + (index < m % count)) for index in range(count))
        raise ValueError(f"groups {'-'.join(map(str, sizes))} are not {m} micro-batches; {wanted} would do")
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    runs = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    forwards = [F(i, chunk) for run in runs for chunk in range(v) for i in run]
    backwards = [B(i, chunk) for run in runs for chunk in reversed(range(v)) for i in run]

    def rank(d: int) -> Iterator[Instruction]:
        warm_up = min(2 * (p - 1 - d) + (v - 1) * max(sizes), m * v)
        yield from forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            yield forward
            yield backward
        yield from backwards[m * v - warm_up :]

    return Schedule("interleaved", [list(rank(d)) for d in range(p)], looped(p, v), [0] * m)
