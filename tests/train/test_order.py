"""The global order of samples: a permutation per epoch, the same for every layout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.train.data.order import permute, sample_index
from shoal.train.data.share import share


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**62), epoch=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_each_epoch_is_a_permutation(n, seed, epoch):
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


def test_a_place_far_out_needs_no_table():
    n = 10**15
    images = permute(np.array([0, 1, n - 1]), n, 0, 0)
    assert len(set(images)) == 3 and (images < n).all() and (images >= 0).all()


def test_the_order_looks_shuffled_and_differs_between_epochs_and_seeds():
    orders = [permute(np.arange(1000), 1000, *key) for key in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1
        assert (np.diff(order) == 1).mean() < 0.02
    assert all((a == b).mean() < 0.02 for a, b in ((orders[0], orders[1]), (orders[0], orders[2])))


def test_every_sample_comes_once_per_epoch_also_when_batches_straddle_epochs():
    n, batch = 10, 4
    run = np.concatenate([sample_index(step, batch, 7, n) for step in range(10)])
    for epoch in range(4):
        assert sorted(run[epoch * n : (epoch + 1) * n]) == list(range(n))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_shares_of_all_ranks_are_the_batch_in_global_order(ranks, micro_batches):
    parts = [share(16, micro_batches, ranks, rank) for rank in range(ranks)]
    in_order = [np.arange(16)[parts[rank][number]] for number in range(micro_batches) for rank in range(ranks)]
    assert np.array_equal(np.concatenate(in_order), np.arange(16))
