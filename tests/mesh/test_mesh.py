"""The mesh against numpy's own idea of an array with axes, and against the spec's golden groups."""

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.mesh import BASE, Mesh
from shoal.spec.errors import RequestError
from shoal.spec.layout import Layout

GOLDEN = Mesh({"tp": 2, "dp": 2, "pp": 4}, ("tp", "dp", "pp"))  # spec MESH-1


def divisor_of(draw, whole):
    return draw(st.sampled_from([d for d in range(1, whole + 1) if whole % d == 0]))


@st.composite
def layouts(draw):
    tp, cp, dp, pp = (draw(st.integers(1, 4)) for _ in range(4))
    etp = draw(st.sampled_from([1, tp]))
    tokens = dp * cp * (tp if etp == 1 else 1)
    return Layout(
        dp=dp,
        hsdp=divisor_of(draw, dp),
        tp=tp,
        pp=pp,
        cp=cp,
        etp=etp,
        ep=divisor_of(draw, tokens),
        order="-".join(draw(st.permutations(["tp", "cp", "ep", "dp", "pp"]))),
    )


def array_of(mesh):
    """All ranks as an array whose last axis is the mesh's first."""
    return np.arange(mesh.world).reshape([mesh.sizes[axis] for axis in reversed(mesh.axes)])


def groups_by_numpy(mesh, axes):
    """Groups along base axes: everything else in front, the axes behind."""
    names = list(reversed(mesh.axes))
    behind = [name for name in names if name in axes]
    order = [names.index(name) for name in names if name not in axes] + [names.index(name) for name in behind]
    size = math.prod(mesh.sizes[name] for name in behind)
    return {tuple(sorted(row)) for row in array_of(mesh).transpose(order).reshape(-1, size).tolist()}


def assert_partition(groups, world):
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(world))
    assert all(list(group) == sorted(group) for group in groups)


def test_golden_groups():
    assert GOLDEN.world == 16 and GOLDEN.axes == ("tp", "dp", "pp")
    assert GOLDEN.groups("tp") == [(i, i + 1) for i in range(0, 16, 2)]
    assert GOLDEN.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert GOLDEN.groups("pp") == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    assert GOLDEN.groups(("tp", "dp")) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]


def test_golden_layout_gives_the_same_groups():
    mesh = Mesh.of(Layout.parse("tp=2,dp=2,pp=4"))
    assert mesh.axes == ("tp", "cp", "dp", "pp")
    for axis in ("tp", "dp", "pp"):
        assert mesh.groups(axis) == GOLDEN.groups(axis)
    assert mesh.groups("cp") == [(rank,) for rank in range(16)] == GOLDEN.groups("cp")


def test_golden_identity():
    identity = GOLDEN.identity(5)  # spec MESH-2
    assert identity.coordinates == {"tp": 1, "dp": 0, "pp": 1}
    assert identity.groups == {"tp": (4, 5), "dp": (5, 7), "pp": (1, 5, 9, 13)}
    assert identity.holds == {
        "tp": "part 1 of 2 of every attention and MLP matrix",
        "dp": "share 0 of 2 of every batch",
        "pp": "stage 1 of 4 of the layers",
    }
    assert identity.exchanges["tp"].endswith("with rank 4")
    assert identity.exchanges["dp"] == "gradients once a step with rank 7"
    assert identity.exchanges["pp"].startswith("activations from rank 1 and to rank 9, gradients the other way")


def test_pipeline_ends_have_one_neighbour():
    assert GOLDEN.identity(0).exchanges["pp"].startswith("activations to rank 4,")
    assert GOLDEN.identity(15).exchanges["pp"].startswith("activations from rank 11,")


@given(layouts())
def test_coordinates_and_ranks_are_one_to_one(layout):
    mesh = Mesh.of(layout)
    assert mesh.world == layout.world
    names = list(reversed(mesh.axes))
    for place, rank in np.ndenumerate(array_of(mesh)):
        coordinates = dict(zip(names, map(int, place), strict=True))
        assert mesh.coordinates(int(rank)) == coordinates
        assert mesh.rank(coordinates) == rank
        assert all(mesh.coordinate(axis, int(rank)) == coordinates[axis] for axis in names)


@given(layouts(), st.sets(st.sampled_from(BASE), min_size=1))
def test_base_groups_are_those_of_an_array(layout, axes):
    mesh = Mesh.of(layout)
    groups = mesh.groups(tuple(axes))
    assert_partition(groups, mesh.world)
    assert set(groups) == groups_by_numpy(mesh, axes)
    assert all(mesh.group(tuple(axes), rank) == group for group in groups for rank in group)


@given(layouts())
def test_groups_of_two_axes_meet_in_one_rank(layout):
    mesh = Mesh.of(layout)
    pairs = [*itertools.combinations(BASE, 2), ("ep", "edp"), ("shard", "replicate"), ("ep", "pp"), ("edp", "pp")]
    for one, other in pairs:
        for rank in range(mesh.world):
            assert set(mesh.group(one, rank)) & set(mesh.group(other, rank)) == {rank}


@given(layouts())
def test_experts_and_their_replicas_tile_the_token_space(layout):
    mesh = Mesh.of(layout)
    tokens = {"dp", "cp"} | ({"tp"} if layout.etp == 1 else set())
    outer = layout.axes.index("ep") > layout.axes.index("dp")
    expected = {"ep": set(), "edp": set()}
    for space in groups_by_numpy(mesh, tokens):  # ascending ranks of one token space are its mesh order
        table = np.array(space).reshape((layout.ep, -1) if outer else (-1, layout.ep))
        table = table.T if outer else table
        expected["ep"] |= set(map(tuple, table.tolist()))
        expected["edp"] |= set(map(tuple, table.T.tolist()))
    for axis in ("ep", "edp"):
        assert_partition(mesh.groups(axis), mesh.world)
        assert set(mesh.groups(axis)) == expected[axis]
    assert set(mesh.groups(("ep", "edp"))) == groups_by_numpy(mesh, tokens)
    assert set(mesh.groups("etp")) == (groups_by_numpy(mesh, {"tp"}) if layout.etp > 1 else set(mesh.groups(())))


@given(layouts())
def test_replicas_that_hold_all_experts_split_the_ranks_of_each(layout):
    """There are such ranks where each replica is one run of the token space, and no expert group leaves its replica."""
    mesh = Mesh.of(layout)
    tokens = {"dp", "cp"} | ({"tp"} if layout.etp == 1 else set())
    replicas, whole = [], True
    for space in groups_by_numpy(mesh, tokens):
        by_replica = {}
        for place, rank in enumerate(space):
            by_replica.setdefault(mesh.coordinates(rank)["dp"] * layout.hsdp // layout.dp, []).append((place, rank))
        for members in by_replica.values():
            whole &= members[-1][0] - members[0][0] == len(members) - 1
            replicas.append({rank for _, rank in members})
    whole &= all(any(replica.issuperset(group) for replica in replicas) for group in mesh.groups("ep"))
    assert mesh.has("eshard") == (whole or layout.hsdp == 1)
    if mesh.has("eshard"):
        inside = {tuple(sorted(replica & set(copies))) for replica in replicas for copies in mesh.groups("edp")}
        assert set(mesh.groups("eshard")) == inside - {()}
        assert set(mesh.groups(("eshard", "replicate"))) == set(mesh.groups("edp"))
    identity = mesh.identity(0)
    assert ("eshard" in identity.groups) == (mesh.has("eshard") and layout.hsdp > 1 and layout.ep > 1)


def test_experts_in_replicas_by_hand():
    mesh = Mesh.of(Layout.parse("dp=8,ep=2,hsdp=2"))
    assert mesh.groups("edp") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert mesh.groups("eshard") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.groups("replicate") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    identity = mesh.identity(5)
    assert identity.holds["eshard"] == "shard 0 of 2 of its experts' model states in its replica"
    assert identity.exchanges["eshard"] == "shards of its experts' model states with rank 7"
    for apart in ("dp=4,ep=4,hsdp=2", "dp=4,ep=2,hsdp=2,order=dp-ep", "dp=4,cp=2,ep=2,hsdp=2,order=ep-dp-cp"):
        mesh = Mesh.of(Layout.parse(apart))
        assert not mesh.has("eshard") and "eshard" not in mesh.identity(0).groups
        with pytest.raises(RequestError, match="axis eshard is not one of "):
            mesh.group("eshard", 0)


def test_experts_are_neighbours_by_default():
    mesh = Mesh.of(Layout.parse("tp=2,cp=2,dp=2,ep=4,pp=2"))
    assert mesh.groups("ep") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert mesh.groups("edp") == [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)]
    kept = Mesh.of(Layout.parse("tp=2,dp=4,ep=2,etp=2"))
    assert kept.groups("ep") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert kept.groups("etp") == [(0, 1), (2, 3), (4, 5), (6, 7)]


@given(layouts())
def test_hybrid_sharding_tiles_the_data_axis(layout):
    mesh = Mesh.of(layout)
    assert mesh.size("replicate") == layout.hsdp and mesh.size("shard") * layout.hsdp == layout.dp
    for data in mesh.groups("dp"):
        table = np.array(data).reshape(layout.hsdp, -1)  # shard ranks are neighbours on the data axis
        assert {mesh.group("shard", rank) for rank in data} == set(map(tuple, table.tolist()))
        assert {mesh.group("replicate", rank) for rank in data} == set(map(tuple, table.T.tolist()))


@given(layouts(), st.data())
def test_identity_agrees_with_the_groups(layout, data):
    mesh = Mesh.of(layout)
    rank = data.draw(st.integers(0, mesh.world - 1))
    identity = mesh.identity(rank)
    assert identity.coordinates == mesh.coordinates(rank)
    assert all(group == mesh.group(axis, rank) for axis, group in identity.groups.items())
    shared = {axis for axis, group in identity.groups.items() if len(group) > 1}
    assert set(identity.holds) == set(identity.exchanges) == shared
    assert ("shard" in identity.groups) == (layout.hsdp > 1)
    assert ("ep" in identity.groups) == (layout.ep > 1)


def test_a_large_mesh_answers_at_once():
    mesh = Mesh.of(Layout.parse("tp=8,pp=16,dp=1024,ep=64,hsdp=4"))
    assert mesh.world == 131_072
    started = time.perf_counter()
    identity = mesh.identity(77_777)
    assert time.perf_counter() - started < 0.5
    assert len(identity.groups["dp"]) == 1024
    endless = Mesh({"tp": 8, "dp": 4, "pp": 10**15}, ("tp", "dp", "pp"))  # whoever enumerates the world never ends
    assert endless.group("dp", 10**16 + 1) == tuple(10**16 + 1 + 8 * i for i in range(4))
    assert endless.rank(endless.coordinates(10**16 + 5)) == 10**16 + 5


def test_axes_that_overlap_have_no_group():
    mesh = Mesh.of(Layout.parse("dp=4,hsdp=2"))
    with pytest.raises(AssertionError, match="overlap"):
        mesh.group(("dp", "shard"), 0)


@pytest.mark.parametrize(
    "call, line",
    [
        (lambda: GOLDEN.coordinates(16), "rank = 16 is not in a mesh of 16; 0 to 15 would do"),
        (lambda: GOLDEN.group("dp", -1), "rank = -1 is not in a mesh of 16; 0 to 15 would do"),
        (
            lambda: GOLDEN.group("pd", 0),
            "axis pd is not one of tp, cp, dp, pp, shard, replicate, ep, edp, eshard, etp, row,",
        ),
        (lambda: GOLDEN.rank({"tp": 0, "dp": 2}), "coordinates tp=0, dp=2 are not in this mesh; 0 to 1 along dp"),
        (lambda: GOLDEN.rank({"tp": 0, "dp": 1}), "coordinates tp=0, dp=1 are not in this mesh; 0 to 3 along pp"),
        (lambda: GOLDEN.rank({"tp": 0, "dp": 1, "pp": 0, "x": 0}), "coordinates tp=0, dp=1, pp=0, x=0 are not in this"),
        (lambda: Mesh({"dp": 0}, ("dp",)), "layout.dp = 0 must be at least 1; 1 would do"),
        (lambda: Mesh({"dp": 2, "tp": 2}, ("dp",)), "layout.order leaves out tp = 2; dp-tp would do"),
        (lambda: Mesh({"dp": 2}, ("dp", "dp")), "layout.order = dp-dp names dp wrongly;"),
        (lambda: Mesh({"dp": 2, "x": 1}, ("dp", "x")), "layout.order = dp-x names x wrongly;"),
        (lambda: Mesh({"dp": 2, "hsdp": 3}, ("dp",)), "layout.hsdp = 3 does not divide dp = 2; 1 or 2 would"),
    ],
)
def test_what_cannot_be_is_refused(call, line):
    with pytest.raises(RequestError) as refused:
        call()
    assert str(refused.value).startswith(line)
