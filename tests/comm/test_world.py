"""Groups of a mesh: who is in them, which process group they share, and that they talk to nobody else."""

import torch
import torch.distributed as dist

from shoal.comm.backend import backend_of
from shoal.comm.collectives import all_reduce
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.mesh import Mesh

SIZES, ORDER = {"tp": 2, "cp": 1, "dp": 3}, ("tp", "cp", "dp")


def look_around(rank, world):
    """What a rank of tp=2, dp=3 sees of its groups."""
    ledger = Ledger()
    here = World(Mesh(SIZES, ORDER), rank, ledger)
    names = ("tp", "dp", "cp", ("dp", "cp"), ("tp", "dp"))
    groups = [here.group(name) for name in names]
    sums = [float(all_reduce(torch.tensor([10.0**rank]), group)) for group in groups]
    tp, dp, cp, both, everyone = (group.process_group for group in groups)
    shared = (dp is both, cp is None, everyone is dist.group.WORLD, tp is dp, here.group("tp").process_group is tp)
    here.close()
    alive = float(all_reduce(torch.ones(1), World(Mesh(SIZES, ORDER), rank, ledger).group(("tp", "dp"))))
    return [(group.axis, group.ranks, group.index, group.size) for group in groups], sums, shared, alive


def test_groups_of_a_mesh(pool):
    for rank, (groups, sums, shared, alive) in enumerate(pool.run(look_around, 6)):
        tp = tuple(other for other in range(6) if other // 2 == rank // 2)
        dp = tuple(other for other in range(6) if other % 2 == rank % 2)
        assert groups == [
            ("tp", tp, rank % 2, 2),
            ("dp", dp, rank // 2, 3),
            ("cp", (rank,), 0, 1),
            ("dp+cp", dp, rank // 2, 3),
            ("tp+dp", tuple(range(6)), rank, 6),
        ]
        assert sums == [sum(10.0**other for other in ranks) for _, ranks, _, _ in groups]
        assert shared == (True, True, True, False, True)
        assert alive == 6.0


def test_the_world_of_one_process_needs_no_torch_distributed():
    world = World.single()
    assert not dist.is_initialized()
    assert (world.size, world.rank, world.device) == (1, 0, torch.device("cpu"))
    group = world.group(("dp", "cp"))
    assert (group.axis, group.ranks, group.index, group.process_group) == ("dp+cp", (0,), 0, None)
    world.close()


def test_back_ends_by_device():
    assert backend_of(torch.device("cpu")) == "gloo"
    assert backend_of(torch.device("cuda", 1)) == "nccl"
