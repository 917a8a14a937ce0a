"""All ranks' K/V blocks at once on every rank, and their gradients summed back (spec CP-4; as Llama 3 was trained).

Sends what a ring sends, in one call each way, at the price of holding N blocks. Backward gathers them again rather than
keeping them.
"""

import torch
from torch import Tensor

from shoal.axes.context.ring import Collect, Visit
from shoal.comm.collectives import Handle, all_gather, reduce_scatter
from shoal.comm.world import Group


class Gather:
    """The same two operations as a Ring's."""

    def __init__(self, group: Group):
        self.group = group

    def forward(self, k: Tensor, v: Tensor, visit: Visit) -> None:
        """Calls visit(owner, k, v) for each rank's block: the own one while the others are under way."""
        under_way = self._gather(k, v)
        visit(self.group.index, k, v)
        blocks = under_way.wait()
        for owner in self._others():
            visit(owner, blocks[owner, 0], blocks[owner, 1])

    def backward(self, k: Tensor, v: Tensor, collect: Collect, dtype: torch.dtype) -> Tensor:
        """The gradient (2, b, s, g, d) of this rank's block, in `dtype`, summed over all ranks."""
        under_way = self._gather(k, v)
        sums = k.new_zeros((self.group.size, 2, *k.shape), dtype=dtype)
        collect(self.group.index, k, v, sums[self.group.index])
        blocks = under_way.wait()
        for owner in self._others():
            collect(owner, blocks[owner, 0], blocks[owner, 1], sums[owner])
        del under_way, blocks
        return reduce_scatter(sums, self.group)[0]

    def _gather(self, k: Tensor, v: Tensor) -> Handle:
        """Starts filling (N, 2, b, s, g, d) with all ranks' blocks."""
        blocks = k.new_empty((self.group.size, 2, *k.shape))
        mine = blocks[self.group.index : self.group.index + 1]
        torch.stack((k, v), out=mine[0])
        return all_gather(mine, self.group, out=blocks, asynchronous=True)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.group.size) if rank != self.group.index]
