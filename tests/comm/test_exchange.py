"""Batched messages between peers: what arrives, in which order, what the ledger says, and what is refused."""

import numpy as np
import pytest
import torch

from shoal.comm.exchange import exchange
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.mesh import Mesh
from shoal.transfer import Transfer


def group_of(rank, world, trace=False):
    return World(Mesh({"pp": world}, ("pp",)), rank, Ledger(trace=trace)).group("pp")


def around(rank, world):
    """Every rank sends its number to the next and its square to the one before; two of each, so that order shows."""
    group = group_of(rank, world)
    after, before = (rank + 1) % world, (rank - 1) % world
    up = [torch.full((3,), float(10 * rank + i), dtype=torch.float64) for i in range(2)]
    down = torch.full((2, 2), rank**2, dtype=torch.int64)
    first = exchange([(up[0], after)], [(torch.empty(3, dtype=torch.float64), before)], group)
    second = exchange(
        [(up[1], after), (down, before)],
        [(torch.empty(3, dtype=torch.float64), before), (torch.empty(2, 2, dtype=torch.int64), after)],
        group,
    )
    late = second.wait()  # in another order than posted
    early = first.wait()
    assert first.wait()[0] is early[0], "waiting twice gives the same buffers"
    return early[0], late[0], late[1], group.ledger.transfers()


@pytest.mark.parametrize("world", [2, 3, 5])
def test_messages_arrive_in_the_order_posted(pool, world):
    for rank, (early, late, square, transfers) in enumerate(pool.run(around, world)):
        before, after = (rank - 1) % world, (rank + 1) % world
        np.testing.assert_array_equal(early, [10.0 * before] * 3)
        np.testing.assert_array_equal(late, [10.0 * before + 1] * 3)
        np.testing.assert_array_equal(square, np.full((2, 2), after**2))
        sent = 24 + 24 + 32  # two messages of three float64, one of four int64
        assert transfers == [
            Transfer("setup", "pp", "send", sent, 0, 3),
            Transfer("setup", "pp", "receive", 0, sent, 3),
        ]


def chain(rank, world):
    """Ends of a chain only send or only receive."""
    group = group_of(rank, world)
    x = torch.arange(4.0)
    sends = [(x * (rank + 1), rank + 1)] if rank + 1 < world else []
    receives = [(torch.empty(4), rank - 1)] if rank else []
    arrived = exchange(sends, receives, group).wait()
    return arrived, [(t.op, t.sent, t.received) for t in group.ledger.transfers()]


def test_one_sided_exchanges(pool):
    first, middle, last = pool.run(chain, 3)
    assert first == ([], [("send", 16, 0)])
    np.testing.assert_array_equal(middle[0][0], [0, 1, 2, 3])
    np.testing.assert_array_equal(last[0][0], [0, 2, 4, 6])
    assert middle[1] == [("send", 16, 0), ("receive", 0, 16)] and last[1] == [("receive", 0, 16)]


def test_a_group_of_one_exchanges_nothing():
    group = World.single().group("pp")
    assert exchange([], [], group).wait() == []
    with pytest.raises(AssertionError, match="no peer 0"):
        exchange([(torch.zeros(1), 0)], [], group)
    assert group.ledger.transfers() == []


def refusals(rank, world):
    group = group_of(rank, world)
    said = []
    for bad in (torch.zeros(2, 2).t(), torch.zeros(2, dtype=torch.int16), torch.zeros(2, requires_grad=True)):
        try:
            exchange([(bad, 1 - rank)], [], group)
        except AssertionError as error:
            said.append(str(error))
    return said, group.ledger.transfers()


def test_what_cannot_be_sent_is_refused_before_anything_leaves(pool):
    for said, transfers in pool.run(refusals, 2):
        assert len(said) == 3 and "autograd" in said[2] and transfers == []
