"""What a rank of the pool does: wait for an order, join the group, call the function, answer, wait to be let go."""

import faulthandler
import gc
import os
import signal
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait

from shoal.launch.parcel import pack, unpack
from shoal.spec.errors import RequestError

LOST_PEER = ("onnection closed by peer", "onnection reset by peer", "Broken pipe")  # how gloo puts it


@dataclass(frozen=True)
class Order:
    """One call. store: the file in which the ranks meet; timeout: seconds; parcel: the packed (function, arguments)."""

    rank: int
    world: int
    store: str
    timeout: float
    parcel: bytes


@dataclass(frozen=True)
class Failure:
    """Why a rank has no result. field: that of a RequestError. lost_peer: it failed because another one vanished."""

    said: str
    field: str | None = None
    lost_peer: bool = False


def serve(pipe: Connection, stack: str) -> None:
    """A worker's life: one order after the other until the pipe is closed. stack: the file for where-am-I dumps."""
    gc.freeze()  # what was loaded before is no garbage, so that looking for some is quick
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    with open(stack, "w") as dump:
        faulthandler.register(signal.SIGUSR1, file=dump, all_threads=False)
        while True:
            try:
                order = pipe.recv()
                answer = _carry_out(order)
                pipe.send(answer)
                if isinstance(answer, Failure):
                    threading.Event().wait()  # keep the connections open: peers must not fail before they are killed
                pipe.recv()
            except EOFError:
                return
            _leave_group()


def _carry_out(order: Order) -> bytes | Failure:
    """The packed result of an order, or why there is none."""
    import torch
    import torch.distributed as dist

    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(order.store, order.world),
            rank=order.rank,
            world_size=order.world,
            timeout=timedelta(seconds=order.timeout + 60),  # the parent's own clock comes first
        )
        function, arguments = unpack(order.parcel)
        return pack(function(order.rank, order.world, *arguments), arrays=True)
    except RequestError as error:
        return Failure(str(error), field=error.field)
    except BaseException:
        said = traceback.format_exc().strip()
        last = said.splitlines()[-1]
        return Failure(said, lost_peer=any(words in last for words in LOST_PEER))


def _leave_group() -> None:
    """Ends the order's process group; what still refers to it goes too, since its threads run until then."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def _leave_with_parent() -> None:
    """Ends this process when the one that made the pool is gone, even in the middle of a collective."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
