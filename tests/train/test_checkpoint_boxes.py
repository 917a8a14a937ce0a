"""Boxes: whatever run of a flat piece, they are its elements and each of them once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.axes.piece import Piece, Run, even, everything
from shoal.spec.inventory import Parameter
from shoal.train.checkpoint.boxes import boxes, strides_of


def parameter(shape):
    return Parameter("p", tuple(shape), "unit", True, "normal", 0.1, None)


def elements(piece, start, stop):
    """The whole's elements that boxes of the run name, as the piece's flat places say, in the order of the boxes."""
    whole = np.arange(np.prod(piece.parameter.shape)).reshape(piece.parameter.shape)
    local = np.full(piece.shape, -1)
    piece.take(whole, local)
    flat = local.reshape(-1)
    found = []
    for box in boxes(piece, start, stop):
        there = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        here = np.lib.stride_tricks.as_strided(
            flat[box.at :], box.sizes, [stride * flat.itemsize for stride in strides_of(piece.shape)]
        )
        assert (there == here).all()
        found += there.flatten().tolist()
    return found, [element for element in flat[start:stop].tolist() if element >= 0]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_run_of_a_whole_parameter_is_its_elements_once(shape, data):
    count = int(np.prod(shape))
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    found, expected = elements(everything(parameter(shape)), start, stop)
    assert sorted(found) == expected and len(set(found)) == len(found)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 4), st.sampled_from([0, 1]), st.data())
def test_a_run_of_a_cut_and_padded_piece_is_its_elements_once(rows, columns, ranks, dim, data):
    """Two parts along the cut dim, as gate and up are, each cut evenly and filled up."""
    runs, at = [], 0
    index = data.draw(st.integers(0, ranks - 1))
    for part in range(2):
        run, length = even(rows, rows, ranks, index)
        runs.append(Run(part * rows + run.start, part * rows + run.stop, at))
        at += length
    whole, piece = ((2 * rows, columns), (at, columns)) if dim == 0 else ((columns, 2 * rows), (columns, at))
    uncut = (Run(0, columns, 0),)
    cut = Piece(parameter(whole), piece, (tuple(runs), uncut) if dim == 0 else (uncut, tuple(runs)))
    start = data.draw(st.integers(0, at * columns))
    stop = data.draw(st.integers(start, at * columns))
    found, expected = elements(cut, start, stop)
    assert sorted(found) == sorted(expected) and len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("start", "stop", "count"), [(0, 12, 1), (1, 3, 1), (4, 8, 1), (3, 5, 2), (1, 11, 3), (5, 5, 0)]
)
def test_a_run_of_a_matrix_is_three_boxes_at_most(start, stop, count):
    assert len(list(boxes(everything(parameter((3, 4))), start, stop))) == count
