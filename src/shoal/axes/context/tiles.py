"""What of a K/V block a rank's queries see, cut into tiles that fast kernels can compute. No torch.

Since places ascend, the keys of a block that a query sees are a run of it: everything up to its place, within its
window, within its document. Over consecutive queries that run mostly stays (a rectangle) or grows by a key per query (a
triangle below a diagonal), and kernels compute both without a mask. Only what is left needs one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from shoal.axes.context.order import ranges

LEAST = 128  # queries: narrower tiles that lie side by side are computed together, with a mask
MOST = 512  # queries of a tile with a mask, which bounds the mask's memory


@dataclass(frozen=True)
class Tile:
    """A part of (samples, queries, keys). seen: "all" of its pairs, those on and below the diagonal of a square
    ("causal"), or "some": query i of the tile sees its keys low[i] up to, not including, high[i]; where documents are
    given, as (samples, queries) and (samples, keys), of these only its own document's.
    """

    samples: slice
    queries: slice
    keys: slice
    seen: Literal["all", "causal", "some"]
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    documents: tuple[np.ndarray, np.ndarray] | None = None


class Sight:
    """Which keys a query sees, by their places in the whole sequence.

    causal: none after its own place. window: none `window` or more places away. documents: int (b, S), only those with
    its own number; packed documents lie one after the other, but scattered ones are obeyed too.
    """

    def __init__(
        self, sequence: int, causal: bool = True, window: int | None = None, documents: np.ndarray | None = None
    ):
        assert window is None or window > 0, "a token sees itself at least"
        assert documents is None or documents.shape[1] == sequence, "documents are those of the whole sequence"
        self.sequence, self.causal, self.documents = sequence, causal, documents
        self.window = None if window is not None and window >= sequence else window
        if documents is not None:
            self._first, self._last, self._packed = _extents(documents)

    def tiles(self, queries: np.ndarray, keys: np.ndarray) -> list[Tile]:
        """Tiles that hold every visible pair of these ascending places once; none where nothing is visible."""
        low, high = ranges(queries, keys, self.causal, self.window)
        if self.documents is None:
            return list(_tiles(low, high, slice(None)))
        lows = np.maximum(low, np.searchsorted(keys, self._first[:, queries], "left"))
        highs = np.minimum(high, np.searchsorted(keys, self._last[:, queries], "right"))
        if not self._packed:
            numbers = self.documents[:, queries], self.documents[:, keys]
            return list(_compared(lows.min(0), highs.max(0), numbers))
        if (lows == lows[0]).all() and (highs == highs[0]).all():
            return list(_tiles(lows[0], highs[0], slice(None)))
        return [
            tile
            for sample, (low, high) in enumerate(zip(lows, highs, strict=True))
            for tile in _tiles(low, high, slice(sample, sample + 1))
        ]


def _extents(documents: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
    """(first, last, packed): (b, S) the first and last place of each token's document; whether documents are runs."""
    first, last, packed = np.empty(documents.shape, np.int64), np.empty(documents.shape, np.int64), True
    for sample, row in enumerate(documents):
        _, starts, which, counts = np.unique(row, return_index=True, return_inverse=True, return_counts=True)
        ends = np.zeros_like(starts)
        np.maximum.at(ends, which, np.arange(len(row)))
        first[sample], last[sample] = starts[which], ends[which]
        packed = packed and bool((ends - starts + 1 == counts).all())
    return first, last, packed


def _tiles(low: np.ndarray, high: np.ndarray, samples: slice) -> Iterator[Tile]:
    """Tiles of rows that see the keys low to high."""
    narrow: list[tuple[slice, str]] = []  # groups side by side that are not worth a tile of their own
    for rows, shape in _groups(low, high):
        wide = shape != "other" and rows.stop - rows.start >= LEAST
        if narrow and (wide or narrow[-1][0].stop != rows.start):
            yield from _together(low, high, narrow, samples)
            narrow = []
        if wide:
            yield from _exact(low, high, rows, shape, samples)
        else:
            narrow.append((rows, shape))
    if narrow:
        yield from _together(low, high, narrow, samples)


def _groups(low: np.ndarray, high: np.ndarray) -> Iterator[tuple[slice, str]]:
    """Longest runs of rows that see something whose range stays ("all"), grows by a key a row ("causal"), or neither."""
    seeing = high > low
    shape = np.where(np.diff(low) == 0, np.where(np.diff(high) == 0, 1, np.where(np.diff(high) == 1, 2, 0)), 0)
    shape = np.where(seeing[:-1] & seeing[1:], shape, -1)  # of the step from each row to the next; -1 at an end
    names = {-1: "all", 0: "other", 1: "all", 2: "causal"}
    changes = np.flatnonzero(np.diff(shape)) + 1  # steps that differ from the one before
    start = 0
    while start < len(low):
        if not seeing[start]:
            start += 1
            continue
        here = shape[start] if start < len(shape) else -1
        stop = start + 1
        if here != -1:
            after = changes[np.searchsorted(changes, start, "right") :]
            stop = int(after[0]) + 1 if len(after) else len(low)
        yield slice(start, stop), names[int(here)]
        start = stop


def _exact(low: np.ndarray, high: np.ndarray, rows: slice, shape: str, samples: slice) -> Iterator[Tile]:
    """A rectangle; or the rectangle of keys that all rows see, and the triangle beside it."""
    first, last = int(low[rows.start]), int(high[rows.start])
    corner = last if shape == "all" else last - 1
    if corner > first:
        yield Tile(samples, rows, slice(first, corner), "all")
    if shape == "causal":
        yield Tile(samples, rows, slice(corner, corner + rows.stop - rows.start), "causal")


def _together(low: np.ndarray, high: np.ndarray, groups: list[tuple[slice, str]], samples: slice) -> Iterator[Tile]:
    """One group as it is; several, or one of no simple shape, in bands with a mask, as high as its rows are wide."""
    rows, shape = slice(groups[0][0].start, groups[-1][0].stop), groups[0][1]
    if len(groups) == 1 and shape != "other":
        yield from _exact(low, high, rows, shape, samples)
        return
    band = min(max(int((high[rows] - low[rows]).max()), LEAST), MOST)
    for start in range(rows.start, rows.stop, band):
        yield _masked(low, high, slice(start, min(start + band, rows.stop)), samples)


def _masked(low: np.ndarray, high: np.ndarray, rows: slice, samples: slice) -> Tile:
    first, last = int(low[rows].min()), int(high[rows].max())
    return Tile(samples, rows, slice(first, last), "some", low[rows] - first, high[rows] - first)


def _compared(low: np.ndarray, high: np.ndarray, documents: tuple[np.ndarray, np.ndarray]) -> Iterator[Tile]:
    """Tiles where documents are scattered, so that the numbers of each pair must be compared."""
    for start in range(0, len(low), MOST):
        rows = slice(start, min(start + MOST, len(low)))
        if (high[rows] > low[rows]).any():
            tile = _masked(low, high, rows, slice(None))
            yield replace(tile, documents=(documents[0][:, tile.queries], documents[1][:, tile.keys]))
