"""What a schedule keeps alive on each rank as it runs: activations, and versions of the weights. No torch.

Both follow from the orders alone, whatever the steps take.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from shoal.axes.pipeline.schedules.instruction import Instruction, Place, Schedule, parts

Size = Callable[[int, int], float]  # of a micro-batch in a stage: (stage, micro-batch) -> bytes, or any unit


class Live(NamedTuple):
    """Micro-batches alive on a rank, by chunk.

    held: from F to the end of B or I, with all their activations; waiting: from I to the end of W, with what W needs.
    """

    held: tuple[int, ...]
    waiting: tuple[int, ...]


def live(schedule: Schedule, rank: int) -> list[tuple[Live, Live]]:
    """For every step of a rank: what is alive while it runs, and after it."""
    chunks = schedule.chunks(rank)
    held, waiting = [0] * chunks, [0] * chunks
    states = []
    for step in schedule.orders[rank]:
        held = _changed(held, Counter(x.chunk for x in parts(step) if x.kind == "F"))
        during = Live(tuple(held), tuple(waiting))
        gone = Counter(x.chunk for x in parts(step) if x.kind in "BI")
        late = Counter(x.chunk for x in parts(step) if x.kind == "I")
        late.subtract(x.chunk for x in parts(step) if x.kind == "W")
        held = [count - gone[chunk] for chunk, count in enumerate(held)]
        waiting = _changed(waiting, late)
        states.append((during, Live(tuple(held), tuple(waiting))))
    return states


def peak(schedule: Schedule, rank: int, held: Size, waiting: Size, again: Size | None = None) -> float:
    """The most that is alive on a rank at once: held from F to B or I, and then waiting from I to W.

    again: what comes on top while B or I runs. With ones and zeros: the number of micro-batches times chunks.
    """
    now = most = 0.0

    def sized(size: Size, x: Instruction) -> float:
        return size(schedule.stage_of(rank, x.chunk), x.micro_batch)

    for step in schedule.orders[rank]:
        now += sum(sized(held, x) for x in parts(step) if x.kind == "F")
        on_top = max((sized(again, x) for x in parts(step) if x.kind in "BI"), default=0) if again else 0
        most = max(most, now + on_top)
        for x in parts(step):
            now -= sized(held, x) if x.kind in "BI" else 0
            now += sized(waiting, x) if x.kind == "I" else 0
            now -= sized(waiting, x) if x.kind == "W" else 0
    return most


def peaks(schedule: Schedule) -> list[int]:
    """The most forwards, by rank, whose B or I is not yet done."""
    return [int(peak(schedule, rank, lambda *_: 1, lambda *_: 0)) for rank in range(schedule.ranks)]


class Use(NamedTuple):
    """Which version of its stage's weights a micro-batch sees: 0 before the step, and one more with every update.

    backward is the one that the forward saw; latest: the one that is newest when the backward runs, which it would take if
    none were kept.
    """

    stage: int
    micro_batch: int
    forward: int
    backward: int
    latest: int


def uses(schedule: Schedule) -> list[Use]:
    """The versions that every micro-batch sees in every stage, stage by stage.

    stash: the newest at the time of the forward. vertical: the newest that the first stage had for that micro-batch.
    2bw: a micro-batch of the n-th group of one update sees n - 1 updates. flush: 0.
    """
    return [
        use
        for number, route in enumerate(schedule.routes)
        for stage in range(len(route))
        for use in _uses(schedule, number, stage)
    ]


def live_versions(schedule: Schedule, place: Place) -> list[int]:
    """How many versions of a chunk's weights exist after each step of its rank.

    The newest, and those that a micro-batch yet to be finished has seen or is going to see.
    """
    order = schedule.orders[place.rank]
    if schedule.versions == "flush":
        return [1] * len(order)
    number = next(number for number, route in enumerate(schedule.routes) if place in route)
    seen = {use.micro_batch: use.forward for use in _uses(schedule, number, schedule.stage_of(*place))}
    newest, counts = 0, []
    for step in order:
        for x in (x for x in parts(step) if x.chunk == place.chunk):
            newest += x.kind == "U"
            if x.kind in "BW":
                del seen[x.micro_batch]
        counts.append(len({newest, *(version for version in seen.values() if version < newest)}))
    return counts


def _uses(schedule: Schedule, number: int, stage: int) -> list[Use]:
    """What the micro-batches of one route see in one stage."""
    route = schedule.routes[number]
    entry, here = _newest(schedule, route[0], "F"), _newest(schedule, route[stage], "F")
    latest, group = _newest(schedule, route[stage], "BI"), _newest(schedule, route[stage], "BW")
    found = []
    for i in (i for i, taken in enumerate(schedule.route_of) if taken == number):
        by_kind = {"flush": 0, "stash": here[i], "vertical": entry[i], "2bw": max(group[i] - 1, 0)}
        seen = by_kind[schedule.versions]
        found.append(Use(stage, i, seen, seen, latest[i]))
    return found


def _changed(counts: Sequence[int], change: Counter[int]) -> list[int]:
    return [count + change[chunk] for chunk, count in enumerate(counts)]


def _newest(schedule: Schedule, place: Place, kinds: str) -> dict[int, int]:
    """By micro-batch: how many updates a chunk has had when its instruction of these kinds runs."""
    order = [x for x in schedule.instructions(place.rank) if x.chunk == place.chunk]
    updates = accumulate((x.kind == "U" for x in order), initial=0)
    return {x.micro_batch: count for x, count in zip(order, updates, strict=False) if x.kind in kinds}
