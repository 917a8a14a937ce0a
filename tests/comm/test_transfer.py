"""The byte formulas against goldens of the spec, against rings simulated here, and against their own sums."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.transfer import LARGE_GROUP_FACTOR, factor, pieces, traffic

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "scatter", "gather", "all_to_all")


def simulated_ring(op, z, rank):
    """Elements that `rank` (sends, receives), by walking round after round with COL-3's indices."""
    n = len(z)
    first = {"all_reduce": [0, 1], "reduce_scatter": [-1], "all_gather": [0]}[op]
    rounds = [(start, k) for start in first for k in range(n - 1)]
    sent = sum(z[(rank + start - k) % n] for start, k in rounds)
    received = sum(z[(rank - 1 + start - k) % n] for start, k in rounds)
    return sent, received


def test_goldens_of_the_ring_all_reduce():
    assert [traffic("all_reduce", 1000, 2, 4, rank) for rank in range(4)] == [(3000, 3000)] * 4
    uneven = [traffic("all_reduce", 10, 1, 4, rank) for rank in range(4)]
    assert uneven == [(15, 14), (16, 15), (15, 16), (14, 15)]


@pytest.mark.parametrize("ranks, exact", [(2, (1, 0.5, 0.5)), (8, (1.75, 0.875, 0.875))])
def test_exact_factors_of_cnt_2(ranks, exact):
    whole = 4 * 64
    found = [traffic(op, 64, 4, ranks, 1)[0] / whole for op in ("all_reduce", "all_gather", "reduce_scatter")]
    assert found == list(exact)
    assert [factor(op, ranks) for op in ("all_reduce", "all_gather", "reduce_scatter")] == list(exact)


def test_the_approximation_of_cnt_2_is_kept_apart_and_reached_by_large_groups():
    for op, limit in {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}.items():
        assert LARGE_GROUP_FACTOR[op] == limit
        assert factor(op, 1) == 0
        assert factor(op, 10**6) == pytest.approx(limit, rel=2e-6)
        assert list(factor(op, np.array([2, 4]))) == [limit / 2, limit * 3 / 4]


def test_counting_needs_no_torch():
    modules = "shoal.transfer, shoal.comm.ledger, shoal.comm.ring, shoal.launch.pool"
    program = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "False"


def test_pieces_of_uneven_length():
    assert pieces(10, 4) == [3, 3, 2, 2]
    assert pieces(2, 5) == [1, 1, 0, 0, 0]
    assert pieces(0, 3) == [0, 0, 0]


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
@given(elements=st.integers(0, 1000), ranks=st.integers(1, 9), width=st.sampled_from([1, 2, 4, 8]))
def test_rings_sum_up_to_the_closed_form(op, elements, ranks, width):
    z = [elements // ranks + (i < elements % ranks) for i in range(ranks)]
    for rank in range(ranks):
        sent, received = simulated_ring(op, z, rank)
        assert traffic(op, elements, width, ranks, rank) == (sent * width, received * width)


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=9))
def test_rings_of_given_sizes(sizes):
    for op in ("reduce_scatter", "all_gather"):
        for rank in range(len(sizes)):
            found = traffic(op, sum(sizes), 1, len(sizes), rank, sizes=sizes)
            assert found == simulated_ring(op, sizes, rank)


@pytest.mark.parametrize("op", OPS)
@given(elements=st.integers(0, 1000), ranks=st.integers(1, 9), data=st.data())
def test_what_is_sent_is_received(op, elements, ranks, data):
    root = data.draw(st.integers(0, ranks - 1))
    rows = [traffic(op, elements, 4, ranks, rank, root) for rank in range(ranks)]
    sent, received = map(sum, zip(*rows, strict=True))
    assert sent == received
    assert all(value >= 0 for row in rows for value in row)
    if op in ("broadcast", "reduce"):
        assert sent == (ranks - 1) * elements * 4  # spec COL-2: whatever the algorithm, without duplicates


@pytest.mark.parametrize("op", [*OPS, "send", "receive", "barrier"])
def test_a_group_of_one_sends_nothing(op):
    assert traffic(op, 17, 4, 1, 0) == (0, 0)


def test_all_to_all_of_uneven_pieces():
    matrix = np.array([[5, 0, 2], [1, 7, 0], [3, 4, 9]])  # elements from row to column
    for rank in range(3):
        found = traffic("all_to_all", 0, 2, 3, rank, sizes=list(matrix[rank]), receive_sizes=list(matrix[:, rank]))
        others = [peer for peer in range(3) if peer != rank]
        assert found == (2 * matrix[rank, others].sum(), 2 * matrix[others, rank].sum())


@pytest.mark.parametrize("op", [*OPS, "send", "receive"])
def test_arrays_give_what_integers_give(op):
    elements, ranks = np.array([[0], [7], [1000]]), np.arange(5)
    sent, received = traffic(op, elements, 2, 5, ranks, root=3)
    for row, count in enumerate((0, 7, 1000)):
        for rank in range(5):
            alone = traffic(op, count, 2, 5, rank, root=3)
            assert alone == (np.broadcast_to(sent, (3, 5))[row, rank], np.broadcast_to(received, (3, 5))[row, rank])


def test_an_unknown_collective_is_a_mistake():
    with pytest.raises(AssertionError, match="all_sum"):
        traffic("all_sum", 1, 1, 2, 0)
