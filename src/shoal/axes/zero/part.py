"""One part of a sharded model: its flat buffers, and which of them are alive.

weights   stages 1 and 2: whole, always; this rank's piece is a view. Stage 3: the piece, and the whole while gathered.
gradients stage 1: whole, always; the piece is a view. Stages 2 and 3: the piece, and the whole while backward fills it.

Parameters are views into the whole weights for good: stage 3 frees and refills the storage under them, so that what
autograd saved for backward is valid again as soon as the part is gathered.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from shoal.axes.flat import Flat
from shoal.axes.memory import Memory
from shoal.axes.zero.cost import padded
from shoal.comm.collectives import Handle, all_gather, all_reduce, reduce_scatter
from shoal.comm.world import Group


class Part:
    """Parameters of one dtype that move together over `group`; all trainable, or all frozen.

    name: of the run they come from. decays: names of those with weight decay. gradient_dtype: of gradients on the wire
    and in the shard, by default that of the parameters.
    """

    def __init__(
        self,
        name: str,
        named: Sequence[tuple[str, nn.Parameter]],
        decays: set[str],
        group: Group,
        stage: int,
        memory: Memory,
        gradient_dtype: torch.dtype | None = None,
    ):
        self.name, self.group, self.stage, self.memory = name, group, stage, memory
        self.flat = Flat.of(named, decays)
        self.slots = self.flat.slots
        first = self.slots[0].parameter
        self.trainable, device = first.requires_grad, first.device
        self.gradient_dtype = gradient_dtype or first.dtype
        self.whole = torch.zeros(padded(self.flat.elements, group.size), dtype=first.dtype, device=device)
        self.piece = len(self.whole) // group.size
        self.mine = slice(group.index * self.piece, (group.index + 1) * self.piece)
        self.flat.move_into(self.whole)
        self._gathering: Handle | None = None
        self.gathered = True
        if stage == 3:
            self.weights = self.whole[self.mine].clone()
            memory.take("weights", self._bytes(self.weights))
            memory.take("gathered", self._bytes(self.whole))
            self.free()
        else:
            self.weights = self.whole[self.mine]
            memory.take("weights", self._bytes(self.whole))
        self.whole_gradient: Tensor | None = None
        self.arrived: set[int] = set()  # places of the slots whose gradient came in this micro-batch
        self.written: set[int] = set()  # of those that the whole gradient holds something of
        self.left = False  # whether a whole gradient has left in this step
        self.summed = False  # whether the shard holds something of this step
        if self.trainable:
            kept = len(self.whole) if stage == 1 else self.piece
            held = torch.zeros(kept, dtype=self.gradient_dtype, device=device)
            memory.take("gradients", self._bytes(held))
            if stage == 1:
                self.whole_gradient, self.gradients = held, held[self.mine]
            else:
                self.gradients = held

    # ---- weights

    def gather(self) -> None:
        """Starts putting the whole weights together, unless they are or it has begun."""
        if self.gathered or self._gathering is not None:
            return
        self.whole.untyped_storage().resize_(self._bytes(self.whole))
        self.memory.take("gathered", self._bytes(self.whole))
        self._gathering = all_gather(self.weights, self.group, out=self.whole, asynchronous=True)

    def wait(self) -> None:
        """Returns when the whole weights are there, whether or not `gather` was called before."""
        self.gather()
        if self._gathering is not None:
            self._gathering.wait()
            self.gathered, self._gathering = True, None

    def free(self) -> None:
        """Gives the whole weights back, in stage 3; what is gathered must not be in use."""
        if self.stage == 3 and (self.gathered or self._gathering is not None):
            if self._gathering is not None:
                self._gathering.wait()
            self.whole.untyped_storage().resize_(0)
            self.memory.release("gathered", self._bytes(self.whole))
            self.gathered, self._gathering = False, None

    def spread(self) -> Handle:
        """Starts handing this rank's updated piece to the others, in stages 1 and 2."""
        return all_gather(self.weights, self.group, out=self.whole, asynchronous=True)

    # ---- gradients

    def begin_step(self) -> None:
        """Nothing of the gradients is of this step yet."""
        self.left = self.summed = False
        self.written = set()

    def absorb(self, place: int) -> bool:
        """Takes the gradient that autograd left on a parameter; whether all of the part's have now arrived."""
        self.slots[place].take_gradient(self._open(), fresh=place not in self.written)
        self.written.add(place)
        self.arrived.add(place)
        return len(self.arrived) == len(self.slots)

    def fill(self) -> None:
        """Puts zeros into the whole gradient where nothing arrived, and into the padding."""
        whole = self._open()
        self.flat.zero_missing(whole, self.written)
        whole[self.flat.elements :].zero_()

    def _open(self) -> Tensor:
        """The whole gradient's buffer; in stages 2 and 3 it is made for one backward."""
        if self.whole_gradient is None:
            self.whole_gradient = torch.empty(len(self.whole), dtype=self.gradient_dtype, device=self.whole.device)
            self.memory.take("buckets", self._bytes(self.whole_gradient))
        return self.whole_gradient

    def reduce(self, literal: bool) -> Handle:
        """Starts summing the whole gradient over the ranks; `take_in` the handle when it has to be there.

        literal: all ranks get the whole sum, else each its piece.
        """
        whole = self.whole_gradient
        assert whole is not None
        if literal:
            return all_reduce(whole, self.group, asynchronous=True)
        out = self.gradients if self.stage == 1 else None
        return reduce_scatter(whole, self.group, out=out, asynchronous=True)

    def take_in(self, handle: Handle) -> None:
        """Waits for the sum; in stages 2 and 3 puts it into the shard, or adds it to what is there of this step."""
        total = handle.wait()
        if self.stage == 1:
            return
        if self.summed:
            self.gradients.add_(total)
        else:
            self.gradients.copy_(total)
        self.summed = True
        assert self.whole_gradient is not None
        self.memory.release("buckets", self._bytes(self.whole_gradient))
        self.whole_gradient, self.written = None, set()

    # ---- for the optimizer and for a look

    def runs(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """(weights, gradients, decays) of this rank's piece, cut where weight decay ends."""
        for run, decays in self.flat.runs(self.mine.start, self.mine.stop):
            yield self.weights[run], self.gradients[run], decays

    @staticmethod
    def _bytes(tensor: Tensor) -> int:
        return tensor.numel() * tensor.element_size()
