"""Is a schedule sound? Complete, in an order that can be run, and free of deadlock whatever carries its messages. No torch.

Errors are ValueErrors that name the instruction at fault: its rank, its position in that rank's order, and what it is.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal

from shoal.axes.pipeline.communication import Exchange, Message, Program, arrivals, departures, programs
from shoal.axes.pipeline.dependencies import named, times
from shoal.axes.pipeline.schedules.instruction import Instruction, Kind, Overlap, Place, Schedule, parts


def check(
    schedule: Schedule, communication: Literal["ordered", "tagged"] = "ordered", forward_only: bool = False
) -> None:
    """Raises ValueError where a schedule is not sound.

    communication: "tagged" proves that the orders can be run where messages wait for nobody but who needs them (gloo);
    "ordered" also that the exchanges derived from them can, where each rank serves its own one after the other and
    buffers nothing (NCCL). forward_only: an evaluation, which has forwards and nothing else.
    """
    check_places(schedule)
    check_complete(schedule, forward_only)
    times(schedule, lambda rank, step: 1)
    if communication == "ordered":
        check_programs(schedule, programs(schedule))


def check_places(schedule: Schedule) -> None:
    """Every stage of every route lives on one chunk of its own; each micro-batch takes a route that there is."""
    if not schedule.orders or not schedule.routes or not schedule.routes[0] or not schedule.route_of:
        raise ValueError("a schedule wants at least one rank, one stage and one micro-batch")
    for number, route in enumerate(schedule.routes):
        if len(route) != schedule.stages:
            raise ValueError(f"route {number} has {len(route)} stages, route 0 has {schedule.stages}")
    for micro_batch, number in enumerate(schedule.route_of):
        if not 0 <= number < len(schedule.routes):
            raise ValueError(f"micro-batch {micro_batch} takes route {number} of {len(schedule.routes)}")
    places = sorted(place for route in schedule.routes for place in route)
    for place, count in Counter(places).items():
        if count > 1:
            raise ValueError(f"chunk {place.chunk} of rank {place.rank} holds {count} stages")
    held = Counter(place.rank for place in places)
    wanted = [Place(rank, chunk) for rank in range(schedule.ranks) for chunk in range(held[rank])]
    if places != wanted:
        odd = next(place for place in places if place not in wanted)
        raise ValueError(f"place {odd} is not among {schedule.ranks} ranks with chunks numbered from 0")


def check_complete(schedule: Schedule, forward_only: bool = False) -> None:
    """Every chunk has each of its micro-batches forward once and backward once: a B, or an I and a W.

    Where weights are updated in between, each backward is followed by an update; with flush there are none.
    """
    for rank in range(schedule.ranks):
        found = _instructions(schedule, rank, forward_only)
        last_update = {x.chunk: position for x, position in found.items() if x.kind == "U"}
        for chunk in range(schedule.chunks(rank)):
            for micro_batch in range(schedule.micro_batches):
                if _is_on_route(schedule, rank, chunk, micro_batch):
                    done = _check_work(schedule, rank, chunk, micro_batch, found, forward_only)
                    if schedule.versions != "flush" and not forward_only and done > last_update.get(chunk, -1):
                        raise ValueError(
                            f"{named(schedule, rank, done)} has no U after it, which would use its gradient"
                        )


def check_programs(schedule: Schedule, programs: Sequence[Program]) -> None:
    """Every message is posted once at each end, in one order for both, and no exchange waits for ever.

    Assumed is the strictest back end: an exchange starts when the steps and exchanges before it on its rank are done, and
    is done when the other ends of all its messages have started.
    """
    for rank, program in enumerate(programs):
        _check_posted(schedule, rank, program)
    _check_same_order(programs)
    _run(schedule, programs)


def _instructions(schedule: Schedule, rank: int, forward_only: bool) -> dict[Instruction, int]:
    """Where each instruction of a rank stands in its order, all of them possible and none there twice."""
    found: dict[Instruction, int] = {}
    for position, step in enumerate(schedule.orders[rank]):
        if isinstance(step, Overlap) and (step.forward.kind != "F" or step.backward.kind not in "BI"):
            raise ValueError(f"{named(schedule, rank, position)} does not join a forward to a backward")
        for x in parts(step):
            if why := _impossible(schedule, rank, x, found, forward_only):
                raise ValueError(f"{named(schedule, rank, position)}: {why}")
            found[x] = position
    return found


def _impossible(
    schedule: Schedule, rank: int, x: Instruction, before: dict[Instruction, int], forward_only: bool
) -> str | None:
    """Why an instruction cannot be in a rank's order, after those before it; None if it can."""
    if x.kind not in ("F" if forward_only else "FBIWU"):
        return f"{x.kind} is no instruction of {'an evaluation' if forward_only else 'a pipeline'}"
    if not 0 <= x.chunk < schedule.chunks(rank):
        return f"the rank has no chunk {x.chunk}, but {schedule.chunks(rank)}, numbered from 0"
    if not 0 <= x.micro_batch < schedule.micro_batches:
        return f"there is no micro-batch {x.micro_batch}, but {schedule.micro_batches}, numbered from 0"
    if not _is_on_route(schedule, rank, x.chunk, x.micro_batch):
        return f"micro-batch {x.micro_batch} does not come through chunk {x.chunk} of this rank"
    if x in before:
        return f"it stands at position {before[x]} already"
    if x.kind == "U" and schedule.versions == "flush":
        return "weights change in mid-step, but the schedule's versions are flush"
    return None


def _check_work(
    schedule: Schedule, rank: int, chunk: int, micro_batch: int, found: dict[Instruction, int], forward_only: bool
) -> int:
    """One micro-batch in one chunk has F, and B or I and W. The position of the last of them."""

    here = f"for micro-batch {micro_batch} in chunk {chunk} (stage {schedule.stage_of(rank, chunk)})"
    kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
    done = {kind: found[x] for kind in kinds if (x := Instruction(kind, micro_batch, chunk)) in found}
    if "F" not in done:
        raise ValueError(f"rank {rank} has no F {here}")
    if forward_only:
        return done["F"]
    if "B" in done and len(done) > 2:
        half = done["I"] if "I" in done else done["W"]
        raise ValueError(f"{named(schedule, rank, half)} repeats a part of its B {here}")
    if "B" not in done and "I" not in done:
        raise ValueError(f"rank {rank} has no B, and no I, {here}")
    if "I" in done and "W" not in done:
        raise ValueError(f"{named(schedule, rank, done['I'])} has no W {here}")
    return max(done.values())


def _is_on_route(schedule: Schedule, rank: int, chunk: int, micro_batch: int) -> bool:
    route = schedule.routes[schedule.route_of[micro_batch]]
    return route[schedule.stage_of(rank, chunk)] == (rank, chunk)


def _check_posted(schedule: Schedule, rank: int, program: Program) -> None:
    """A program has the steps of the order, each after the receives it needs, and its sends after it, each once."""
    made: set[Message] = set()
    sent: set[Message] = set()
    received: set[Message] = set()
    steps = 0
    for action in program:
        if isinstance(action, Exchange):
            for message in action.sends:
                if message not in made or message in sent:
                    raise ValueError(
                        f"rank {rank} sends {message} {'twice' if message in sent else 'before it is made'}"
                    )
                sent.add(message)
            for message in action.receives:
                if message in received:
                    raise ValueError(f"rank {rank} receives {message} twice")
                received.add(message)
            continue
        if steps == len(schedule.orders[rank]) or action != schedule.orders[rank][steps]:
            raise ValueError(f"rank {rank} runs {action} as step {steps}, which is not its order")
        for message in arrivals(schedule, rank, action):
            if message not in received:
                raise ValueError(f"{named(schedule, rank, steps)} needs {message}, which is not received before it")
        made.update(departures(schedule, rank, action))
        steps += 1
    if steps < len(schedule.orders[rank]):
        raise ValueError(f"{named(schedule, rank, steps)} is not in the rank's program")
    if made != sent:
        raise ValueError(f"rank {rank} does not send {min(made - sent)}")


def _check_same_order(programs: Sequence[Program]) -> None:
    """From rank to rank, messages are received in the order in which they are sent."""
    sends, receives = (
        defaultdict[tuple[int, int], list[Message]](list),
        defaultdict[tuple[int, int], list[Message]](list),
    )
    for program in programs:
        for action in program:
            if isinstance(action, Exchange):
                for message in action.sends:
                    sends[message.sender.rank, message.receiver.rank].append(message)
                for message in action.receives:
                    receives[message.sender.rank, message.receiver.rank].append(message)
    for pair in sends.keys() | receives.keys():
        for sent, received in zip_longest(sends[pair], receives[pair]):
            if sent != received:
                raise ValueError(f"rank {pair[0]} sends {sent} where rank {pair[1]} receives {received}")


def _run(schedule: Schedule, programs: Sequence[Program]) -> None:
    """Runs the programs on the strictest back end until nothing moves any more; raises ValueError if any is not through."""
    ranks = [_Progress(schedule, rank, program) for rank, program in enumerate(programs)]
    started: Counter[Message] = Counter()  # by how many of its two ends
    while any([rank.advance(started) for rank in ranks]):
        pass
    for rank in ranks:
        if why := rank.stuck(started):
            raise ValueError(why)


class _Progress:
    """How far one rank has come. Exchanges queue up as they are posted, and only the first in the queue is under way."""

    def __init__(self, schedule: Schedule, rank: int, program: Program):
        self.schedule, self.rank, self.program = schedule, rank, program
        self.at = self.steps = 0
        self.queue: deque[Exchange] = deque()
        self.under_way = False
        self.received: set[Message] = set()

    def advance(self, started: Counter[Message]) -> bool:
        """Goes on as far as possible; whether anything moved."""
        moved = False
        while self._act() or self._exchange(started):
            moved = True
        return moved

    def _act(self) -> bool:
        """Runs the next step if its inputs are there, or posts the next exchange."""
        if self.at == len(self.program):
            return False
        action = self.program[self.at]
        if isinstance(action, Exchange):
            self.queue.append(action)
        elif not self.received.issuperset(arrivals(self.schedule, self.rank, action)):
            return False
        else:
            self.steps += 1
        self.at += 1
        return True

    def _exchange(self, started: Counter[Message]) -> bool:
        """Starts the first exchange in the queue, or ends it if the other ends of all its messages have started."""
        if not self.queue:
            return False
        first = self.queue[0]
        messages = first.sends + first.receives
        if not self.under_way:
            started.update(messages)
            self.under_way = True
            return True
        if any(started[message] < 2 for message in messages):
            return False
        self.received.update(first.receives)
        self.queue.popleft()
        self.under_way = False
        return True

    def stuck(self, started: Counter[Message]) -> str | None:
        """Why this rank is not through, in one line; None when it is."""
        if self.at == len(self.program) and not self.queue:
            return None
        blocked = named(self.schedule, self.rank, self.steps) if self.at < len(self.program) else f"rank {self.rank}"
        waiting = [message for message in self.queue[0].sends + self.queue[0].receives if started[message] < 2]
        return f"deadlock: {blocked} stands still, as no other end takes part in {waiting[0]}"
