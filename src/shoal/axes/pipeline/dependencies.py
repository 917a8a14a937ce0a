"""What an instruction waits for, and when every step of a schedule can run. No torch.

The checker, the simulator and the derivation of messages all stand on these two functions.
"""

from collections.abc import Callable
from typing import NamedTuple

from shoal.axes.pipeline.schedules.instruction import Instruction, Kind, Place, Schedule, Step, parts


class Result(NamedTuple):
    """What an instruction leaves behind: an output (F), a gradient of the inputs (B or I) or of the weights (B or W)."""

    kind: Kind  # "F", "I" or "W"
    micro_batch: int
    place: Place


LEAVES: dict[Kind, tuple[Kind, ...]] = {"F": ("F",), "B": ("I", "W"), "I": ("I",), "W": ("W",), "U": ()}


def results(rank: int, instruction: Instruction) -> list[Result]:
    """What an instruction of this rank leaves behind; a whole backward leaves both its halves, an update nothing."""
    place = Place(rank, instruction.chunk)
    return [Result(kind, instruction.micro_batch, place) for kind in LEAVES[instruction.kind]]


def needs(schedule: Schedule, rank: int, instruction: Instruction) -> list[Result]:
    """What must be there before an instruction of this rank can run."""
    i, chunk, here = instruction.micro_batch, instruction.chunk, Place(rank, instruction.chunk)
    match instruction.kind:
        case "F":
            before = schedule.previous(rank, chunk, i)
            return [Result("F", i, before)] if before else []
        case "B" | "I":
            after = schedule.next(rank, chunk, i)
            return [Result("F", i, here)] + ([Result("I", i, after)] if after else [])
        case "W":
            return [Result("I", i, here)]
        case "U":
            return [Result("W", i, here)]


def times(
    schedule: Schedule,
    duration: Callable[[int, Step], float],
    transfer: Callable[[Result, Place], float] = lambda result, to: 0,
) -> list[list[tuple[float, float]]]:
    """(start, end) of every step by rank: each rank keeps its order, and a step starts when all it needs is there.

    duration: of a step on a rank. transfer: from the end of a step until its result has reached a place on another rank.
    Messages do not hold each other up. Raises ValueError, naming the instruction, where the orders wait in a circle.
    """
    spans: list[list[tuple[float, float]]] = [[] for _ in range(schedule.ranks)]
    ready: dict[Result, float] = {}
    waiting: dict[Result, int] = {}  # which rank stands still for it, where it has no result yet
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        order, done = schedule.orders[rank], spans[rank]
        while len(done) < len(order):
            step = order[len(done)]
            wanted = [(need, Place(rank, x.chunk)) for x in parts(step) for need in needs(schedule, rank, x)]
            missing = next((need for need, _ in wanted if need not in ready), None)
            if missing is not None:
                waiting.setdefault(missing, rank)
                break
            arrivals = [ready[need] + (transfer(need, to) if need.place.rank != rank else 0) for need, to in wanted]
            start = max(arrivals + ([done[-1][1]] if done else [0]))
            end = start + duration(rank, step)
            done.append((start, end))
            for result in (result for x in parts(step) for result in results(rank, x)):
                ready[result] = end
                if result in waiting:
                    runnable.append(waiting.pop(result))
    stuck = [rank for rank in range(schedule.ranks) if len(spans[rank]) < len(schedule.orders[rank])]
    if stuck:
        raise ValueError(_circle(schedule, {rank: len(spans[rank]) for rank in stuck}))
    return spans


def named(schedule: Schedule, rank: int, position: int) -> str:
    """A step in words: "rank 1, position 5, F3"."""
    return f"rank {rank}, position {position}, {schedule.orders[rank][position]}"


def _circle(schedule: Schedule, stuck: dict[int, int]) -> str:
    """One line on why ranks stand still at these positions: the first one's step, what it waits for, and so on round."""
    makers = {
        result: (rank, position)
        for rank, order in enumerate(schedule.orders)
        for position, step in enumerate(order)
        for x in parts(step)
        for result in results(rank, x)
    }
    rank = next(iter(stuck))
    chain: list[tuple[int, str]] = []
    while rank not in [at for at, _ in chain]:
        position = stuck[rank]
        wanted = [need for x in parts(schedule.orders[rank][position]) for need in needs(schedule, rank, x)]
        late = {need: makers.get(need) for need in wanted}
        absent = next((need for need, made in late.items() if made is None), None)
        if absent is not None:
            what = "forward" if absent.kind == "F" else "backward"
            return (
                f"{named(schedule, rank, position)} waits for the {what} of micro-batch {absent.micro_batch} "
                f"in chunk {absent.place.chunk} of rank {absent.place.rank}, which is in no order"
            )
        maker, at = next(
            made for made in late.values() if made is not None and made[0] in stuck and made[1] >= stuck[made[0]]
        )
        chain.append((rank, f"{named(schedule, rank, position)} waits for {named(schedule, maker, at)}"))
        rank = maker
    begin = [at for at, _ in chain].index(rank)
    return f"the orders wait in a circle: {'; '.join(line for _, line in chain[begin:])}"
