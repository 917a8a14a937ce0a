"""A run of a rank's flat storage as boxes of the whole parameter: what a checkpoint stores and asks for. No torch.

ZeRO cuts flat buffers anywhere, the tensor axis cuts rows or columns. In the coordinates of the whole parameter either is
a few boxes, so what one layout wrote any other can ask for.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from shoal.axes.piece import Piece


class Box(NamedTuple):
    """Elements [offset, offset + size) along each dim of the whole parameter; at: the first one's place in the flat piece.

    In the flat piece its rows lie as far apart as the piece's own.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int


def boxes(piece: Piece, start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) of the flattened piece, without its padding, each in one box."""
    strides = strides_of(piece.shape)
    for ranges in _ranges(piece.shape, start, stop):
        for runs in product(*piece.runs):
            lows = [max(low, run.at) for (low, _), run in zip(ranges, runs, strict=True)]
            highs = [min(high, run.at + run.stop - run.start) for (_, high), run in zip(ranges, runs, strict=True)]
            sizes = tuple(high - low for low, high in zip(lows, highs, strict=True))
            if min(sizes) > 0:
                offsets = tuple(run.start + low - run.at for run, low in zip(runs, lows, strict=True))
                yield Box(offsets, sizes, sum(low * stride for low, stride in zip(lows, strides, strict=True)))


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index to the next along each dim, row-major."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _ranges(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Flat elements [start, stop) of an array as boxes of (low, high) by dim: a part of a row, whole rows, a part of a row."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield ((start, stop),)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # it begins and ends within one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row if start < first * row else 0)
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[tuple[tuple[int, int], ...]]:
    for inner in _ranges(shape[1:], start, stop):
        yield ((row, row + 1), *inner)
