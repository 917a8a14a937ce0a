"""What a pipeline costs: its bubble, its transfers, and the memory of activations and weights (spec PP-2..11). No torch.

Closed forms where there are any, else the schedule is simulated or walked.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isclose

from shoal.axes.pipeline.communication import Message, arrivals, departures
from shoal.axes.pipeline.live import Size, live_versions, peak
from shoal.axes.pipeline.schedules.instruction import Place, Schedule
from shoal.axes.pipeline.schedules.registry import make, needs
from shoal.axes.pipeline.simulate import simulate, stage_times
from shoal.transfer import Transfer, traffic

SCALAR = 8  # bytes: losses and squares travel as one float64


@dataclass(frozen=True)
class Bubble:
    """Time that ranks do not work in a step. idle: of the makespan, the mean over ranks; useful: work of one rank.

    closed: whether the figure comes from a formula, not from simulation.
    """

    idle: float
    useful: float
    closed: bool

    @property
    def ratio(self) -> float:
        """Idle over useful time; (p - 1) / m for 1F1B (spec PP-3)."""
        return self.idle / self.useful

    @property
    def fraction(self) -> float:
        """Idle over all time; (p - 1) / (m + p - 1) for 1F1B (spec PP-3)."""
        return self.idle / (self.idle + self.useful)


def bubble(
    name: str,
    p: int,
    m: int,
    v: int | None = None,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float | None = None,
    hidden: float = 0.0,
) -> Bubble:
    """The bubble of a schedule on equal stages whose transfers cost nothing.

    forward, backward: of one micro-batch in all chunks of a rank; weight: W's part of backward, by default half; hidden: as
    in stage_times. Raises RequestError for what the schedule cannot do.
    """
    w = backward / 2 if weight is None else weight
    chunks = needs(name).v if v is None else v
    needs(name).check(name, p, m, chunks)
    idle = closed_idle(name, p, m, chunks, forward, backward, w) if hidden == 0 else None
    if idle is not None:
        return Bubble(idle, m * (forward + backward), True)
    schedule = make(name, p, m, chunks)
    timeline = simulate(schedule, stage_times(schedule, forward / chunks, backward / chunks, w / chunks, hidden=hidden))
    return Bubble(sum(timeline.idle) / p, sum(timeline.busy) / p, False)


def closed_idle(name: str, p: int, m: int, v: int, f: float, b: float, w: float) -> float | None:
    """Idle time of a rank in closed form; None where there is none for these numbers.

    f, b, w: times of one micro-batch in all chunks of a rank. Spec PP-2, 4, 6, 8, 10, Lamy-Poirier 2023 and Qi et al. 2023;
    where a formula needs more than equal stages, its condition was found against the simulator.
    """
    i = b - w
    alike = isclose(i, f) and w <= f
    match name:
        case "naive":
            return m * (p - 1) * (f + b)
        case "gpipe" | "1f1b" | "pipedream" | "pipedream-vertical" | "pipedream-2bw":
            return (p - 1) * (f + b)
        case "interleaved" | "breadth-first" if m >= p:
            return (p - 1) * (f + b) / v
        case "zb-h1" if m >= p and w <= min(f, i):
            return (p - 1) * (f + i - w)
        case "zb-h2" if m >= 2 * p - 1 and w <= min(f, i) and i <= 2 * w:
            return (p - 1) * f
        case "dualpipe" if alike:
            return (p / 2 - 1) * (f + 2 * b - 3 * w)
        case "dualpipe-v" if alike:
            return (p - 1) * (f + 2 * b - 3 * w) / 2
    return None


@dataclass(frozen=True)
class Cell:
    """One cell of the chart of bubbles over micro-batches and chunks: idle over useful time.

    formula: (p - 1) / (v m). simulated: of 1f1b (v = 1) or interleaved. attainable: whether they agree; with m < p and v > 1
    no schedule reaches the formula, since one micro-batch takes p stages' time whatever v.
    """

    m: int
    v: int
    formula: float
    simulated: float

    @property
    def attainable(self) -> bool:
        return isclose(self.formula, self.simulated)


def bubble_chart(p: int, micro_batches: Sequence[int], chunks: Sequence[int]) -> list[Cell]:
    """The chart of spec PP-9, row by row in v."""

    def cell(m: int, v: int) -> Cell:
        schedule = make("1f1b", p, m) if v == 1 else make("interleaved", p, m, v)
        return Cell(m, v, (p - 1) / (v * m), simulate(schedule, stage_times(schedule)).bubble)

    return [cell(m, v) for v in chunks for m in micro_batches]


def message_bytes(b: int, s: int, h: int, width: int, parts: int = 1) -> int:
    """Bytes of one message: b x s x h elements; parts: sequence-parallel ranks, of which each sends its part (PP-11)."""
    return b * s * h * width // parts


def messages_of(schedule: Schedule, rank: int) -> list[tuple[str, Message]]:
    """Every message of a rank, as ("send" or "receive", message), in the order of its steps."""
    return [
        pair
        for step in schedule.orders[rank]
        for pair in (
            *(("receive", message) for message in arrivals(schedule, rank, step)),
            *(("send", message) for message in departures(schedule, rank, step)),
        )
    ]


def step_transfers(schedule: Schedule, rank: int, size: int) -> Iterator[Transfer]:
    """Transfers of one training step on one rank; size: bytes of one message.

    For p stages: forward m (p - 1) size over all ranks and backward as much, whatever the schedule; with v chunks in loops
    m (p v - 1) size each. Nothing where the next stage is on the same rank (spec PP-8, PP-11).
    """
    calls = Counter((message.phase, op, message.micro_batch) for op, message in messages_of(schedule, rank))
    for (phase, op, micro_batch), count in calls.items():
        sent, received = traffic(op, size, 1, schedule.ranks, rank)
        yield Transfer(phase, "pp", op, sent * count, received * count, count, micro_batch=micro_batch)


def evaluation_transfers(schedule: Schedule, rank: int, size: int) -> Iterator[Transfer]:
    """Transfers of one evaluation on one rank. schedule: forwards only; size: bytes of one message."""
    for op, count in Counter(op for op, _ in messages_of(schedule, rank)).items():
        sent, received = traffic(op, size, 1, schedule.ranks, rank)
        yield Transfer("evaluate", "pp", op, sent * count, received * count, count)


def activation_bytes(
    schedule: Schedule,
    rank: int,
    whole: Sequence[float] | Size,
    waiting: Sequence[float] | Size | None = None,
    kept: Sequence[float] | Size | None = None,
) -> float:
    """The most bytes of activations on a rank at once.

    By stage of the model, bytes of one micro-batch, or of each by (stage, micro-batch). whole: all that backward needs;
    waiting: what W needs after I; kept: where backward computes again, what stays from the forward; then `whole` comes on
    top in backward alone: for GPipe m boundary tensors and L/p layers instead of m L/p layers (spec PP-5).
    """
    held, rest = _by_micro_batch(whole), _by_micro_batch(waiting or (lambda *_: 0.0))
    return peak(schedule, rank, held, rest) if kept is None else peak(schedule, rank, _by_micro_batch(kept), rest, held)


def _by_micro_batch(sizes: Sequence[float] | Size) -> Size:
    return sizes if callable(sizes) else lambda stage, micro_batch: sizes[stage]


def weight_bytes(schedule: Schedule, rank: int, weights: Sequence[float]) -> float:
    """The most bytes of weights on a rank at once, every version and every copy. weights: bytes by stage of the model.

    PipeDream keeps p - s versions on stage s, with vertical sync p, 2BW two; DualPipe two copies of the model (PP-7, PP-10).
    """
    return sum(
        weights[schedule.stage_of(rank, chunk)] * max(live_versions(schedule, Place(rank, chunk)), default=1)
        for chunk in range(schedule.chunks(rank))
    )


def scalar_transfers(ranks: int, rank: int) -> Iterator[Transfer]:
    """Once a step, one float64 each: the loss, which the last stage knows, and the squares of the gradient norm."""
    sent, received = traffic("all_reduce", 1, SCALAR, ranks, rank)
    yield Transfer("optimizer", "pp", "all_reduce", 2 * sent, 2 * received, calls=2)


def evaluation_scalar_transfers(ranks: int, rank: int) -> Iterator[Transfer]:
    """Once an evaluation: the loss."""
    sent, received = traffic("all_reduce", 1, SCALAR, ranks, rank)
    yield Transfer("evaluate", "pp", "all_reduce", sent, received)
