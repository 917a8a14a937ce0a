"""What goes from stage to stage in one step: as messages between ranks, or by hand where both stages are here."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.axes.pipeline.communication import Exchange, Message
from shoal.comm.exchange import Exchange as UnderWay
from shoal.comm.exchange import exchange
from shoal.comm.ledger import Place
from shoal.comm.world import Group

# Exchanges that may be under way at once. With more, more outputs would wait in memory to be fetched; with fewer, a rank
# would stand still sooner where the next one is late. Waiting for old ones is safe: the program would do even one after the other.
UNDER_WAY = 4


class Mail:
    """Outputs and gradients on their way, all of one shape and dtype.

    Buffers live no longer than needed: one for a receive is made when the receive is posted and belongs to whoever
    takes it; a tensor that is sent is kept until it has left. counted: each message goes into the ledger under its own
    phase and micro-batch, else all of them under the place where the run is.
    """

    def __init__(self, group: Group, shape: Sequence[int], dtype: torch.dtype, counted: bool):
        self.group, self.shape, self.dtype, self.counted = group, shape, dtype, counted
        self._leaving: dict[Message, Tensor] = {}
        self._here: dict[Message, Tensor] = {}
        self._coming: dict[Message, tuple[UnderWay, Exchange]] = {}
        self._under_way: deque[UnderWay] = deque()

    def put(self, message: Message, x: Tensor) -> None:
        """Hands x over: to this rank's own chunk at once, to another rank when the program posts it."""
        assert x.shape == self.shape and x.dtype == self.dtype, (
            f"a stage gave {x.dtype} {tuple(x.shape)}, not {self.dtype} {tuple(self.shape)}"
        )
        local = message.sender.rank == message.receiver.rank
        (self._here if local else self._leaving)[message] = x.contiguous()

    def post(self, planned: Exchange) -> None:
        """Starts the sends and receives that the program has here."""
        while len(self._under_way) >= UNDER_WAY:
            self._under_way.popleft().wait()
        sends = [(self._leaving.pop(message), message.receiver.rank) for message in planned.sends]
        buffers = [torch.empty(self.shape, dtype=self.dtype, device=self.group.device) for _ in planned.receives]
        receives = [(buffer, message.sender.rank) for buffer, message in zip(buffers, planned.receives, strict=True)]
        messages = (*planned.sends, *planned.receives)
        places = [Place(message.phase, None, message.micro_batch) for message in messages] if self.counted else None
        started = exchange(sends, receives, self.group, places)
        self._under_way.append(started)
        self._coming |= dict.fromkeys(planned.receives, (started, planned))

    def take(self, message: Message) -> Tensor:
        """What the message brings; waits for it, and for what comes along with it."""
        if message not in self._here:
            started, planned = self._coming[message]
            self._here |= zip(planned.receives, started.take(), strict=True)
            for arrived in planned.receives:
                del self._coming[arrived]
        return self._here.pop(message)

    def finish(self) -> None:
        """Returns when everything has left."""
        assert not (self._leaving or self._here or self._coming), "something was made and never used"
        while self._under_way:
            self._under_way.popleft().wait()
