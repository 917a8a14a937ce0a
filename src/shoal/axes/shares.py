"""What several ranks keep of one parameter: partial gradients are summed over them, and a norm counts everything once."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from shoal.axes.flat import Held
from shoal.axes.piece import Piece, counted_runs, shared_runs
from shoal.comm.collectives import all_reduce
from shoal.comm.world import Group

ROW = 1024


class Shares:
    """The shared parts of this rank's gradients, in the buffers where they lie.

    held: the buffers; pieces: what this rank keeps of each parameter; group: gives the group of an axis. different: groups
    whose ranks hold other elements in these buffers, or others of what they share.
    """

    def __init__(
        self,
        held: Iterable[Held],
        pieces: Sequence[Piece],
        group: Callable[[str], Group],
        different: Sequence[Group] = (),
    ):
        self.different = different
        held, named = list(held), {piece.parameter.name: piece for piece in pieces}
        axes = list(dict.fromkeys(share.axis for piece in pieces for share in piece.shares))
        groups = {axis: group(axis) for axis in axes}
        elsewhere = {axis for axis in axes if groups[axis].index > 0}
        self._partial = [
            (groups[axis], [buffer[slice(*run)] for buffer, spans in held for run in shared_runs(spans, named, axis)])
            for axis in axes
        ]
        self._counted = [buffer[slice(*run)] for buffer, spans in held for run in counted_runs(spans, named, elsewhere)]

    def sum(self) -> None:
        """Completes the gradients that each rank of an axis has only a part of: one all-reduce for each axis."""
        for group, views in self._partial:
            if views and group.size > 1:
                total = all_reduce(torch.cat(views), group)
                torch._foreach_copy_(views, list(total.split([len(view) for view in views])))

    def squares(self, device: torch.device) -> Tensor:
        """Sum of the squares of the gradients in these buffers, over the ranks that hold different ones, each element
        counted once: float64 (1,). Squares are formed in float32 at least.
        """
        squares = self._own_squares(device)
        for group in self.different:
            squares = all_reduce(squares, group)
        return squares

    def _own_squares(self, device: torch.device) -> Tensor:
        """Of the gradients that this rank counts."""
        if not self._counted:
            return torch.zeros(1, dtype=torch.float64, device=device)
        return torch.stack([_squares(run) for run in self._counted]).sum().reshape(1)


def _squares(run: Tensor) -> Tensor:
    """The sum of the squares of a run (n,), a float64 scalar.

    In float32 a thousand elements at a time: torch adds up one after the other on CPUs, where 30 million in float32 come out
    3e-3 off, and float64 takes thirty times as long.
    """
    accurate = torch.promote_types(run.dtype, torch.float32)
    rows = len(run) // ROW
    norms = torch.linalg.vector_norm(run[: rows * ROW].view(rows, ROW), dim=1, dtype=accurate)
    rest = torch.linalg.vector_norm(run[rows * ROW :], dtype=accurate)
    return norms.double().square().sum() + rest.double().square()
