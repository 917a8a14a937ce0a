"""The global order of samples: a permutation per epoch that any rank computes for any place, in constant memory.

A Feistel network permutes a power of four; walking its cycle until the number falls below n permutes [0, n) (Black and
Rogaway 2002). The order depends on the seed and global numbers only, never on the layout.
"""

import numpy as np

ROUNDS = 6
_FIRST = np.uint64(0xBF58476D1CE4E5B9)  # SplitMix64's multipliers (Steele et al. 2014)
_SECOND = np.uint64(0x94D049BB133111EB)


def permute(numbers: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where the permutation of [0, n) keyed by (seed, epoch) sends `numbers`, all in [0, n); int64."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = np.random.default_rng((seed, epoch)).integers(0, 2**63, ROUNDS, dtype=np.uint64)
    images = numbers.astype(np.uint64)
    walking = np.ones(images.shape, dtype=bool)
    while walking.any():  # fewer than four rounds on average, as the network's domain is below 4 n
        images[walking] = _feistel(images[walking], half, keys)
        walking = images >= n
    return images.astype(np.int64)


def sample_index(step: int, batch: int, seed: int, n: int) -> np.ndarray:
    """Which of a data set's n samples the `batch` samples of a step are, in global order: int64 (batch,).

    Samples are counted over the whole run; every n of them are one epoch, with an order of its own.
    """
    numbers = step * batch + np.arange(batch, dtype=np.int64)
    epochs, places = np.divmod(numbers, n)
    index = np.empty(batch, dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        index[here] = permute(places[here], n, seed, int(epoch))
    return index


def _feistel(numbers: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    """A bijection of [0, 4^half)."""
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = numbers >> bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << bits) | right


def _mixed(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    return bits ^ (bits >> np.uint64(31))
