"""Which tokens and heads a context rank has: places by kind, and work (spec CP-5, CP-7); spec/fit.py has what can be cut.

A *place* is a token's number in the whole sequence, a *piece* a run of consecutive places, a *share* what one rank has.
Every share lists its places in ascending order. No torch.
"""

from functools import cache

import numpy as np

from shoal.spec.fit import context_parts

# How each kind lays out its shares. All-gather could use any order; zig-zag balances it.
_LAYOUT = {
    "ring": "contiguous",
    "zigzag": "zigzag",
    "striped": "striped",
    "ulysses": "contiguous",
    "allgather": "zigzag",
    "hybrid": "hybrid",
}


def places(kind: str, sequence: int, ranks: int, rank: int, ulysses: int = 1) -> np.ndarray:
    """Places of a rank's tokens, ascending, int64 (sequence / ranks,).

    ring, ulysses: one piece each. zigzag, allgather: of 2N pieces rank i has i and 2N - 1 - i, an early and a late one.
    striped: every N-th token from the i-th on. hybrid: zig-zag over N / ulysses ring ranks; the `ulysses` consecutive
    ranks of one ring rank have equal runs of its share, one after the other.
    """
    assert sequence % context_parts(kind, ranks, ulysses) == 0, f"{kind} cannot cut {sequence} tokens for {ranks} ranks"
    assert 0 <= rank < ranks and ranks % ulysses == 0
    share = sequence // ranks
    match _LAYOUT[kind]:
        case "contiguous":
            return np.arange(rank * share, (rank + 1) * share)
        case "striped":
            return np.arange(rank, sequence, ranks)
        case "zigzag":
            piece = np.arange(share // 2)
            return np.concatenate((rank * share // 2 + piece, (2 * ranks - 1 - rank) * share // 2 + piece))
        case _:
            around, across = divmod(rank, ulysses)
            return places("zigzag", sequence, ranks // ulysses, around)[across * share : (across + 1) * share]


def inverse(kind: str, sequence: int, ranks: int, ulysses: int = 1) -> np.ndarray:
    """Index that puts the ranks' shares, one after the other, back into the order of the sequence."""
    return np.argsort(np.concatenate([places(kind, sequence, ranks, rank, ulysses) for rank in range(ranks)]))


def kv_heads_each(kv_heads: int, ranks: int) -> int:
    """KV heads that a rank has after the all-to-all: its part, or one that it shares with other ranks."""
    return max(kv_heads // ranks, 1)


@cache
def work(
    kind: str, sequence: int, ranks: int, causal: bool = True, window: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Pairs of query and key that rank i computes in step j of its ring, for one head and sample: [i][j] (spec CP-5).

    In step j rank i has the K/V block of rank i - j, modulo the ranks. For ring, zigzag, striped and allgather; the
    ring of a hybrid is a zigzag over its ring ranks, and a Ulysses rank computes all pairs for a part of the heads.
    """
    shares = [places(kind, sequence, ranks, rank) for rank in range(ranks)]
    return tuple(
        tuple(_pairs(shares[rank], shares[(rank - step) % ranks], causal, window) for step in range(ranks))
        for rank in range(ranks)
    )


def steps(kind: str, sequence: int, ranks: int, causal: bool = True, window: int | None = None) -> int:
    """Steps after which no rank of the ring has anything left to compute: N, or fewer under a sliding window.

    Documents are not looked at: this depends on the layout alone, so that transfers are known beforehand.
    """
    if window is None:
        return ranks
    table = np.array(work(kind, sequence, ranks, causal, window))
    return 1 + int(np.flatnonzero(table.any(axis=0)).max())


def _pairs(queries: np.ndarray, keys: np.ndarray, causal: bool, window: int | None) -> int:
    low, high = ranges(queries, keys, causal, window)
    return int(np.maximum(high - low, 0).sum())


def ranges(queries: np.ndarray, keys: np.ndarray, causal: bool, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(low, high): query i sees keys low[i] up to, not including, high[i]. Places are ascending, low and high too.

    causal: only keys up to its own place. window: only keys less than `window` places away.
    """
    low = np.zeros(len(queries), dtype=np.int64)
    high = np.full(len(queries), len(keys))
    if window is not None:
        low = np.searchsorted(keys, queries - window, "right")
        high = np.searchsorted(keys, queries + window, "left")
    if causal:
        high = np.minimum(high, np.searchsorted(keys, queries, "right"))
    return low, high
