"""One rank of a large world without the others: collectives that are checked and recorded, and move nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.mesh import Mesh


@contextmanager
def rehearsed(mesh: Mesh, rank: int) -> Iterator[World]:
    """A World of all of the mesh's ranks of which only `rank` runs, on torch's back end for such cases.

    Buffers that other ranks would fill stay as they are, so use tensors that have no values. This process must be in no
    other group. Raises RequestError for a rank outside the mesh.
    """
    mesh.coordinates(rank)
    dist.init_process_group("fake", rank=rank, world_size=mesh.world)
    try:
        world = World(mesh, rank, Ledger(), alone=True)
        yield world
        world.close()
    finally:
        dist.destroy_process_group()
