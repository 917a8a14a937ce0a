"""The layout: its shorthand, its sizes, and what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.spec.errors import RequestError
from shoal.spec.layout import SCHEDULES, Layout


@pytest.mark.parametrize(
    "text, world",
    [
        ("dp=1", 1),
        ("dp=2", 2),
        ("dp=2,tp=2,pp=2,sp,zero=1", 8),
        ("dp=3,tp=2x2,cp=2", 24),
        ("dp=4,tp=2,ep=8,hsdp=2", 8),
        ("tp=4,ep=2,dp=2,etp=4", 8),
        ("cp=4,cp_kind=hybrid,ulysses=2", 4),
    ],
)
def test_shorthand_and_world(text, world):
    layout = Layout.parse(text)
    assert layout.world == world
    assert set(str(layout).split(",")) == set(text.split(","))
    assert Layout.parse(str(layout)) == layout


def test_people_read_back_what_they_wrote():
    assert str(Layout.parse(" dp = 2, tp=2 ,pp=2,sp,zero=1 ")) == "dp=2,tp=2,pp=2,sp,zero=1"
    assert str(Layout.parse("")) == str(Layout()) == str(Layout.parse("sp=false")) == "dp=1"


def test_a_tensor_grid_is_square_and_counts_all_its_ranks():
    grid, row = Layout(tp="3X3"), Layout.parse("tp=9")
    assert (grid.tp, grid.tp_grid, grid.tp_size) == ("3x3", (3, 3), 9)
    assert (row.tp, row.tp_grid, row.tp_size) == (9, None, 9)


@pytest.mark.parametrize(
    "text, line",
    [
        ("tp=2x3", "layout.tp = 2x3 is not square; 2x2 or 3x3 would do"),
        ("tp=2x2x2", "layout.tp = 2x2x2 is neither a number of ranks nor a square grid; 4 or 2x2 would do"),
        ("tp=0x0", "layout.tp = 0x0 is neither a number of ranks nor a square grid; 4 or 2x2 would do"),
        ("tp=0", "layout.tp = 0 must be at least 1; 1 would do"),
        ("dp", "layout.dp has no value; dp=1 would do"),
        ("order=", "layout.order has no value; order=tp-cp-ep-dp-pp would do"),
        ("dp=2,tp=2,dp=3", "layout.dp is given twice in dp=2,tp=2,dp=3; dp=2 alone would do"),
        ("dq=2", "layout.dq is not a field of layout; did you mean layout.dp?"),
        ("frobnicate", "layout.frobnicate is not a field of layout; layout has dp, zero,"),
        ("zero=4", "layout.zero = 4 must be at least 0 and at most 3; 0 would do"),
        ("dp=4,hsdp=3", "layout.hsdp = 3 does not divide dp = 4; 1, 2 or 4 would"),
        ("dp=4,tp=2,ep=3", "layout.ep = 3 does not divide dp x cp x tp = 8; 1, 2, 4 or 8 would"),
        ("dp=4,tp=2,etp=2,ep=8", "layout.ep = 8 does not divide dp x cp = 4; 1, 2 or 4 would"),
        ("tp=4,etp=2", "layout.etp = 2 is neither 1 nor tp = 4; 1 or 4 would do"),
        (
            "cp=4,ulysses=2,cp_kind=ring",
            "layout.ulysses = 2 needs cp_kind=hybrid, not ring; layout.ulysses = 1 would do",
        ),
        ("pp=2,order=tp-dp", "layout.order = tp-dp leaves out pp = 2; tp-dp-pp would do"),
        ("order=tp-tp", "layout.order = tp-tp names tp twice; tp-cp-ep-dp-pp would do"),
        ("order=tp-xp", "layout.order = xp is not one of tp, cp, ep, dp, pp; did you mean tp?"),
        ("dp=1000000000000000003,hsdp=2", "layout.hsdp = 2 does not divide dp = 1000000000000000003; 1 or"),
    ],
)
def test_what_cannot_be_is_refused(text, line):
    with pytest.raises(RequestError) as refused:
        Layout.parse(text)
    assert str(refused.value).startswith(line)
    assert str(refused.value).startswith(refused.value.field)


layouts = st.builds(
    lambda dp_replicas, shard, cp, **rest: Layout(dp=dp_replicas * shard, hsdp=dp_replicas, cp=cp, **rest),
    dp_replicas=st.integers(1, 4),
    shard=st.integers(1, 8),
    cp=st.integers(1, 4),
    zero=st.integers(0, 3),
    tp=st.integers(1, 8) | st.sampled_from(["1x1", "2x2", "4x4"]),
    sp=st.booleans(),
    pp=st.integers(1, 8),
    v=st.none() | st.integers(0, 4),
    micro_batches=st.none() | st.integers(0, 64),
    schedule=st.sampled_from([*SCHEDULES, "mine.csv"]),
    stages=st.sampled_from(["", "9-8-8-7"]),
    cp_kind=st.sampled_from(["ring", "zigzag", "striped", "ulysses", "allgather", "hybrid"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    order=st.permutations(["tp", "cp", "ep", "dp", "pp"]).map("-".join),
)


@given(layouts)
def test_every_layout_survives_its_shorthand(layout):
    assert Layout.parse(str(layout)) == layout
    assert layout.world == layout.dp * layout.cp * layout.tp_size * layout.pp
