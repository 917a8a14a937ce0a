"""What a pipeline costs: bubbles, transfers, memory and the cut into stages, against golden numbers and brute force."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.axes.pipeline.card import CARD
from shoal.axes.pipeline.cost import (
    activation_bytes,
    bubble,
    bubble_chart,
    closed_idle,
    evaluation_transfers,
    message_bytes,
    step_transfers,
    weight_bytes,
)
from shoal.axes.pipeline.partition import Costs, balanced, by_hand, even, runs, stage_costs, weights, work
from shoal.axes.pipeline.schedules.instruction import F, Schedule, one_chunk_per_rank
from shoal.axes.pipeline.schedules.registry import make, names, needs
from shoal.axes.pipeline.simulate import simulate, stage_times
from shoal.spec.errors import RequestError
from shoal.spec.inventory import flops_per_token, parameter_count
from shoal.spec.model import ModelSpec

TIME = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0])


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(names()), st.integers(1, 8), st.integers(1, 24), st.sampled_from([2, 3]), TIME, TIME, TIME)
def test_closed_bubbles_are_what_simulation_finds(name, p, m, v, f, i, w):
    recipe = needs(name)
    p += recipe.even and p % 2
    m = max(m + (recipe.even and m % 2), recipe.rounds * p)
    chunks = v if recipe.least_v is not None else recipe.v
    schedule = make(name, p, m, chunks)
    timeline = simulate(schedule, stage_times(schedule, f / chunks, (i + w) / chunks, w / chunks))
    closed = closed_idle(name, p, m, chunks, f, i + w, w)
    if closed is not None:
        assert timeline.idle == pytest.approx([closed] * p, abs=1e-9)
    found = bubble(name, p, m, chunks, f, i + w, w)
    assert found.closed == (closed is not None)
    assert found.ratio == pytest.approx(timeline.bubble, abs=1e-9)
    assert found.fraction == pytest.approx(timeline.bubble_fraction, abs=1e-9)


def test_which_bubbles_are_closed():
    """With F = I = W and m = 2p all but zb-v's have a closed form, and overlap is left to simulation."""
    closed = {name: bubble(name, 4, 8).closed for name in names()}
    assert [name for name, is_closed in closed.items() if not is_closed] == ["zb-v"]
    assert bubble("1f1b", 4, 8).ratio == 0.375 and bubble("zb-v", 4, 8).idle == 1.5  # ticks of half a rank's time
    overlapped = bubble("dualpipe", 8, 20, hidden=0.5)
    assert not overlapped.closed and overlapped.idle == pytest.approx(33 / 8)
    with pytest.raises(RequestError):
        bubble("dualpipe", 3, 8)


def test_bubble_chart_golden():
    """PP-9: p = 8. v > 1 with m < p is not attainable, and every other cell is."""
    cells = bubble_chart(8, (1, 2, 4, 8, 16, 32), (1, 2, 4, 8))
    assert [round(cell.formula, 2) for cell in cells if cell.v == 1] == [7.0, 3.5, 1.75, 0.88, 0.44, 0.22]
    assert {round(cell.formula, 2) for cell in cells if cell.v == 8} >= {0.11, 0.05, 0.03}
    for cell in cells:
        assert cell.attainable == (cell.v == 1 or cell.m >= 8)
        assert cell.simulated >= max(cell.formula, 8 / cell.m - 1) - 1e-12
    worst = next(cell for cell in cells if (cell.m, cell.v) == (1, 8))
    assert (worst.formula, round(worst.simulated, 9)) == (0.875, 7.0)


def sent(schedule, size, **wanted):
    """Bytes sent by all ranks in a step, of what matches."""
    return sum(
        transfer.sent
        for rank in range(schedule.ranks)
        for transfer in step_transfers(schedule, rank, size)
        if all(getattr(transfer, key) == value for key, value in wanted.items())
    )


def test_boundary_traffic_golden():
    """PP-11: b = 2, s = 128, h = 64, p = 4, m = 8: 32768 per send, 1572864 in all; ends m, inner ranks 2m sends."""
    size = message_bytes(2, 128, 64, 2)
    assert size == 32768 and message_bytes(2, 128, 64, 2, parts=4) == 8192
    for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "pipedream", "pipedream-2bw"):
        schedule = make(name, 4, 8)
        assert sent(schedule, size) == 1572864 == 2 * sent(schedule, size, phase="forward")
        for rank in range(4):
            transfers = list(step_transfers(schedule, rank, size))
            inner = rank in (1, 2)
            assert sum(x.calls for x in transfers if x.op == "send") == (16 if inner else 8)
            assert (
                sum(x.sent for x in transfers) == sum(x.received for x in transfers) == (2 if inner else 1) * 8 * size
            )
            assert {x.axis for x in transfers} == {"pp"} and {x.micro_batch for x in transfers} == set(range(8))
            for x in transfers:
                assert (x.sent, x.received) == ((x.calls * size, 0) if x.op == "send" else (0, x.calls * size))


def test_traffic_does_not_depend_on_m_at_a_fixed_batch():
    """PP-11: finer micro-batches, more messages, the same bytes."""
    totals = {m: sent(make("1f1b", 4, m), message_bytes(8 // m, 128, 64, 2)) for m in (1, 2, 4, 8)}
    assert len(set(totals.values())) == 1 and totals[1] == 2 * 3 * 8 * 128 * 64 * 2


def test_chunks_multiply_traffic_but_not_where_the_next_is_here():
    """PP-8: (pv - 1) / (p - 1) of the traffic. A V saves the message in its bend; DualPipe sends as plain stages do."""
    for p, m, v in [(4, 8, 2), (2, 4, 3), (8, 8, 4)]:
        plain, loops = sent(make("1f1b", p, m), 10), sent(make("interleaved", p, m, v), 10)
        assert loops == 2 * m * (p * v - 1) * 10 and loops / plain == pytest.approx((p * v - 1) / (p - 1))
        assert sent(make("breadth-first", p, m, v), 10) == loops
    assert round(7 / 3, 2) == 2.33 == round(sent(make("interleaved", 4, 8, 2), 1) / sent(make("1f1b", 4, 8), 1), 2)
    for name in ("zb-v", "dualpipe-v"):
        assert sent(make(name, 4, 8), 10) == 2 * 8 * (2 * 4 - 2) * 10
    assert sent(make("dualpipe", 4, 8), 10) == 2 * 8 * 3 * 10
    for name in names():
        if not needs(name).even:
            assert not list(step_transfers(make(name, 1, 4), 0, 10))


def test_one_record_for_all_messages_of_a_micro_batch():
    """As the ledger keeps them: chunks of one rank send under one phase, op and micro-batch."""
    records = list(step_transfers(make("interleaved", 2, 2, 3), 0, 10))
    keys = [(x.phase, x.op, x.micro_batch) for x in records]
    assert len(keys) == len(set(keys)) == 8
    forward = next(x for x in records if (x.phase, x.op, x.micro_batch) == ("forward", "send", 1))
    assert (forward.sent, forward.received, forward.calls) == (30, 0, 3)
    back = next(x for x in records if (x.phase, x.op, x.micro_batch) == ("forward", "receive", 1))
    assert (back.sent, back.received, back.calls) == (0, 20, 2)


def test_evaluation_sends_outputs_only():
    schedule = Schedule("forward", [[F(0), F(1), F(2)]] * 3, one_chunk_per_rank(3), [0] * 3)
    (first,), middle = evaluation_transfers(schedule, 0, 10), list(evaluation_transfers(schedule, 1, 10))
    assert (first.phase, first.op, first.sent, first.received, first.calls) == ("evaluate", "send", 30, 0, 3)
    assert [(x.op, x.sent, x.received) for x in middle] == [("receive", 0, 30), ("send", 30, 0)]


def test_activation_memory_golden():
    """PP-5, in activations of one layer and micro-batch: L = 16, p = 4, m = 8. PP-6: stage 0 of 1f1b keeps L whatever m."""
    gpipe = make("gpipe", 4, 8)
    boundary = 0.1
    assert [activation_bytes(gpipe, rank, [4] * 4) for rank in range(4)] == [32] * 4
    assert activation_bytes(gpipe, 0, [4] * 4, kept=[boundary] * 4) == pytest.approx(8 * boundary + 4)
    for m in (4, 8, 32):
        assert [activation_bytes(make("1f1b", 4, m), rank, [4] * 4) for rank in range(4)] == [16, 12, 8, 4]
    interleaved = make("interleaved", 4, 8, 2)  # chunks of 2 layers; 5.5 stages' worth against 4
    assert activation_bytes(interleaved, 0, [2] * 8) == 22


def test_activation_memory_where_weight_halves_wait():
    """Uneven stages and what W needs, by hand for zb-h1's last stage: F0 I0 F1 I1 W0 W1; held 1, waiting up to 2."""
    schedule = make("zb-h1", 2, 2)
    assert activation_bytes(schedule, 1, [10, 7], waiting=[5, 3]) == 10  # F1 or I1 held, W0 waiting: 7 + 3
    assert activation_bytes(schedule, 1, [10, 1], waiting=[5, 3]) == 6  # both waiting
    assert activation_bytes(schedule, 0, [10, 7], waiting=[5, 3]) == 20


def test_weight_memory():
    """PP-7: (p - s) versions with stashing, p with vertical sync, 2 with 2BW. PP-10: two copies with dualpipe."""
    own = [100, 200, 300, 400]
    found = {
        name: [weight_bytes(make(name, 4, 12), rank, own) for rank in range(4)]
        for name in ("1f1b", "pipedream", "pipedream-vertical", "pipedream-2bw", "dualpipe")
    }
    assert found["1f1b"] == own
    assert found["pipedream"] == [400, 600, 600, 400]
    assert found["pipedream-vertical"] == [400, 800, 1200, 1600]
    assert found["pipedream-2bw"] == [200, 400, 600, 800]
    assert found["dualpipe"] == [500, 500, 500, 500]
    assert [weight_bytes(make("zb-v", 2, 4), rank, own) for rank in range(2)] == [500, 500]


def test_even_partition():
    """PP-1's examples, and what does not divide."""
    assert runs(even(64, 4)) == [range(0, 16), range(16, 32), range(32, 48), range(48, 64)]
    assert even(32, 4) == [8] * 4 and even(10, 4) == [3, 3, 2, 2] and even(3, 3) == [1, 1, 1]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 9), st.integers(0, 20), st.integers(0, 20))
def test_balanced_partition_is_the_best_there_is(layers, stages, first, last):
    """Against every partition: the least maximum, and among those the least sum of squares."""
    stages = min(stages, len(layers))
    costs = Costs(first, tuple(layers), last)
    every = [
        [end - start for start, end in pairwise((0, *cuts, len(layers)))]
        for cuts in combinations(range(1, len(layers)), stages - 1)
    ]

    def quality(sizes):
        found = stage_costs(costs, sizes)
        return max(found), sum(cost * cost for cost in found)

    sizes = balanced(costs, stages)
    assert sum(sizes) == len(layers) and min(sizes) > 0 and len(sizes) == stages
    assert quality(sizes) == min(map(quality, every))


def test_ends_weigh_in():
    """A head as heavy as 2.5 layers leaves the last stage fewer; equal costs leave later stages more."""
    assert balanced(Costs(0, (1.0,) * 32, 2.5), 4) == [8, 9, 9, 6]
    assert balanced(Costs(3, (1.0,) * 9, 0), 3) == [1, 4, 4]
    assert balanced(Costs(0, (1.0,) * 10, 0), 4) == [2, 2, 3, 3]


@pytest.mark.parametrize("tied", [False, True])
def test_costs_of_a_model(tied):
    """Work adds up to a third of the model's training FLOPs; weights to its parameters, and a tied head to a copy more."""
    model = ModelSpec(layers=6, hidden=64, heads=4, kv_heads=2, vocab=1000, tied=tied, qkv_bias=True, window=40)
    forward = work(model, sequence=128)
    assert forward.first + sum(forward.layers) + forward.last == pytest.approx(flops_per_token(model, 128) / 3)
    assert len(set(forward.layers)) == 1 and forward.last == 2 * 1000 * 64
    held = weights(model)
    assert held.first + sum(held.layers) + held.last == parameter_count(model) + tied * 1000 * 64
    assert held.first == 1000 * 64 and held.last == 1000 * 64 + 64


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("9-8-8", "has 3 stages, the pipeline 4; 8-8-8-8 would do"),
        ("9-8-8-8", "adds up to 33 layers, not 32; 8-8-8-8 would do"),
        ("16-16-0-0", "is not a list of numbers of layers; 8-8-8-8 would do"),
        ("9,8,8,-7", "is not a list"),
        ("9,8,8,x", "is not a list"),
        ("", "is not a list"),
        ("9" * 5000, "is not a list"),
    ],
)
def test_partition_by_hand(text, why):
    assert by_hand("9- 8-8-7", 32, 4) == [9, 8, 8, 7]
    with pytest.raises(RequestError, match=why) as refused:
        by_hand(text, 32, 4, "layout.stages")
    assert refused.value.field == "layout.stages" and len(str(refused.value)) < 200


def test_more_stages_than_layers():
    for cut in (lambda: even(3, 4), lambda: balanced(Costs(1, (1.0,) * 3, 1), 4), lambda: by_hand("1-1-1-0", 3, 4)):
        with pytest.raises(RequestError, match="at most 3 stages would do"):
            cut()


def test_card():
    assert CARD.key == "pp" and CARD.cures == ("compute", "memory") and "bubble" in CARD.cons[0]
