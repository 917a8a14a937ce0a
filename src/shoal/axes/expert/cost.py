"""What expert parallelism costs: load, transfers, memory, and where its group may sit (spec EP-1..6). No torch.

N: ranks of the expert axis, E: experts, k: experts per token, T: tokens of a rank, h: hidden, f: width of an expert.
width: bytes per element. A routing is given as `chosen`: for each of the N ranks an integer array (T, k) of the experts
its tokens use, negative where a choice was dropped; T may differ between ranks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from shoal.transfer import Transfer, traffic

COUNT, PLACE = 8, 4  # bytes: counts and statistics travel as int64, places of rows and chosen experts as int32


def experts_of(experts: int, ranks: int, rank: int) -> range:
    """The experts that a rank holds (EP-1); `MoESpec.check_ranks` refuses what does not divide."""
    size = experts // ranks
    return range(rank * size, (rank + 1) * size)


def tokens_per_expert(tokens: float, top_k: float, experts: float, ranks: float) -> tuple[float, float]:
    """(with replicated experts T k / E, with experts over the ranks N T k / E): means per rank and step (EP-2)."""
    alone = tokens * top_k / experts
    return alone, ranks * alone


def capacity(factor: float, tokens: int, top_k: int, experts: int) -> int:
    """Tokens that an expert takes of a scope of `tokens` (EP-5): exact, as 1.1 x 100 / 10 in floats is more than 11."""
    return math.ceil(Fraction(str(factor)) * tokens * top_k / experts)


def load(chosen: Sequence[np.ndarray], experts: int) -> np.ndarray:
    """Tokens that each expert computes, over all ranks: (E,); they add up to N T k where nothing is dropped."""
    every = np.concatenate([table.ravel() for table in chosen])
    return np.bincount(every[every >= 0], minlength=experts)


def rows_between(chosen: Sequence[np.ndarray], experts: int, duplicate_free: bool = False) -> np.ndarray:
    """Rows that rank i sends to rank j in one all-to-all, [i, j]: choices, or with duplicate_free tokens."""
    ranks = len(chosen)
    rows = np.zeros((ranks, ranks), dtype=np.int64)
    for source, table in enumerate(chosen):
        token, place = np.nonzero(table >= 0)
        to = table[token, place] // (experts // ranks)
        if duplicate_free:
            to = np.unique(np.stack([token, to]), axis=1)[1]
        rows[source] = np.bincount(to, minlength=ranks)
    return rows


def expected_remote_rows(tokens: int, top_k: int, experts: int, ranks: int, duplicate_free: bool = False) -> float:
    """Mean rows that a rank sends to others in one all-to-all when all sets of k experts are equally likely (EP-4).

    T k (N - 1) / N; without duplicates T (N - 1) (1 - C(E - E/N, k) / C(E, k)).
    """
    if duplicate_free:
        missed = math.comb(experts - experts // ranks, top_k) / math.comb(experts, top_k)
        return tokens * (ranks - 1) * (1 - missed)
    return tokens * top_k * (ranks - 1) / ranks


def expected_bytes(tokens: int, top_k: int, hidden: int, width: int, ranks: int, passes: int = 4) -> float:
    """Mean bytes that a rank sends for a layer: 4 T k h width (N - 1) / N; passes = 2 for forward alone (EP-4)."""
    return passes * tokens * top_k * hidden * width * (ranks - 1) / ranks


def token_transfers(
    chosen: Sequence[np.ndarray],
    experts: int,
    hidden: int,
    width: int,
    rank: int,
    *,
    duplicate_free: bool = False,
    weight_width: int = 4,
    layer: int | None = None,
    micro_batch: int | None = None,
    backward: bool = True,
) -> Iterator[Transfer]:
    """Transfers of tokens, in one layer and micro-batch, of one rank of the expert axis: 2 calls forward, 2 backward.

    With duplicate_free the weights of the choices (weight_width bytes each) go along in one more call each way.
    """
    if len(chosen) == 1:
        return
    choices, rows = rows_between(chosen, experts), rows_between(chosen, experts, duplicate_free)
    wide = weight_width if duplicate_free else None
    yield from row_transfers(choices, rows, hidden, width, rank, wide, 1, layer, micro_batch, backward)


def row_transfers(
    choices: np.ndarray,
    rows: np.ndarray,
    hidden: int,
    width: int,
    rank: int,
    weight_width: int | None = None,
    calls: int = 1,
    layer: int | None = None,
    micro_batch: int | None = None,
    backward: bool = True,
) -> Iterator[Transfer]:
    """Transfers of tokens of one layer, in `calls` forwards that together send choices and rows [i, j] from i to j.

    weight_width: of the weights that go along without duplicates; None: a row for every choice, weighted where it came from.
    """
    for phase in ("forward", "backward") if backward else ("forward",):
        there = [(rows, hidden * width)] + ([(choices, weight_width)] if weight_width else [])
        back = [(rows.T, hidden * width)]
        if phase == "backward":
            there, back = [(sent.T, size) for sent, size in back], [(sent.T, size) for sent, size in there]
        for sent, size in (*there, *back):
            yield _all_to_all(phase, sent, size, rank, layer, micro_batch, calls)


def expected_rows(tokens: int, top_k: int, experts: int, ranks: int, duplicate_free: bool = False) -> np.ndarray:
    """Mean rows that rank i sends to rank j [i, j] in one all-to-all when all sets of k experts are equally likely (EP-4)."""
    remote = expected_remote_rows(tokens, top_k, experts, ranks, duplicate_free)
    return np.full((ranks, ranks), remote / (ranks - 1))


def plan_transfers(
    chosen: Sequence[np.ndarray],
    experts: int,
    rank: int,
    *,
    duplicate_free: bool = False,
    layer: int | None = None,
    micro_batch: int | None = None,
) -> Iterator[Transfer]:
    """Transfers that tell ranks what will come, in one layer's forward: the counts, as int64, of each expert's tokens.

    With duplicate_free also the count of rows, and in a second call where each choice's row lies, as int32.
    """
    yield from count_transfers(experts, len(chosen), rank, duplicate_free, layer, micro_batch)
    if duplicate_free and len(chosen) > 1:
        yield place_transfer(rows_between(chosen, experts), rank, 1, layer, micro_batch)


def count_transfers(
    experts: int, ranks: int, rank: int, duplicate_free: bool, layer: int | None = None, micro_batch: int | None = None
) -> Iterator[Transfer]:
    """The part of `plan_transfers` that no routing changes: the counts."""
    if ranks > 1:
        counts = np.full((ranks, ranks), experts // ranks + duplicate_free)
        yield _all_to_all("forward", counts, COUNT, rank, layer, micro_batch)


def place_transfer(
    choices: np.ndarray, rank: int, calls: int = 1, layer: int | None = None, micro_batch: int | None = None
) -> Transfer:
    """The other part, without duplicates: the place of each choice's row, in `calls` forwards."""
    return _all_to_all("forward", choices, PLACE, rank, layer, micro_batch, calls)


def tensor_transfers(
    axis: str,
    ranks: int,
    rank: int,
    tokens: int,
    hidden: int,
    top_k: int,
    width: int,
    *,
    sequence: bool,
    shared_gate: bool = False,
    weight_width: int = 4,
    layer: int | None = None,
    micro_batch: int | None = None,
    backward: bool = True,
) -> Iterator[Transfer]:
    """Transfers of one layer whose experts are cut over the `ranks` tensor ranks of `axis` (etp = tp).

    tokens: of the whole group, a multiple of ranks where the sequence is cut. Beside the tokens the weights of their
    choices enter and, where the sequence is cut, the chosen experts, as int32; they have no gradient.
    """
    if ranks == 1:
        return
    entering = [(tokens * hidden, width), (tokens * top_k, weight_width)]
    entering += [(tokens, width)] if shared_gate else []
    leaving = [(tokens * hidden, width)]
    before, after = ("all_gather", "reduce_scatter") if sequence else (None, "all_reduce")
    calls = [("forward", before, size) for size in entering] + [("forward", after, size) for size in leaving]
    if sequence:
        calls.append(("forward", "all_gather", (tokens * top_k, PLACE)))
    if backward:
        calls += [("backward", before, size) for size in leaving] + [("backward", after, size) for size in entering]
    for phase, op, (elements, size) in calls:
        if op is not None:
            sent, received = traffic(op, elements, size, ranks, rank)
            yield Transfer(phase, axis, op, sent, received, 1, layer, micro_batch)


def share_transfers(
    axis: str,
    ranks: int,
    rank: int,
    sequences: int,
    length: int,
    hidden: int,
    width: int,
    layer: int | None = None,
    micro_batch: int | None = None,
    backward: bool = True,
) -> Iterator[Transfer]:
    """Transfers of one layer whose tokens, the same on the `ranks` ranks of `axis`, are shared out (etp = 1, no sp).

    sequences of `length` tokens: y is gathered forward, the gradient of x backward.
    """
    if ranks == 1:
        return
    for phase in ("forward", "backward") if backward else ("forward",):
        sent, received = traffic("all_gather", length, sequences * hidden * width, ranks, rank)
        yield Transfer(phase, axis, "all_gather", sent, received, 1, layer, micro_batch)


def statistics_transfers(
    axis: str,
    ranks: int,
    rank: int,
    scopes: int,
    experts: int,
    *,
    losses: bool,
    limited: bool = False,
    choices: int = 0,
    tokens: int = 0,
    layer: int | None = None,
    micro_batch: int | None = None,
) -> Iterator[Transfer]:
    """Transfers of one layer's forward among the ranks that hold tokens of the same `scopes` (sequences or micro-batch).

    losses: whether there are auxiliary losses: their counts are summed. limited: whether there is a capacity: places of
    all `tokens` of these ranks, and their `choices` (tokens k), are gathered. Backward sends nothing.
    """
    if ranks == 1:
        return
    if losses:
        sent, received = traffic("all_reduce", scopes * (experts + 2), COUNT, ranks, rank)
        yield Transfer("forward", axis, "all_reduce", sent, received, 1, layer, micro_batch)
    if limited:
        for elements, size in ((tokens, COUNT), (choices, PLACE)):
            sent, received = traffic("all_gather", elements, size, ranks, rank)
            yield Transfer("forward", axis, "all_gather", sent, received, 1, layer, micro_batch)


def load_transfers(axis: str, ranks: int, rank: int, layers: int, experts: int) -> Iterator[Transfer]:
    """The step's one all-reduce of all layers' loads, for metrics and the routing bias."""
    if ranks > 1:
        sent, received = traffic("all_reduce", layers * (experts + 1), COUNT, ranks, rank)
        yield Transfer("optimizer", axis, "all_reduce", sent, received)


def expert_parameters(experts: int, hidden: int, ffn: int, ranks: int = 1, etp: int = 1) -> int:
    """Parameters of one layer's routed experts on a rank: 3 h f E / N, each matrix cut over etp ranks."""
    return 3 * (experts // ranks) * hidden * -(-ffn // etp)


@dataclass(frozen=True)
class Placement:
    """How heavy a layer's all-to-alls are beside other axes' traffic over as many ranks and tokens (EP-6, forward only).

    over_tensor: bytes over those of one block's two all-reduces, k / 2N. over_pipeline: bytes of all mixture layers over
    those of one stage boundary, 2 k (N - 1) / N^2 times the layers.
    """

    over_tensor: float
    over_pipeline: float


def placement(top_k: int, ranks: int, layers: int) -> Placement:
    """Of an expert axis of N ranks in a model with `layers` mixture-of-experts layers.

    TP > EP holds if k < 2N, EP > PP if 2 k (N - 1) / N^2 layers > 1; then tensor ranks deserve the fastest links, experts
    the next. Groups over several machines are common practice (GShard, DeepSeek-V3), see `across_machines`.
    """
    return Placement(top_k / (2 * ranks), 2 * top_k * (ranks - 1) / ranks**2 * layers)


def across_machines(
    tokens: int, top_k: int, hidden: int, width: int, ranks: int, per_machine: int
) -> tuple[float, float]:
    """Mean bytes of one all-to-all that a rank sends (within its machine, to other machines), for T k even choices."""
    each = tokens * top_k * hidden * width / ranks
    return (per_machine - 1) * each, (ranks - per_machine) * each


def all_to_all_time(within: float, across: float, bandwidth_within: float, bandwidth_across: float) -> float:
    """Seconds of one all-to-all whose two kinds of links work side by side; bytes, and bytes per second and rank."""
    return max(within / bandwidth_within, across / bandwidth_across)


def _all_to_all(
    phase: str, sent: np.ndarray, size: int, rank: int, layer: int | None, micro_batch: int | None, calls: int = 1
) -> Transfer:
    """Rank's row and column of what every rank sends to every other, in elements of `size` bytes; means are rounded."""
    leaves = round((sent[rank].sum() - sent[rank, rank]).item() * size)
    arrives = round((sent[:, rank].sum() - sent[rank, rank]).item() * size)
    return Transfer(phase, "ep", "all_to_all", leaves, arrives, calls, layer, micro_batch)
