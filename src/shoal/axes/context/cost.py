"""What context parallelism costs, in closed form: transfers, memory, balance and time (spec CP-1, CP-4..8). No torch.

Sizes are elements or bytes as named, times seconds. All ranks send and receive alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.axes.context.order import kv_heads_each, steps, work
from shoal.transfer import Transfer, traffic


@dataclass(frozen=True)
class Crossing:
    """Attention of one layer and micro-batch, and how it crosses the context ranks.

    batch: sequences of the micro-batch; sequence: whole, in tokens; heads, kv_heads: of one tensor rank. ulysses: ranks
    of the all-to-all part of a hybrid. width: bytes per element of activations; accumulate_width: of the sums of keys'
    and values' gradients, 4 at least unless asked otherwise.
    """

    kind: str
    ranks: int
    batch: int
    sequence: int
    heads: int
    kv_heads: int
    head_size: int
    width: int = 4
    accumulate_width: int = 4
    ulysses: int = 1
    causal: bool = True
    window: int | None = None

    @property
    def across(self) -> int:
        """Ranks of the all-to-all."""
        return {"ulysses": self.ranks, "hybrid": self.ulysses}.get(self.kind, 1)

    @property
    def around(self) -> int:
        """Ranks among which blocks of keys and values travel."""
        return self.ranks // self.across

    @property
    def ring_kind(self) -> str:
        """How the tokens lie on those."""
        return {"ulysses": "ring", "hybrid": "zigzag"}.get(self.kind, self.kind)

    @property
    def tokens(self) -> int:
        """Tokens of one rank, of all sequences together."""
        return self.batch * self.sequence // self.ranks

    @property
    def block(self) -> int:
        """Elements of one block: keys and values of the tokens and heads that one rank of the ring has."""
        kv_heads = kv_heads_each(self.kv_heads, self.across)
        return 2 * self.batch * self.sequence // self.around * kv_heads * self.head_size

    @property
    def steps(self) -> int:
        """Steps of the ring until no rank has anything left to compute."""
        return steps(self.ring_kind, self.sequence, self.around, self.causal, self.window)


def transfers(cut: Crossing, layer: int | None = None, micro_batch: int | None = None) -> Iterator[Transfer]:
    """Transfers of one layer's attention in one micro-batch's forward and backward, on any rank.

    The axis is "cp"; in a hybrid "ring" and "ulysses". With N ranks and KV width h_kv, forward, sent and received alike:
      ring, zigzag, striped  N - 1 blocks of 2 b s/N h_kv elements; backward again as many, and as many of gradients
      allgather              the same bytes in one call; backward the same, and one reduce-scatter
      ulysses                (2 h + 2 h_kv) b s (N-1)/N^2 elements in two all-to-alls, h_kv counting a KV head once for
                             each rank that needs it; backward the same
    """
    for phase in ("forward", "backward"):
        yield from (
            Transfer(phase, axis, op, sent, received, calls, layer, micro_batch)
            for axis, op, sent, received, calls in _movements(cut, phase)
            if calls
        )


def evaluation_transfers(cut: Crossing, forwards: int, layer: int | None = None) -> Iterator[Transfer]:
    """Transfers of one layer's attention in `forwards` forwards without backward, on any rank."""
    for axis, op, sent, received, calls in _movements(cut, "forward"):
        if calls * forwards:
            yield Transfer("evaluate", axis, op, sent * forwards, received * forwards, calls * forwards, layer)


def _movements(cut: Crossing, phase: str) -> Iterator[tuple[str, str, int, int, int]]:
    """(axis, op, sent, received, calls) of one phase."""
    if cut.across > 1:
        kv_heads = kv_heads_each(cut.kv_heads, cut.across)
        rows = cut.batch * cut.sequence // cut.ranks * cut.head_size
        pieces = (rows * (cut.heads // cut.across + 2 * kv_heads), rows * cut.heads // cut.across)
        sent = sum((cut.across - 1) * piece * cut.width for piece in pieces)
        yield "ulysses" if cut.kind == "hybrid" else "cp", "all_to_all", sent, sent, len(pieces)
    axis = "ring" if cut.kind == "hybrid" else "cp"
    if cut.kind == "allgather":
        whole = cut.block * cut.ranks
        calls = int(cut.ranks > 1)
        yield axis, "all_gather", *traffic("all_gather", whole, cut.width, cut.ranks, 0), calls
        if phase == "backward":
            yield axis, "reduce_scatter", *traffic("reduce_scatter", whole, cut.accumulate_width, cut.ranks, 0), calls
        return
    hops = cut.steps - 1
    size, calls = hops * cut.block * cut.width, hops
    if phase == "backward":
        size, calls = size + hops * cut.block * cut.accumulate_width, 2 * hops
    yield axis, "send", size, 0, calls
    yield axis, "receive", 0, size, calls


def saved_bytes(cut: Crossing) -> int:
    """Bytes that one layer's attention keeps from forward to backward: q, k, v, out and log-sum-exp of a rank's share.

    1/N of what one process keeps (spec CP-8), but for KV heads that ranks of an all-to-all share.
    """
    rows = cut.batch * cut.sequence // cut.around
    heads, kv_heads = cut.heads // cut.across, kv_heads_each(cut.kv_heads, cut.across)
    return rows * (2 * (heads + kv_heads) * cut.head_size * cut.width + heads * max(cut.width, 4))


def travelling_bytes(cut: Crossing) -> dict[str, int]:
    """The most bytes that come on top while one layer's attention crosses the ranks: blocks, and sums of gradients.

    blocks: keys and values, in forward and backward alike. A ring has two, the one it computes with and the one that
    arrives; an all-gather has N. gradients: the ring's own, the part being computed, and the sums that
    arrive and leave; the all-gather's N and the one that its rank is left with.
    """
    if cut.kind == "allgather":
        blocks, gradients = cut.ranks, cut.ranks + 1
    else:
        blocks, gradients = {1: (0, 1), 2: (2, 3)}.get(cut.steps, (2, 4))
    return {"blocks": blocks * cut.block * cut.width, "gradients": gradients * cut.block * cut.accumulate_width}


def pairs(cut: Crossing) -> np.ndarray:
    """(ring ranks, steps) pairs of query and key that a rank computes for one head and sample in each step (spec CP-5)."""
    return np.array(work(cut.ring_kind, cut.sequence, cut.around, cut.causal, cut.window))[:, : cut.steps]


def imbalance(cut: Crossing) -> dict[str, float]:
    """By how much the busiest is above the mean: rank (whole ring), and step (every step waits for its busiest rank).

    Causal: a contiguous ring's are (2N - 1)/N in the limit, a zig-zag's exactly 1.
    """
    table = pairs(cut)
    mean = table.sum() / len(table)
    return {"rank": float(table.sum(1).max() / mean), "step": float(table.max(0).sum() / mean)}


def hiding_tokens(flops: float, bandwidth: float, width: int, kv_share: float = 1.0) -> float:
    """Tokens of a rank's share from which on computing a block takes as long as fetching the next (spec CP-6).

    flops: per second and rank; bandwidth: bytes per second, one direction; kv_share: KV heads per query head. A block of
    c tokens takes 4 c^2 h flops and 2 c h_kv width bytes: c >= width flops / (2 bandwidth) for as many KV heads.
    """
    return width * flops * kv_share / (2 * bandwidth)


def ring_timeline(compute: Sequence[Sequence[float]] | np.ndarray, transfer: float) -> tuple[np.ndarray, np.ndarray]:
    """(start, end) of each rank's computing in each step of a forward ring, (ranks, steps) (spec CP-6).

    compute: seconds [rank][step]; transfer: of one block to the next rank. A step starts when the rank has computed the
    one before and the exchange of that step, which starts with it, is complete in both directions. An exchange moves
    when both neighbours have come to it. For equal ranks: steps - 1 times max(compute, transfer), and compute once more.
    """
    seconds = np.asarray(compute, dtype=float)
    start, end = np.zeros_like(seconds), np.zeros_like(seconds)
    ready = np.zeros(len(seconds))
    for step in range(seconds.shape[1]):
        start[:, step] = ready
        end[:, step] = ready + seconds[:, step]
        arrived = np.maximum(ready, np.roll(ready, 1)) + transfer  # from the rank before
        ready = np.maximum(end[:, step], np.maximum(arrived, np.roll(arrived, -1)))  # and what it sends has left
    return start, end


def scheme_elements(
    ranks: int, tokens: float, hidden: int, kv_hidden: int | None = None, parameters: float | None = None
) -> dict[str, float]:
    """Elements that a rank sends per dense layer and step if `ranks` ranks do nothing but dp, or cp, or tp (spec CP-8).

    tokens: of one step, all ranks together; kv_hidden: width of the keys, `hidden` unless heads share them; parameters:
    of the layer, 12 hidden^2 by default. "cp activations" leaves out cp's gradients, which every such step must sum too.
    Times N/(N-1): dp 2 parameters = 24 h^2, cp 6 G h_kv and the same 24 h^2, tp 8 G h.
    """
    share = (ranks - 1) / ranks
    gradients = 2 * (12 * hidden**2 if parameters is None else parameters) * share
    around = 6 * tokens * (hidden if kv_hidden is None else kv_hidden) * share
    return {"dp": gradients, "cp": around + gradients, "cp activations": around, "tp": 8 * tokens * hidden * share}


def crossovers(hidden: int, kv_hidden: int | None = None, parameters: float | None = None) -> dict[str, float]:
    """Tokens per step from which on a scheme sends less than tp: dp 3 h and cp 12 h for 12 h^2 parameters (spec CP-8).

    dp always sends less than cp, which sums the same gradients; without them cp always sends less than tp.
    """
    gradients = 2 * (12 * hidden**2 if parameters is None else parameters)
    kv = hidden if kv_hidden is None else kv_hidden
    return {"dp": gradients / (8 * hidden), "cp": gradients / (8 * hidden - 6 * kv)}
