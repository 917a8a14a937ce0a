"""Several messages to and from peers, under way at once: what rings and pipelines are made of."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.backend import moves, point_to_point
from shoal.comm.ledger import Place
from shoal.comm.whereabouts import Call
from shoal.comm.world import Group


class Exchange:
    """Messages under way. It keeps their tensors alive until `wait`; nobody may touch them before."""

    def __init__(
        self, works: Sequence[dist.Work], calls: Sequence[Call], sends: Sequence[Tensor], receives: Sequence[Tensor]
    ):
        apart = len(works) == len(sends) + len(receives)  # else one work stands for all
        under_way = list(zip(works, calls, strict=apart))
        self._sending = under_way[: len(sends)] if apart else []
        self._receiving = under_way[len(sends) :] if apart else under_way
        self._sends: Sequence[Tensor] = sends
        self._receives: Sequence[Tensor] = receives

    def wait(self) -> list[Tensor]:
        """The filled receive buffers (on CUDA: filled for what the current stream does next). May be called again."""
        _finish(self._sending)
        _finish(self._receiving)
        self._sends = ()
        return list(self._receives)

    def take(self) -> list[Tensor]:
        """The filled receive buffers, which are forgotten here; sends may stay under way, where they can be told apart."""
        _finish(self._receiving)
        taken, self._receives = list(self._receives), ()
        return taken


def _finish(under_way: list[tuple[dist.Work, Call]]) -> None:
    """Waits for each work once: gloo would wait for a second message."""
    while under_way:
        work, call = under_way.pop(0)
        call.wait()
        work.wait()
        call.done()


def exchange(
    sends: Sequence[tuple[Tensor, int]],
    receives: Sequence[tuple[Tensor, int]],
    group: Group,
    places: Sequence[Place] | None = None,
) -> Exchange:
    """Starts all sends (tensor, to) and receives (buffer, from) in one batch and returns at once.

    Peers are places within the group, never this rank itself; in a group of one nothing may be passed. Tensors are
    contiguous. Two ranks that exchange with each other, in whatever batches, match their messages in the order in which
    each posts them. The ledger gets a "send" or "receive" for each message when it starts. places: where in the step
    the messages belong, sends first; by default where the run is.
    """
    for x, peer in (*sends, *receives):
        assert 0 <= peer < group.size and peer != group.index, f"rank {group.index} of {group.size} has no peer {peer}"
        assert not (x.requires_grad and torch.is_grad_enabled()), "autograd would not see this message"
        assert x.is_contiguous() and moves(x), f"{x.dtype} of strides {x.stride()} cannot be sent from {x.device}"
        assert x.device.type == group.device.type, f"the tensor lives on {x.device}, the group uses {group.device}"
    rows = [("send", x.nbytes, 0) for x, _ in sends] + [("receive", 0, x.nbytes) for x, _ in receives]
    places = [group.ledger.place] * len(rows) if places is None else places
    peers = [peer for _, peer in (*sends, *receives)]
    calls = [
        group.calls.begin(op, waits=False, peer=peer, spot=place)
        for (op, *_), peer, place in zip(rows, peers, places, strict=True)
    ]
    works = point_to_point(list(sends), list(receives), group.process_group)
    for row, place in zip(rows, places, strict=True):
        with group.ledger.at(phase=place.phase, layer=place.layer, micro_batch=place.micro_batch):
            group.ledger.record(group.axis, *row)
    return Exchange(works, calls, [x for x, _ in sends], [x for x, _ in receives])
