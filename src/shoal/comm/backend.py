"""The one place that knows how torch.distributed's back ends differ: which serves a device, and what it does well.

Everything else in comm uses calls that gloo and NCCL share. NCCL's are ordered on CUDA streams: a call returns when the
work is queued, and waiting for it makes the current stream wait, not the host.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.gloo import gloo

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

GLOO_DTYPES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
}


def backend_of(device: torch.device) -> str:
    """The back end that moves tensors of `device`."""
    return "nccl" if device.type == "cuda" else gloo()


def moves(x: Tensor) -> bool:
    """Whether the back end of x's device can move its dtype; gloo knows no int16 and no float8."""
    return backend_of(x.device) == "nccl" or x.dtype in GLOO_DTYPES


def reduces_and_scatters(device: torch.device) -> bool:
    """Whether the back end's own equal-sized reduce-scatter is worth calling.

    gloo's is not: an all-to-all, which puts the same bytes on the wire, and a sum of what arrives take 2/5 of its time.
    """
    return backend_of(device) == "nccl"


def point_to_point(
    sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], process_group: Any
) -> list[dist.Work]:
    """Starts all sends (tensor, to) and receives (buffer, from) as one batch; peers are numbers within the group.

    One batch, since NCCL serves a stream's messages in order: two ranks that both send first would wait for each other.
    """
    operations = [dist.P2POp(dist.isend, x, group=process_group, group_peer=peer) for x, peer in sends]
    operations += [dist.P2POp(dist.irecv, x, group=process_group, group_peer=peer) for x, peer in receives]
    return dist.batch_isend_irecv(operations) if operations else []
