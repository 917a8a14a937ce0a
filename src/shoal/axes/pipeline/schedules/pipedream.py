"""PipeDream: 1F1B without flush; weights change after backwards, and a backward uses those its forward saw.

"stash" (Narayanan et al. 2019): update after every backward. Stage s keeps p - s versions, and its forwards see weights
that lack the last p - 1 - s updates. "vertical": a micro-batch meets the same version on every stage, the one it found
on the first. "2bw" (Narayanan et al. 2021): one update per `group` micro-batches, delayed by one; two versions suffice.
No form equals plain SGD; without updates in between this is 1F1B.
"""

from collections.abc import Iterator
from typing import Literal

from shoal.axes.pipeline.schedules.instruction import Instruction, Schedule, U, one_chunk_per_rank
from shoal.axes.pipeline.schedules.one_f_one_b import stage


def pipedream(
    p: int, m: int, versions: Literal["stash", "vertical", "2bw"] = "stash", group: int | None = None
) -> Schedule:
    """Instructions of p stages for m micro-batches.

    group: micro-batches per update; by default p for 2bw, else 1. Raises ValueError for a group too small for two versions.
    """
    every = group or (p if versions == "2bw" else 1)
    if versions == "2bw" and every < p - 1:
        raise ValueError(f"groups of {every} micro-batches on {p} stages want more than two versions; {p - 1} would do")

    def updating(s: int) -> Iterator[Instruction]:
        for instruction in stage(s, p, m):
            yield instruction
            done = instruction.micro_batch + 1
            if instruction.kind == "B" and (done % every == 0 or done == m):
                yield U(instruction.micro_batch)

    name = "pipedream" if versions == "stash" else f"pipedream-{versions}"
    return Schedule(name, [list(updating(s)) for s in range(p)], one_chunk_per_rank(p), [0] * m, versions)
