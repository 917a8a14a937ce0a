"""Which piece of every parameter a rank of one-dimensional tensor parallelism keeps (spec TP-1, TP-5, TP-7). No torch."""

from shoal.axes.piece import Piece, Run, Share, even, everything
from shoal.spec.inventory import Parameter, Part

HEAD_NORMS = ("q_norm.weight", "k_norm.weight")


def piece(parameter: Parameter, ranks: int, index: int, sequence: bool) -> Piece:
    """What rank `index` of `ranks` keeps of a parameter.

    Heads, MLP columns and token ids are cut as the inventory says, filled up with zeros where they do not divide; fewer
    KV heads than ranks are each kept by ranks / heads of them. Everything else is kept whole by all. Norms over a head
    see only this rank's heads, so their gradients are partial, and so are those of all that works on a part of the
    tokens when the `sequence` is cut.
    """
    if ranks == 1:
        return everything(parameter)
    if parameter.cut is None:
        partial = sequence or parameter.name.endswith(HEAD_NORMS)
        return everything(parameter, [Share("tp", 0, parameter.shape[0], partial)])
    dim, shape = parameter.cut.dim, list(parameter.shape)
    runs: list[tuple[Run, ...]] = [(Run(0, size, 0),) for size in shape]
    along: list[Run] = []
    shares: list[Share] = []
    first = length = 0  # of the part in the whole, of the piece so far
    for part in parameter.cut.parts:
        run, rows = _of_part(part, ranks, index)
        along.append(Run(first + run.start, first + run.stop, length))
        if copies(part, ranks) > 1:
            shares.append(Share("kv", length, length + rows, partial=True))
        first += part.rows
        length += rows
    runs[dim], shape[dim] = tuple(along), length
    return Piece(parameter, tuple(shape), tuple(runs), tuple(shares))


def copies(part: Part, ranks: int) -> int:
    """How many ranks keep each unit of a part: more than one where KV heads are fewer than ranks."""
    return ranks // part.units if part.shared and part.units < ranks else 1


def _of_part(part: Part, ranks: int, index: int) -> tuple[Run, int]:
    if copies(part, ranks) == 1:
        return even(part.rows, part.units, ranks, index)
    size = part.rows // part.units
    unit = index // copies(part, ranks)
    return Run(unit * size, (unit + 1) * size, 0), size
