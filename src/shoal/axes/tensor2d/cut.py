"""Which piece of every parameter rank (row, column) of a q x q tensor grid keeps (spec 2D-1). No torch."""

from dataclasses import replace

from shoal.axes.piece import Piece, Share, even, everything
from shoal.axes.tensor.cut import HEAD_NORMS
from shoal.axes.tensor.cut import piece as along_one_dim
from shoal.spec.inventory import Parameter


def piece(parameter: Parameter, side: int, row: int, column: int) -> Piece:
    """What rank (row, column) of a grid of `side` x `side` keeps of a parameter.

    Of a weight (out, in): block number `column` of the outputs and block number `row` of the inputs. One of the two dims
    is cut as in one dimension, units whole, filled up and shared as there; the other is hidden, which `side` divides.
    Vectors over features, and learned positions, are cut by `column`; the rows of the grid each keep them and see other
    samples, so their gradients are partial. Norms over a head are kept whole by all.
    """
    if side == 1 or parameter.name.endswith(HEAD_NORMS):
        return along_one_dim(parameter, side * side, row * side + column, sequence=False)
    if parameter.cut is None:
        return _in_every_row(_also_cut(everything(parameter), -1, side, column))
    if len(parameter.shape) == 1:
        return _in_every_row(along_one_dim(parameter, side, column, sequence=False))
    dim, block = parameter.cut.dim, (column, row)
    return _also_cut(along_one_dim(parameter, side, block[dim], sequence=False), 1 - dim, side, block[1 - dim])


def _also_cut(piece: Piece, dim: int, side: int, index: int) -> Piece:
    """Block number `index` of `side` equal ones of a piece that is whole along `dim`."""
    runs, shape = list(piece.runs), list(piece.shape)
    run, shape[dim] = even(shape[dim], shape[dim], side, index)
    runs[dim] = (run,)
    return replace(piece, runs=tuple(runs), shape=tuple(shape))


def _in_every_row(piece: Piece) -> Piece:
    return replace(piece, shares=(*piece.shares, Share("column", 0, piece.shape[0], partial=True)))
