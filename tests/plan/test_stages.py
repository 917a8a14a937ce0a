"""Which part of a model each chunk of a pipeline is: whole layers, each in one place, whatever the schedule's places."""

from collections import Counter
from dataclasses import replace

import pytest

from shoal.axes.pipeline.partition import stage_costs, work
from shoal.axes.pipeline.schedules.files import to_csv
from shoal.axes.pipeline.schedules.instruction import B, F, Schedule
from shoal.axes.pipeline.schedules.registry import make
from shoal.plan.pieces import TIED, mesh_of, names_by_chunk, pieces_of
from shoal.plan.stages import check_pipeline, chunks_of, layers_wanted, mini_batches, schedule_of, stages_of
from shoal.spec.errors import RequestError
from shoal.spec.inventory import inventory
from shoal.spec.job import Job, TrainSpec
from shoal.spec.layout import SCHEDULES, Layout
from shoal.spec.model import ModelSpec
from shoal.verify.verify import small_job

MODEL = ModelSpec(layers=12, hidden=32, heads=4, vocab=61)
ONE_ROUTE = [name for name in SCHEDULES if name != "dualpipe"]


def job(layout, **changes):
    return Job(replace(MODEL, **changes), Layout.parse(layout), train=TrainSpec(batch=64))


def chunks(this):
    """By pipeline rank, the layers of its chunks."""
    mesh = mesh_of(this)
    ranks = [mesh.rank({"pp": place, "dp": 0, "tp": 0}) for place in range(this.layout.pp)]
    return [[list(stage.layers) for stage in chunks_of(this, mesh, rank)] for rank in ranks]


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("schedule", ONE_ROUTE)
def test_every_layer_has_one_place_and_the_ends_are_the_models(schedule, p):
    this = job(f"pp={p},schedule={schedule}")
    held = [layer for of_rank in chunks(this) for layers in of_rank for layer in layers]
    assert sorted(held) == list(range(12))
    stages = stages_of(this)
    assert [layer for stage in stages for layer in stage.layers] == list(range(12)), "in the order of the model"
    assert [stage.first for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.last for stage in stages] == [False] * (len(stages) - 1) + [True]
    assert len(stages) == p * this.layout.v


def test_chunks_come_in_loops_in_a_v_and_from_both_ends():
    """Spec PP-8: 16 layers on 4 devices in 2 chunks are {1,2,9,10}, {3,4,11,12}, ...; PP-10: rank r has r and p - 1 - r."""
    looped = chunks(job("pp=4,schedule=interleaved,stages=2-2-2-2-2-2-2-2", layers=16))
    assert looped == [[[0, 1], [8, 9]], [[2, 3], [10, 11]], [[4, 5], [12, 13]], [[6, 7], [14, 15]]]
    assert chunks(job("pp=2,schedule=zb-v,stages=3-1-2-6")) == [[[0, 1, 2], [6, 7, 8, 9, 10, 11]], [[3], [4, 5]]]
    both_ways = chunks(job("pp=4,schedule=dualpipe,stages=4-3-3-2"))
    assert both_ways == [
        [[0, 1, 2, 3], [10, 11]],
        [[4, 5, 6], [7, 8, 9]],
        [[7, 8, 9], [4, 5, 6]],
        [[10, 11], [0, 1, 2, 3]],
    ]


def test_the_places_go_by_pipeline_rank_whatever_the_order_of_the_axes():
    for order in ("tp-dp-pp", "pp-dp-tp", "dp-pp-tp"):
        this = job(f"pp=3,dp=2,tp=2,order={order}")
        mesh = mesh_of(this)
        for rank in range(12):
            (stage,) = chunks_of(this, mesh, rank)
            assert stage == stages_of(this)[mesh.coordinate("pp", rank)]


def test_the_head_weighs_in():
    """A vocabulary whose head costs as much as five layers: the last stage has fewer, and no stage costs more than need be."""
    this = job("pp=4", vocab=2000)
    sizes = [len(stage.layers) for stage in stages_of(this)]
    costs = work(this.model, this.data.sequence)
    assert sizes[-1] == 1 and sum(sizes) == 12
    assert max(stage_costs(costs, sizes)) < max(stage_costs(costs, [3, 3, 3, 3]))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_parameter_is_kept_where_it_is_used(schedule, tied):
    """Once; twice with two routes; a tied matrix at both ends, whose gradients are summed over the ranks that have it."""
    this = job(f"pp=2,schedule={schedule}", tied=tied)
    held = Counter(piece.parameter.name for rank in range(2) for piece in pieces_of(this, rank))
    routes = schedule_of(this).routes
    wanted = dict.fromkeys((parameter.name for parameter in inventory(this.model)), len(routes))
    apart = routes[0][0].rank != routes[0][-1].rank
    if tied and len(routes) == 1 and apart:
        wanted[TIED] = 2
    assert held == wanted
    for rank in range(2):
        for piece in pieces_of(this, rank):
            shared = {share.axis: share for share in piece.shares}
            axis = {2: "twin"}.get(len(routes), "ends" if tied and apart and piece.parameter.name == TIED else None)
            assert set(shared) == ({axis} if axis else set())
            assert all(share.partial and (share.start, share.stop) == (0, piece.shape[0]) for share in shared.values())
        users = [TIED in names for names in names_by_chunk(this, rank)]
        assert sum(users) == sum(stage.first or (tied and stage.last) for stage in chunks_of(this, mesh_of(this), rank))


def test_mini_batches_are_what_goes_into_one_update():
    assert mini_batches(job("pp=2,micro_batches=6")) == [range(6)]
    assert mini_batches(job("dp=2,micro_batches=6")) == [range(6)]
    assert mini_batches(job("pp=2,schedule=pipedream,micro_batches=3")) == [range(1), range(1, 2), range(2, 3)]
    assert mini_batches(job("pp=2,schedule=pipedream-2bw,micro_batches=5")) == [range(2), range(2, 4), range(4, 5)]


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        ("pp=2", 4),
        ("pp=3,schedule=interleaved,v=2", 12),
        ("pp=2,schedule=dualpipe", 4),
        ("pp=4,stages=9-8-8-7", 32),
        ("pp=2,schedule=zb-v,stages=1-1-1-1", 4),
    ],
)
def test_verify_gives_its_model_as_many_layers_as_the_stages_have(layout, layers):
    layout = Layout.parse(layout)
    assert layers_wanted(layout) == layers
    small = small_job(Job(MODEL, layout, train=TrainSpec(batch=48)))
    assert small.model.layers == layers and sum(len(stage.layers) for stage in stages_of(small)) == layers


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_schedule_can_be_run(name, tied):
    for p in (2, 4, 8):
        check_pipeline(Layout.parse(f"pp={p},schedule={name}"), tied)
        check_pipeline(Layout.parse(f"pp={p},schedule={name}"), tied, layers=16)


def test_a_file_says_how_many_chunks_there_are(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(make("interleaved", 2, 4, 3)))
    for v in ("", ",v=3"):
        layout = Layout.parse(f"pp=2,schedule={path}{v}")
        check_pipeline(layout, tied=True)
        assert layers_wanted(layout) == 12 and chunks(job(f"pp=2,schedule={path}{v}"))[1] == [[2, 3], [6, 7], [10, 11]]
    with pytest.raises(RequestError, match=r"v = 2, but .*mine.csv has 6 stages on 2 ranks; 3 would do"):
        check_pipeline(Layout.parse(f"pp=2,schedule={path},v=2"), tied=True)


def test_copies_and_tied_ends_must_lie_where_gradients_are_summed(tmp_path):
    """Copies on mirrored ranks, half of the micro-batches each; a tied model's ends on one rank or on the outermost."""

    def checked(schedule, tied=False):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.csv"  # each is read once
        path.write_text(to_csv(schedule))
        layout = Layout.parse(f"pp={schedule.ranks},micro_batches={schedule.micro_batches},schedule={path}")
        check_pipeline(layout, tied)

    plain, both = make("1f1b", 3, 3), make("dualpipe", 2, 4)
    turned = replace(
        plain, orders=[plain.orders[1], plain.orders[0], plain.orders[2]], routes=[[(1, 0), (0, 0), (2, 0)]]
    )
    checked(turned)
    with pytest.raises(
        RequestError, match=r"ends of a tied model at 1\.0 and 2\.0; both on one rank, or on ranks 0 and 2"
    ):
        checked(turned, tied=True)
    checked(Schedule("a copy", both.orders, both.routes, both.route_of), tied=True)
    orders = [[F(0), F(1, 1), B(0), B(1, 1)], [F(0), B(0), F(1, 1), B(1, 1)]]
    with pytest.raises(RequestError, match="one the other's mirror image; one route would do"):
        checked(Schedule("side by side", orders, [[(0, 0), (1, 0)], [(0, 1), (1, 1)]], [0, 1]))
    uneven = [[F(0), F(1), B(0), B(1)], [F(0), B(0), F(1), B(1)]]
    with pytest.raises(RequestError, match="half of the micro-batches along each route"):
        checked(Schedule("uneven", uneven, both.routes, [0, 0]))
