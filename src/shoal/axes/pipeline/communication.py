"""The messages of a schedule and where in its order each rank posts them, derived. No torch.

Each rank runs a *program*: the steps of its order, and between them *exchanges*, batches of sends and receives that
start together without being waited for. A step waits for the exchanges that bring its inputs.

Deadlock is ruled out by one global order. Steps are laid out on a logical clock (F, I and W take 1, B takes 2); messages
made at the same tick are one round; every rank posts its part of the rounds in the same order. Then, even where a back
end serves a rank's exchanges strictly one after the other and buffers nothing (NCCL on one stream), the earliest
unfinished round can always finish: all who take part have finished the rounds before, and what it sends was computed
from earlier rounds only. A back end that matches messages by tag (gloo) or per pair in order can only do better.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from shoal.axes.pipeline.dependencies import needs, times
from shoal.axes.pipeline.schedules.instruction import Place, Schedule, Step, parts

TICKS = {"F": 1, "B": 2, "I": 1, "W": 1, "U": 0}


class Message(NamedTuple):
    """An output on its way to the next stage (forward), or a gradient on its way back (backward), for one micro-batch."""

    phase: Literal["forward", "backward"]
    micro_batch: int
    sender: Place
    receiver: Place

    def __str__(self) -> str:
        what = "output" if self.phase == "forward" else "gradient"
        return f"the {what} of micro-batch {self.micro_batch} from {self.sender} to {self.receiver}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Sends and receives that one rank posts as one batch, in this order, without waiting."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


Action = Step | Exchange
Program = tuple[Action, ...]


def arrivals(schedule: Schedule, rank: int, step: Step) -> list[Message]:
    """Messages that must have been received before a step of this rank."""
    return [
        Message("forward" if need.kind == "F" else "backward", need.micro_batch, need.place, Place(rank, x.chunk))
        for x in parts(step)
        for need in needs(schedule, rank, x)
        if need.place.rank != rank
    ]


def departures(schedule: Schedule, rank: int, step: Step) -> list[Message]:
    """Messages that a step of this rank makes: outputs after F, gradients of the inputs after B or I."""
    made = []
    for x in parts(step):
        here = Place(rank, x.chunk)
        if x.kind == "F":
            there = schedule.next(rank, x.chunk, x.micro_batch)
        else:
            there = schedule.previous(rank, x.chunk, x.micro_batch) if x.kind in "BI" else None
        if there is not None and there.rank != rank:
            made.append(Message("forward" if x.kind == "F" else "backward", x.micro_batch, here, there))
    return made


def programs(schedule: Schedule) -> list[Program]:
    """What each rank runs: the steps of its order, and exchanges in between.

    A send is posted right after the step that makes it. A receive is posted ahead of the step before the one that needs
    it, so that it moves beside that step's work, or later where the rounds put a send of this rank before it. Raises
    ValueError for orders that wait in a circle.
    """
    spans = times(schedule, lambda _, step: sum(TICKS[x.kind] for x in parts(step)))
    made = [
        (spans[rank][position][1], position, message)
        for rank, order in enumerate(schedule.orders)
        for position, step in enumerate(order)
        for message in departures(schedule, rank, step)
    ]
    needed = {
        message: position
        for rank, order in enumerate(schedule.orders)
        for position, step in enumerate(order)
        for message in arrivals(schedule, rank, step)
    }
    rounds: list[dict[float, _Round]] = [defaultdict(_Round) for _ in range(schedule.ranks)]
    for tick, position, message in sorted(made):
        leaving = rounds[message.sender.rank][tick]
        leaving.sends.append(message)
        leaving.earliest = max(leaving.earliest, position + 1)
        arriving = rounds[message.receiver.rank][tick]
        arriving.receives.append(message)
        arriving.latest = min(arriving.latest, needed[message])
    return [_program(order, list(rounds[rank].values())) for rank, order in enumerate(schedule.orders)]


@dataclass
class _Round:
    """One rank's part of a round. earliest: steps that must have run before; latest: steps that may have."""

    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    earliest: int = 0
    latest: int = sys.maxsize


def _program(order: Sequence[Step], rounds: Sequence[_Round]) -> Program:
    """Puts the rounds, in order, between the steps of one rank."""
    # sends leave as soon as they are made; receives alone are posted one step ahead of the step that needs them
    wished = [part.earliest if part.sends else part.latest - 1 for part in rounds]
    for index in reversed(range(len(rounds) - 1)):
        wished[index] = min(wished[index], wished[index + 1])  # a round must not hold up those after it
    program: list[Action] = []
    run = 0
    for part, wish in zip(rounds, wished, strict=True):
        place = max(run, part.earliest, wish)
        assert place <= part.latest, "the logical clock made a step wait for a later round"
        program += [*order[run:place], Exchange(tuple(sorted(part.sends)), tuple(sorted(part.receives)))]
        run = place
    return (*program, *order[run:])
