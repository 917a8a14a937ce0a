"""The simulator against the golden numbers of PP-2..10 and closed forms: makespans, bubbles, what is alive, versions."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.axes.pipeline.check import check
from shoal.axes.pipeline.cost import activation_bytes
from shoal.axes.pipeline.dependencies import needs as wants
from shoal.axes.pipeline.dependencies import results
from shoal.axes.pipeline.live import live, live_versions, peaks, uses
from shoal.axes.pipeline.schedules.instruction import Overlap, Place, parts
from shoal.axes.pipeline.schedules.interleaved import interleaved
from shoal.axes.pipeline.schedules.pipedream import pipedream
from shoal.axes.pipeline.schedules.registry import make, names, needs
from shoal.axes.pipeline.simulate import simulate, stage_times

TIME = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0])  # sums of these are exact
FLUSH = [name for name in names() if not name.startswith("pipedream")]


def timed(name, p, m, v=None, **times):
    schedule = make(name, p, m, v)
    return simulate(schedule, stage_times(schedule, **times))


def unfinished(schedule):
    """The most forwards, by rank, whose weight half is not yet done: what the zero-bubble papers count as memory."""
    ones = [1] * schedule.stages
    return [activation_bytes(schedule, rank, ones, ones) for rank in range(schedule.ranks)]


def test_naive_golden():
    """PP-2: p = 4, t_f = 1, t_b = 2."""
    timeline = timed("naive", 4, 1)
    assert timeline.makespan == 12 and timeline.idle == [9] * 4
    assert timeline.bubble == 3.0 and timeline.bubble_fraction == 0.75
    assert timed("naive", 4, 5).makespan == 60 and peaks(make("naive", 4, 5)) == [1] * 4


@pytest.mark.parametrize(("p", "m", "makespan"), [(4, 8, 33), (4, 4, 21), (8, 32, 117)])
def test_gpipe_and_1f1b_golden(p, m, makespan):
    """PP-3, PP-4, PP-6."""
    for name in ("gpipe", "1f1b"):
        timeline = timed(name, p, m)
        assert timeline.makespan == makespan and timeline.idle == [(p - 1) * 3] * p
        assert timeline.bubble == pytest.approx((p - 1) / m)
        assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
        ratio = timeline.bubble
        assert timeline.bubble_fraction == pytest.approx(ratio / (1 + ratio))
    if (p, m) == (4, 8):
        assert (timeline.bubble, round(timeline.bubble_fraction, 4)) == (0.375, 0.2727)


def test_live_golden():
    assert peaks(make("gpipe", 4, 8)) == [8] * 4
    assert peaks(make("1f1b", 4, 8)) == [4, 3, 2, 1]
    assert peaks(make("1f1b", 4, 2)) == [2, 2, 2, 1]  # min(m, p - s)
    assert peaks(make("interleaved", 4, 8, 2))[0] == 11  # 5.5 stages' worth against 1F1B's 4
    for p, m in [(4, 8), (8, 20)]:
        assert peaks(make("dualpipe", p, m)) == [p + 1] * p


def test_1f1b_start_times():
    """PP-4: F(s, i) starts at (s + i) t_f in gpipe. PP-6: B i of stage s at p t_f + i (t_f + t_b) + (p - 1 - s) t_b."""
    for f, b in [(1, 2), (1, 1), (2, 3)]:
        gpipe = timed("gpipe", 4, 6, forward=f, backward=b)
        one_f = timed("1f1b", 4, 6, forward=f, backward=b)
        for s in range(4):
            starts = {str(span.step): span.start for span in gpipe.spans[s]}
            assert all(starts[f"F{i}"] == (s + i) * f for i in range(6))
            starts = {str(span.step): span.start for span in one_f.spans[s]}
            assert all(starts[f"B{i}"] == 4 * f + i * (f + b) + (3 - s) * b for i in range(6))


@pytest.mark.parametrize(
    ("p", "m", "v", "makespan", "idle", "ratio"),
    [(4, 8, 2, 28.5, 4.5, 0.1875), (8, 32, 4, 101.25, 5.25, 0.0547), (4, 16, 4, 50.25, 2.25, 0.0469)],
)
def test_interleaved_golden(p, m, v, makespan, idle, ratio):
    """PP-8, in times of a rank; device 0 holds 1F1B's activations times 1 + (p - 1) / (p v) (Korthikanti et al. 2022)."""
    timeline = timed("interleaved", p, m, v, forward=1 / v, backward=2 / v)
    assert timeline.makespan == makespan and timeline.idle == [idle] * p
    assert timeline.bubble == pytest.approx(ratio, abs=5e-5)
    assert peaks(timeline.schedule) == [min(m * v, 2 * (p - 1 - d) + (v - 1) * p + 1) for d in range(p)]
    assert peaks(timeline.schedule)[0] / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


@pytest.mark.parametrize(("m", "groups", "idle"), [(6, [4, 2], 9.5), (10, [4, 4, 2], 9.5), (7, [4, 3], 5.5)])
def test_a_truncated_last_group_costs_and_longer_groups_do_not(m, groups, idle):
    """PP-8's golden penalties for groups cut short; the schedule as made has none, p | m or not."""
    cut = interleaved(4, m, 2, groups)
    check(cut)
    assert simulate(cut, stage_times(cut, 0.5, 1.0)).idle == [idle] * 4
    assert timed("interleaved", 4, m, 2, forward=0.5, backward=1.0).idle == [4.5] * 4


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 24), st.integers(2, 4), TIME, TIME)
def test_flush_schedules_over_a_grid(p, m, v, f, b):
    """Makespans, bubbles and live counts in closed form, for any p, m, v, t_f, t_b."""
    gpipe, one_f = (timed(name, p, m, forward=f, backward=b) for name in ("gpipe", "1f1b"))
    assert gpipe.makespan == one_f.makespan == (m + p - 1) * (f + b)
    assert timed("naive", p, m, forward=f, backward=b).makespan == m * p * (f + b)
    assert peaks(gpipe.schedule) == [m] * p and peaks(one_f.schedule) == [min(m, p - s) for s in range(p)]
    loops = timed("interleaved", p, m, v, forward=f, backward=b)
    broad = timed("breadth-first", p, m, v, forward=f, backward=b)
    if m >= p:
        assert loops.idle == broad.idle == [(p - 1) * (f + b)] * p  # of a chunk, 1 / v of a rank's
    else:
        assert loops.bubble >= p / m - 1 - 1e-12  # one micro-batch takes p ranks' time, whatever v
    largest = m if m < 2 * p else -(-m // (m // p))
    assert peaks(loops.schedule) == [min(m * v, 2 * (p - 1 - d) + (v - 1) * largest + 1) for d in range(p)]
    assert peaks(broad.schedule) == [m * v] * p


def test_interleaved_cannot_beat_the_way_of_one_micro_batch():
    """PP-8: p = 8, m = 1, v = 8 gives 7.0, not 0.875."""
    assert timed("interleaved", 8, 1, 8).bubble == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("p", "m", "hidden", "makespan", "idle"),
    [(4, 8, 0, 26, [2] * 4), (8, 20, 0, 66, [6] * 8), (8, 20, 0.5, 59, [3.5, 4, 4.5, 4.5, 4.5, 4.5, 4, 3.5])],
)
def test_dualpipe_golden(p, m, hidden, makespan, idle):
    """PP-10: F = 1, B = 2, W = 1, F&B = 3 or 2.5: (p/2 - 1)(F&B + B - 3W), on the middle ranks where F&B < F + B."""
    timeline = timed("dualpipe", p, m, hidden=hidden)
    assert timeline.makespan == makespan and timeline.idle == idle
    assert timed("1f1b", 8, 20).idle == [21] * 8  # what PP-10 compares with


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 11), (8, 16)])
def test_dualpipe_v_is_half_of_dualpipe(p, m):
    """Folded: the bubble of DualPipe on twice the ranks, and as many chunks alive."""
    folded, whole = timed("dualpipe-v", p, m), timed("dualpipe", 2 * p, 2 * m)
    assert folded.makespan == whole.makespan and folded.idle == whole.idle[:p]
    assert peaks(folded.schedule) == [2 * p + 1] * p


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 20), TIME, TIME, TIME)
def test_zero_bubble_h1(p, extra, f, i, w):
    """Qi et al. 2023, table 1: (p - 1)(F + I - W), with 1F1B's peak of p micro-batches on every stage."""
    m = p + extra
    timeline = timed("zb-h1", p, m, forward=f, backward=i + w, weight=w)
    if w <= min(f, i):
        assert timeline.idle == [(p - 1) * (f + i - w)] * p
    assert timeline.makespan <= timed("1f1b", p, m, forward=f, backward=i + w).makespan
    assert unfinished(timeline.schedule) == [p] * p and peaks(timeline.schedule) == [p - s for s in range(p)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 20), TIME, TIME, TIME)
def test_zero_bubble_h2(p, extra, f, i, w):
    """The same table: (p - 1)(F + I - 2W), nothing for F = I = W, with 2p - 1 micro-batches on every stage."""
    m = 2 * p - 1 + extra
    timeline = timed("zb-h2", p, m, forward=f, backward=i + w, weight=w)
    if w <= min(f, i) and i <= 2 * w:
        assert max(timeline.standstill) == (p - 1) * max(f + i - 2 * w, 0)
        assert timeline.idle == [(p - 1) * f] * p
    assert unfinished(timeline.schedule) == [2 * p - 1] * p
    assert timed("zb-h2", p, m).standstill == [0] * p


@pytest.mark.parametrize("p", range(1, 17))
def test_zero_bubble_v(p):
    """F = I = W: hardly a bubble with 1F1B's memory, 2p chunks; only the way to the last rank and one tick remain."""
    for m in (2 * p, 2 * p + 1, 4 * p):
        timeline = timed("zb-v", p, m)
        assert max(timeline.standstill) <= 1 and timeline.idle == [p - 1] * p
        assert max(unfinished(timeline.schedule)) == 2 * p
    for m in (1, max(1, p // 2), p):
        assert max(unfinished(make("zb-v", p, m))) <= 2 * p


def test_zero_bubble_schedules_beat_1f1b():
    """p = 4, m = 12, F = I = W = 1: the order of the paper's figures."""
    idle = {name: timed(name, 4, 12).idle[0] for name in ("1f1b", "zb-h1", "zb-h2")}
    assert idle == {"1f1b": 9, "zb-h1": 3, "zb-h2": 3}
    assert max(timed("zb-h1", 4, 12).standstill) == 3 and max(timed("zb-h2", 4, 12).standstill) == 0


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(names()),
    st.integers(1, 6),
    st.integers(1, 13),
    st.integers(0, 2),
    st.data(),
    st.sampled_from([0.0, 0.5]),
)
def test_timelines_keep_every_rule(name, p, m, transfer, data, hidden):
    """Uneven stages: nothing overlaps on a rank, nothing starts before what it needs has come, and nothing starts late."""
    recipe = needs(name)
    p += recipe.even and p % 2
    m = max(m + (recipe.even and m % 2), recipe.rounds * p)
    schedule = make(name, p, m)
    times = [data.draw(st.lists(TIME, min_size=schedule.stages, max_size=schedule.stages)) for _ in range(3)]
    f, i, w = times
    duration = stage_times(schedule, f, [a + b for a, b in zip(i, w, strict=True)], w, recompute=f, hidden=hidden)
    timeline = simulate(schedule, duration, transfer)
    ready = {
        result: (span.end, rank)
        for rank, spans in enumerate(timeline.spans)
        for span in spans
        for x in parts(span.step)
        for result in results(rank, x)
    }
    for rank, spans in enumerate(timeline.spans):
        before = 0.0
        for span in spans:
            inputs = [ready[need] for x in parts(span.step) for need in wants(schedule, rank, x)]
            arrived = [end + (transfer if maker != rank else 0) for end, maker in inputs]
            assert span.start == max([before, *arrived])
            assert span.end - span.start == pytest.approx(expected(schedule, rank, span.step, f, i, w, hidden))
            before = span.end
        assert timeline.busy[rank] + timeline.idle[rank] == pytest.approx(timeline.makespan)
        assert 0 <= timeline.standstill[rank] <= timeline.idle[rank] + 1e-9


def expected(schedule, rank, step, f, i, w, hidden):
    """The duration of a step where recomputing costs one more forward."""
    if isinstance(step, Overlap):
        a, b = (expected(schedule, rank, x, f, i, w, hidden) for x in parts(step))
        return a + b - hidden * min(a, b)
    s = schedule.stage_of(rank, step.chunk)
    return {"F": f[s], "B": i[s] + w[s] + f[s], "I": i[s] + f[s], "W": w[s], "U": 0}[step.kind]


def test_recomputing_costs_a_forward_per_backward():
    """PP-5: (m + p - 1)(2 t_f + t_b), that is 4/3 of the time where t_b = 2 t_f."""
    assert timed("gpipe", 4, 8, recompute=1.0).makespan == 11 * 4 == 33 * 4 / 3


def test_uneven_stages_and_transfers_show_as_idle_time():
    """PP-13: a last stage one half longer. By hand for p = 2, m = 2: F 1 and 1.5, B 2 and 3, transfer 0.25."""
    schedule = make("gpipe", 2, 2)
    timeline = simulate(schedule, stage_times(schedule, [1, 1.5], [2, 3]), 0.25)
    assert [(span.start, span.end) for span in timeline.spans[0]] == [(0, 1), (1, 2), (7.5, 9.5), (10.5, 12.5)]
    assert [(span.start, span.end) for span in timeline.spans[1]] == [
        (1.25, 2.75),
        (2.75, 4.25),
        (4.25, 7.25),
        (7.25, 10.25),
    ]
    assert timeline.idle == [6.5, 3.5] and timeline.bubble == 10 / 15 and timeline.bubble_fraction == 10 / 25


def test_what_is_alive_over_time():
    timeline = timed("zb-h1", 2, 2)
    assert [(time, sum(now.held), sum(now.waiting)) for time, now in timeline.live(1)] == [
        (1, 1, 0), (2, 1, 0), (2, 1, 0), (3, 0, 1),  # F0 I0
        (3, 1, 1), (4, 1, 1), (4, 1, 1), (5, 0, 2),  # F1 I1
        (5, 0, 2), (6, 0, 1), (6, 0, 1), (7, 0, 0),  # W0 W1
    ]  # fmt: skip
    for name in FLUSH:
        schedule = make(name, 4, 8)
        for rank in range(4):
            assert not any(live(schedule, rank)[-1][1].held + live(schedule, rank)[-1][1].waiting)


def golden_stages(p, m):
    """PipeDream's versions as goldens/verify2.py counts them: by stage (version at each forward, most versions at once)."""
    for s in range(p):
        warm_up = min(p - 1 - s, m)
        order = [("F", i) for i in range(warm_up)]
        for i in range(m - warm_up):
            order += [("F", warm_up + i), ("B", i)]
        order += [("B", i) for i in range(m - warm_up, m)]
        version, used, at, most = 0, {}, {}, 0
        for kind, i in order:
            if kind == "F":
                used[i] = at[i] = version
            else:
                version += 1
                del used[i]
            most = max(most, len({*used.values(), version}))
        yield at, most


@pytest.mark.parametrize(("p", "m"), [(4, 12), (3, 5), (2, 2), (8, 9)])
def test_pipedream_versions(p, m):
    """PP-7: forward i of stage s sees max(0, i - (p - 1 - s)), its backward the same; p - s versions live."""
    schedule = make("pipedream", p, m)
    seen = defaultdict(dict)
    for use in uses(schedule):
        assert use.backward == use.forward == max(0, use.micro_batch - (p - 1 - use.stage))
        assert use.latest - use.forward == min(use.micro_batch, p - 1 - use.stage)  # off by this if none were kept
        seen[use.stage][use.micro_batch] = use.forward
    golden = list(golden_stages(p, m))
    assert [seen[s] for s in range(p)] == [at for at, _ in golden]
    assert [max(live_versions(schedule, Place(s, 0))) for s in range(p)] == [most for _, most in golden]
    if (p, m) == (4, 12):
        assert [most for _, most in golden] == [4, 3, 2, 1]


def test_pipedream_has_no_bubble_but_the_ramp():
    """PP-7: (p - 1)(t_f + t_b) once, however long it runs; with flush every step pays it."""
    for m in (8, 16, 64):
        assert timed("pipedream", 4, m).idle == [9] * 4


def test_versions_over_time():
    """p = 2, m = 2, stage 0, F F B U B U: two versions from the first update to the second backward's end."""
    timeline = timed("pipedream", 2, 2)
    assert timeline.versions(0) == [(1, 1), (2, 1), (6, 1), (6, 2), (9, 1), (9, 1)]
    assert timed("dualpipe", 2, 4).versions(0)[0][1] == 2  # one of each copy


def test_vertical_sync_and_2bw_versions():
    """Vertical: all stages see max(0, t - p + 1), and p versions live. 2BW: one update late, two versions."""
    vertical, two = make("pipedream-vertical", 4, 12), make("pipedream-2bw", 4, 12)
    assert all(use.forward == max(0, use.micro_batch - 3) for use in uses(vertical))
    assert [max(live_versions(vertical, Place(s, 0))) for s in range(4)] == [4] * 4
    assert all(use.forward == max(0, use.micro_batch // 4 - 1) for use in uses(two))
    assert [max(live_versions(two, Place(s, 0))) for s in range(4)] == [2] * 4
    for p in range(2, 9):
        for group in range(p - 1, p + 3):
            tight = pipedream(p, 4 * group + 1, "2bw", group)
            assert max(max(live_versions(tight, Place(s, 0))) for s in range(p)) == 2
            for use in uses(tight):  # a version that is seen has been made by then
                assert use.forward <= use.latest


def test_2bw_with_small_groups_would_want_a_third_version():
    """Why pipedream() refuses them: with p = 4 and groups of 2, stage 0 has yet to make what its forward wants."""
    small = pipedream(4, 8, "stash", 2)
    forwards_before_update = str(next(x for x in small.orders[0] if x.kind == "U"))
    order = [str(x) for x in small.orders[0]]
    assert order.index("F4") < order.index(forwards_before_update)  # the third group starts before the first is done


def test_flush_has_one_version():
    schedule = make("1f1b", 4, 8)
    assert {(use.forward, use.backward, use.latest) for use in uses(schedule)} == {(0, 0, 0)}
    assert set(live_versions(schedule, Place(0, 0))) == {1}


@pytest.mark.parametrize(
    ("times", "fault"),
    [
        ({"forward": [1, 2]}, "forward has 2 times, the schedule 4 stages; one time or 4 would do"),
        ({"recompute": []}, "recompute has 0 times"),
        ({"backward": -1}, "backward = -1.0.* 0 or more would do"),
        ({"update": float("nan")}, "update = nan"),
        ({"forward": [1, 1, float("inf"), 1]}, "forward = 1, 1, inf, 1 is no time"),
        ({"backward": [2, 2, 2, 1], "weight": 1.5}, "weight is a part of backward, but longer in stage 3"),
        ({"hidden": 1.5}, "hidden = 1.5 is no share; 0 to 1 would do"),
    ],
)
def test_times_that_are_none_are_refused(times, fault):
    with pytest.raises(ValueError, match=fault):
        stage_times(make("1f1b", 4, 8), **times)


def test_times_may_come_from_numpy():
    schedule = make("1f1b", 4, 8)
    measured = np.array([1, 1, 1, 1], np.float32)
    assert simulate(schedule, stage_times(schedule, measured, np.float32(2))).makespan == 33
