"""K/V blocks travelling around a ring, and their gradients back to the owners (spec CP-3, CP-4; Liu et al. 2023).

A block is a rank's k and v in one buffer (2, b, s, g, d). After j transfers rank i holds the block of rank i - j. Each
transfer is under way while the block before is computed, so a rank never has more than two of the blocks that travel.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.comm.exchange import Exchange, exchange
from shoal.comm.world import Group

Visit = Callable[[int, Tensor, Tensor], None]
Collect = Callable[[int, Tensor, Tensor, Tensor], None]


class Ring:
    """A ring of `steps` steps, N or fewer when the rest would find nothing to compute on any rank."""

    def __init__(self, group: Group, steps: int):
        assert 1 <= steps <= group.size
        self.group, self.steps = group, steps

    def forward(self, k: Tensor, v: Tensor, visit: Visit) -> None:
        """Calls visit(owner, k, v) for each block in turn, this rank's own first: steps - 1 transfers."""
        if self.steps == 1:
            visit(self.group.index, k, v)
            return
        block = torch.stack((k, v))
        for step in range(self.steps - 1):
            under_way = self._pass_on(block)
            visit(self._owner(step), block[0], block[1])
            (block,) = under_way.wait()
        visit(self._owner(self.steps - 1), block[0], block[1])

    def backward(self, k: Tensor, v: Tensor, collect: Collect, dtype: torch.dtype) -> Tensor:
        """The gradient (2, b, s, g, d) of this rank's block, in `dtype`, summed over all ranks.

        collect(owner, k, v, into) adds this rank's part of a block's gradient to the zeros in `into`. Each sum travels
        one rank behind its block, from the first rank after the owner to the last one that the block visits, and from
        there home, where the owner adds its own part: as many transfers as K/V make, and none of zeros.
        """
        own = k.new_zeros((2, *k.shape), dtype=dtype)
        if self.steps == 1:
            collect(self.group.index, k, v, own)
            return own
        block = torch.stack((k, v))
        under_way = self._pass_on(block)
        collect(self.group.index, block[0], block[1], own)
        sums = exchange([], [], self.group)  # that arrive for the present block, and leave for the one before it
        for step in range(1, self.steps):
            (block,) = under_way.wait()
            last = step == self.steps - 1
            if not last:
                under_way = self._pass_on(block)
            part = torch.zeros_like(block, dtype=dtype)
            collect(self._owner(step), block[0], block[1], part)
            if step > 1:
                part += sums.wait()[0]
            onward, behind = (-step, step) if last else (1, -1)
            sums = exchange([(part, self._peer(onward))], [(torch.empty_like(part), self._peer(behind))], self.group)
        return own.add_(sums.wait()[0])

    def _owner(self, step: int) -> int:
        return self._peer(-step)

    def _peer(self, distance: int) -> int:
        return (self.group.index + distance) % self.group.size

    def _pass_on(self, block: Tensor) -> Exchange:
        return exchange([(block, self._peer(1))], [(torch.empty_like(block), self._peer(-1))], self.group)
