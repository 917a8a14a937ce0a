"""Shares of a sequence, and work per rank and step, against brute force over dense masks and the spec's goldens."""

import numpy as np
import pytest

from shoal.axes.context import order
from shoal.spec.build import job_from_tree
from shoal.spec.errors import RequestError
from shoal.spec.fit import context_parts, exchanges

CASES = [
    *[(kind, ranks, 1) for kind in ("ring", "zigzag", "striped", "allgather", "ulysses") for ranks in (1, 2, 3, 4, 8)],
    *[("hybrid", ranks, u) for ranks, u in ((2, 1), (2, 2), (4, 2), (4, 4), (6, 3), (8, 2), (8, 4), (12, 3))],
]


@pytest.mark.parametrize(("kind", "ranks", "ulysses"), CASES)
def test_shares_are_equal_ascending_and_make_up_the_sequence(kind, ranks, ulysses):
    sequence = 2 * context_parts(kind, ranks, ulysses)
    shares = [order.places(kind, sequence, ranks, rank, ulysses) for rank in range(ranks)]
    assert all(len(share) == sequence // ranks and (np.diff(share) > 0).all() for share in shares)
    whole = np.random.default_rng(0).normal(size=sequence)
    together = np.concatenate([whole[share] for share in shares])
    np.testing.assert_array_equal(together[order.inverse(kind, sequence, ranks, ulysses)], whole)


def test_shares_by_hand():
    assert [order.places("zigzag", 8, 2, rank).tolist() for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert order.places("striped", 8, 4, 1).tolist() == [1, 5]
    assert order.places("ring", 8, 4, 1).tolist() == order.places("ulysses", 8, 4, 1).tolist() == [2, 3]
    hybrid = [order.places("hybrid", 16, 4, rank, 2).tolist() for rank in range(4)]
    assert hybrid == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize(("kind", "ranks", "ulysses"), CASES)
def test_sequences_are_filled_up_to_the_shortest_that_can_be_cut(kind, ranks, ulysses):
    layout = f"cp={ranks},cp_kind={kind},ulysses={ulysses}"
    for sequence in range(1, 50):
        tree = {"layout": layout, "model": {"hidden": 48, "heads": 24}}
        filled = job_from_tree(tree | {"data": {"sequence": sequence, "pad": True}}).sequence
        job_from_tree(tree | {"data": {"sequence": filled}}).check()
        if filled > sequence:
            with pytest.raises(RequestError, match=f"{filled} would, or data.pad=true"):
                job_from_tree(tree | {"data": {"sequence": sequence}}).check()


def seen(queries, keys, causal, window):
    back = queries[:, None] - keys[None]
    return (back >= 0 if causal else np.ones_like(back, bool)) & (np.abs(back) < (window or 10**9))


@pytest.mark.parametrize("kind", ["ring", "zigzag", "striped", "allgather"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 4, 9])
def test_work_counts_what_a_dense_mask_shows(kind, ranks, causal, window):
    sequence = 24
    shares = [order.places(kind, sequence, ranks, rank) for rank in range(ranks)]
    table = [
        [seen(shares[rank], shares[(rank - step) % ranks], causal, window).sum() for step in range(ranks)]
        for rank in range(ranks)
    ]
    np.testing.assert_array_equal(order.work(kind, sequence, ranks, causal, window), table)
    places = np.arange(sequence)
    assert np.sum(table) == seen(places, places, causal, window).sum()
    steps = order.steps(kind, sequence, ranks, causal, window)
    assert not np.any(np.array(table)[:, steps:]) and np.any(np.array(table)[:, steps - 1])


@pytest.mark.parametrize(
    ("kind", "by_rank", "step_maxima"),
    [
        ("ring", [136, 392, 648, 904], 904),
        ("zigzag", [520] * 4, 520),
        ("striped", [496, 512, 528, 544], 544),
    ],
)
def test_golden_work_of_64_tokens_on_4_ranks(kind, by_rank, step_maxima):
    table = np.array(order.work(kind, 64, 4))
    assert table.sum(1).tolist() == by_rank and table.max(0).sum() == step_maxima
    assert (np.array(order.work(kind, 64, 4, causal=False)) == 16 * 16).all()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_zigzag_is_balanced_in_every_step(ranks):
    table, half = np.array(order.work("zigzag", 48 * ranks, ranks)), 24
    assert (table == table[0]).all()
    assert table[0].sum() == (2 * ranks - 1) * half**2 + half * (half + 1)
    contiguous = np.array(order.work("ring", 48 * ranks, ranks)).sum(1)
    assert contiguous.tolist() == [48**2 * rank + 48 * 49 // 2 for rank in range(ranks)]


def test_a_window_ends_a_contiguous_ring_early():
    assert order.steps("ring", 64, 8, window=8) == 2  # 7 tokens back: the share before
    assert order.steps("ring", 64, 8, window=9) == 2
    assert order.steps("ring", 64, 8, window=10) == 3
    assert order.steps("ring", 64, 8, window=1) == order.steps("zigzag", 64, 8, window=1) == 1
    assert order.steps("zigzag", 64, 8, window=9) == 8  # a zig-zag's neighbours are on both sides
    assert order.steps("ring", 64, 8, causal=False, window=9) == 8


def test_heads_that_an_all_to_all_can_share_out():
    """All that cut the query heads evenly, and either the KV heads or the ranks among the KV heads."""
    for heads, kv_heads, ranks in ((8, 8, 8), (8, 4, 8), (8, 2, 4), (8, 1, 8), (6, 3, 3), (32, 8, 16)):
        assert exchanges(heads, kv_heads, ranks)
    for heads, kv_heads, ranks in ((8, 8, 3), (4, 4, 8), (6, 2, 3), (12, 4, 6)):
        assert not exchanges(heads, kv_heads, ranks)
