"""Ring plans against traces written by hand from COL-3, and run on real messages."""

import numpy as np
import pytest
import torch

from shoal.comm.ledger import Ledger
from shoal.comm.ring import all_gather_plan, all_reduce_plan, elements_moved, reduce_scatter_plan
from shoal.comm.ring_run import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from shoal.comm.world import World
from shoal.mesh import Mesh
from shoal.transfer import pieces, traffic

# Piece that ranks 0, 1, 2, 3 send in each round (spec COL-3), worked out on paper
ADD = [[0, 1, 2, 3], [3, 0, 1, 2], [2, 3, 0, 1]]
COPY = [[1, 2, 3, 0], [0, 1, 2, 3], [3, 0, 1, 2]]


def test_trace_of_four_ranks():
    plan = all_reduce_plan(4)
    assert [[move.piece for move in moves] for moves in plan] == ADD + COPY
    assert [{move.action for move in moves} for moves in plan] == [{"add"}] * 3 + [{"copy"}] * 3
    assert all([(move.rank, move.to) for move in moves] == [(0, 1), (1, 2), (2, 3), (3, 0)] for moves in plan)


def test_goldens_of_elements():
    assert elements_moved(all_reduce_plan(4), [250] * 4) == ([1500] * 4, [1500] * 4)
    assert elements_moved(all_reduce_plan(4), [3, 3, 2, 2]) == ([15, 16, 15, 14], [14, 15, 16, 15])


@pytest.mark.parametrize("ranks", (1, 2, 3, 4, 5, 8))
def test_plans_move_what_the_closed_forms_say(ranks):
    sizes = pieces(3 * ranks + 2, ranks)
    for op, plan in (
        ("all_reduce", all_reduce_plan(ranks)),
        ("reduce_scatter", reduce_scatter_plan(ranks)),
        ("all_gather", all_gather_plan(ranks)),
    ):
        assert len(plan) == (ranks - 1) * (2 if op == "all_reduce" else 1)
        sent, received = elements_moved(plan, sizes)
        rows = [traffic(op, sum(sizes), 1, ranks, rank) for rank in range(ranks)]
        assert list(zip(sent, received, strict=True)) == rows


@pytest.mark.parametrize("ranks", (2, 3, 4, 5, 8))
def test_plans_simulated_on_sets(ranks):
    """A piece is the set of ranks whose share is in it: added sets must be disjoint, or a share would count twice."""
    for plan, ends_with in (
        (reduce_scatter_plan(ranks), lambda rank: [rank]),
        (all_reduce_plan(ranks), lambda rank: range(ranks)),
    ):
        held = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
        for moves in plan:
            under_way = [(move, set(held[move.rank][move.piece])) for move in moves]
            for move, shares in under_way:
                if move.action == "add":
                    assert not held[move.to][move.piece] & shares
                    held[move.to][move.piece] |= shares
                else:
                    held[move.to][move.piece] = shares
        for rank in range(ranks):
            assert all(held[rank][piece] == set(range(ranks)) for piece in ends_with(rank))


def run_rings(rank, world, elements):
    """Results, traces and ledger of the three rings on this rank."""
    ledger = Ledger()
    group = World(Mesh({"dp": world}, ("dp",)), rank, ledger).group("dp")
    random = np.random.default_rng(rank)
    x = torch.from_numpy(random.integers(-9, 9, elements)).to(torch.float16)
    sizes = pieces(elements, world)
    reduced = ring_all_reduce(x.clone(), group)
    scattered = ring_reduce_scatter(x.clone(), group, sizes)
    gathered = ring_all_gather(x[: sizes[rank]].clone(), group, sizes)
    return x, reduced, scattered, gathered, ledger.transfers()


@pytest.mark.parametrize("world, elements", [(1, 5), (2, 7), (3, 9), (4, 1000), (4, 10), (5, 3), (8, 61)])
def test_rings_on_real_messages(pool, world, elements):
    ranks = pool.run(run_rings, world, elements)
    truth = sum(answer[0] for answer in ranks)
    sizes = pieces(elements, world)
    starts = np.cumsum([0, *sizes])
    joined = np.concatenate([answer[0][: sizes[rank]] for rank, answer in enumerate(ranks)])
    plans = {
        "all_reduce": all_reduce_plan(world),
        "reduce_scatter": reduce_scatter_plan(world),
        "all_gather": all_gather_plan(world),
    }
    for rank, (_, reduced, scattered, gathered, rows) in enumerate(ranks):
        np.testing.assert_array_equal(reduced[0], truth)
        np.testing.assert_array_equal(scattered[0], truth[starts[rank] : starts[rank + 1]])
        np.testing.assert_array_equal(gathered[0], joined)
        for (op, plan), (_, trace) in zip(plans.items(), (reduced, scattered, gathered), strict=True):
            assert [sent.move for sent in trace] == [moves[rank] for moves in plan]
            bytes_moved = (sum(sent.sent for sent in trace), sum(sent.received for sent in trace))
            assert bytes_moved == traffic(op, elements, 2, world, rank)
            if world > 1:
                assert [(row.sent, row.received) for row in rows if row.op == op] == [bytes_moved]
        if (world, elements) == (4, 1000):
            assert sum(sent.sent for sent in reduced[1]) == 3000
    if world == 1:
        assert ranks[0][-1] == []
