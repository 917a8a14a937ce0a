"""Integers that are known among tensors without values are those that the same operators give with values."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.axes.expert.grouped import Entries
from shoal.comm import collectives
from shoal.comm.rehearsal import rehearsed
from shoal.mesh import Mesh
from shoal.verify.known import evenly, resized
from shoal.verify.rehearsal import WithoutValues


def tables(experts):
    """What is made of a routing: views, writing in place, results as long as values say."""
    flat = experts.flatten()
    kept = torch.nonzero(flat != 3).squeeze(1)
    entries = Entries.of(kept // experts.shape[1], flat[kept], len(experts), 8)
    counts = entries.counts.view(2, 4)
    again = torch.arange(2).repeat_interleave(counts.sum(1))
    several, places = torch.unique(again * 100 + entries.picks.rows, return_inverse=True)
    both = torch.zeros(2, 8, dtype=torch.int64)
    both[0] = entries.counts
    both[1].scatter_(0, several[:1] % 8, 7)
    return [*entries.picks, entries.order, counts, several, places, both]


def test_tables_of_a_routing():
    wanted = [x.tolist() for x in tables(evenly((10, 3), 8))]
    with FakeTensorMode(), WithoutValues(integers=True) as seen:
        chosen = torch.rand(10, 8).topk(3, dim=-1).indices
        found = [seen.array(x).tolist() for x in tables(chosen)]
        assert [x.tolist() for x in tables(chosen)] == found, "asked for one by one"
    assert found == wanted


def test_what_was_not_known_stays_so():
    with FakeTensorMode(), WithoutValues(integers=True) as seen:
        unknown = (torch.rand(4) > 0.5).long()
        known = torch.arange(4)
        assert seen.known.value(unknown) is None and seen.known.value(unknown + known) is None
        known.add_(unknown)
        assert seen.known.value(known) is None, "written over by what is not known"
        assert int(unknown[0]) == 1 and unknown.nonzero().shape == (4, 1), "as without"
        assert seen.known.value(torch.randint(9, (3,))) is None
        with pytest.raises(AssertionError, match="nobody knows"):
            seen.array(unknown)


def test_other_ranks_do_the_same():
    mesh = Mesh({"dp": 3}, ("dp",))
    with rehearsed(mesh, 1) as world, FakeTensorMode(), WithoutValues(integers=True) as seen:
        group = world.group("dp")
        even = collectives.all_to_all(torch.arange(6), group)
        uneven = collectives.all_to_all(torch.arange(6), group, [1, 2, 3], [2, 2, 2])
        joined = collectives.all_gather(torch.arange(4).view(2, 2), group, 1)
        cut = collectives.all_gather(torch.arange(2), group, sizes=[1, 2, 3])
        answers = [seen.array(x).tolist() for x in (even, uneven, joined, cut)]
    assert answers == [[2, 3] * 3, [1, 2] * 3, [[0, 1] * 3, [2, 3] * 3], [0, 0, 1, 0, 1, 0]]


def test_an_even_choice():
    assert evenly((4, 2), 4).tolist() == [[0, 2], [1, 3], [2, 0], [3, 1]]
    for tokens, k, number in ((100, 3, 7), (8, 8, 8), (5, 1, 3)):
        chosen = evenly((tokens, k), number)
        assert all(len(set(row)) == k for row in chosen.tolist()), "no expert twice"
        load = torch.bincount(chosen.flatten(), minlength=number)
        assert load.max() - load.min() <= k and load.sum() == tokens * k
    assert resized(torch.tensor([1, 2]), 5).tolist() == [1, 2, 1, 2, 1] and len(resized(torch.zeros(0), 2)) == 2
