"""What expert parallelism costs, against the spec's figures, brute force and its own closed forms."""

import itertools
import math

import numpy as np
import pytest

from shoal.axes.expert import cost
from shoal.axes.expert.card import CARD


def random_routing(tokens, top_k, experts, ranks, seed):
    """Every rank's tokens, each with k different experts, all sets equally likely."""
    random = np.random.default_rng(seed)
    return [random.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :top_k] for _ in range(ranks)]


def test_experts_see_n_times_the_tokens():
    """EP-2: B = 4096, k = 2, E = 256, N = 32: 32 -> 1024, and scaled down in a histogram."""
    assert cost.tokens_per_expert(4096, 2, 256, 32) == (32, 1024)
    chosen = random_routing(128, 2, 32, 8, seed=0)
    alone = [np.bincount(table.ravel(), minlength=32) for table in chosen]
    load = cost.load(chosen, 32)
    assert load.sum() == 8 * 128 * 2
    assert (np.mean(alone), load.mean()) == cost.tokens_per_expert(128, 2, 32, 8) == (8, 64)


def test_every_expert_has_one_owner():
    """EP-1: 256 / 32 = 8 and 64 / 8 = 8 experts per rank."""
    assert len(cost.experts_of(256, 32, 5)) == len(cost.experts_of(64, 8, 0)) == 8
    assert [e for rank in range(4) for e in cost.experts_of(12, 4, rank)] == list(range(12))


@pytest.mark.parametrize("duplicate_free", [False, True])
def test_rows_are_those_that_a_loop_counts(duplicate_free):
    chosen = random_routing(17, 3, 8, 4, seed=1)
    chosen[2][5:9, 1] = chosen[1][0] = -1
    rows = np.zeros((4, 4), dtype=int)
    for source, table in enumerate(chosen):
        for token in table:
            to = [expert // 2 for expert in token if expert >= 0]
            for rank in set(to) if duplicate_free else to:
                rows[source, rank] += 1
    assert (cost.rows_between(chosen, 8, duplicate_free) == rows).all()


@pytest.mark.parametrize("duplicate_free", [False, True])
@pytest.mark.parametrize(
    ("experts", "top_k", "ranks"), [(6, 2, 3), (8, 3, 2), (8, 4, 4), (4, 1, 4), (8, 8, 2), (6, 2, 1)]
)
def test_closed_forms_are_the_mean_over_all_routings(experts, top_k, ranks, duplicate_free):
    """EP-4, by counting every set of k experts."""
    size = experts // ranks
    sets = list(itertools.combinations(range(experts), top_k))
    remote = [[e // size for e in chosen if e // size != 0] for chosen in sets]
    mean = sum(len(set(to)) if duplicate_free else len(to) for to in remote) / len(sets)
    assert cost.expected_remote_rows(1, top_k, experts, ranks, duplicate_free) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("duplicate_free", [False, True])
@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(16, 2, 4), (64, 8, 8), (8, 1, 8)])
def test_random_routings_lie_near_the_closed_forms(experts, top_k, ranks, duplicate_free):
    """Within 2 %, the mean over routings of the bytes that `token_transfers` counts."""
    tokens, hidden, width = 200, 16, 2
    sent = []
    for seed in range(10):
        chosen = random_routing(tokens, top_k, experts, ranks, seed)
        for rank in range(ranks):
            planned = cost.token_transfers(
                chosen, experts, hidden, width, rank, duplicate_free=duplicate_free, weight_width=0
            )
            sent.append(sum(t.sent for t in planned))
    row = hidden * width
    mean = 4 * row * cost.expected_remote_rows(tokens, top_k, experts, ranks, duplicate_free)
    assert np.mean(sent) == pytest.approx(mean, rel=0.02)
    if not duplicate_free:
        assert mean == cost.expected_bytes(tokens, top_k, hidden, width, ranks)


def test_the_specs_example():
    """T = 1000, k = 2, h = 16, N = 4, fp16: 48,000 B on average in one all-to-all."""
    assert cost.expected_bytes(1000, 2, 16, 2, 4, passes=1) == 48_000
    chosen = random_routing(1000, 2, 8, 4, seed=3)
    one_pass = [next(cost.token_transfers(chosen, 8, 16, 2, rank)).sent for rank in range(4)]
    assert np.mean(one_pass) == pytest.approx(48_000, rel=0.02)


def test_local_and_remote_extremes():
    home = [np.tile([2 * rank, 2 * rank + 1], (10, 1)) for rank in range(4)]
    away = home[1:] + home[:1]
    row = 16 * 2
    for free in (False, True):
        for rank in range(4):
            assert (
                sum(t.sent + t.received for t in cost.token_transfers(home, 8, 16, 2, rank, duplicate_free=free)) == 0
            )
        sent = [t.sent for t in cost.token_transfers(away, 8, 16, 2, 0, duplicate_free=free, weight_width=4)]
        assert sorted(sent, reverse=True)[:4] == [10 * row * (1 if free else 2)] * 4
    assert list(cost.token_transfers(home[:1], 2, 16, 2, 0)) == list(cost.plan_transfers(home[:1], 2, 0)) == []


@pytest.mark.parametrize("duplicate_free", [False, True])
def test_what_one_sends_another_receives(duplicate_free):
    chosen = random_routing(9, 3, 8, 4, seed=2)
    every = [
        [*cost.token_transfers(chosen, 8, 16, 2, rank, duplicate_free=duplicate_free),
         *cost.plan_transfers(chosen, 8, rank, duplicate_free=duplicate_free)]
        for rank in range(4)
    ]  # fmt: skip
    for calls in zip(*every, strict=True):
        assert sum(t.sent for t in calls) == sum(t.received for t in calls) > 0
    phases = [t.phase for t in every[0]]
    weights = 1 if duplicate_free else 0
    assert phases.count("forward") == 2 + weights + (2 if duplicate_free else 1)
    assert phases.count("backward") == 2 + weights
    forward, backward = ([t for t in every[0] if t.phase == phase] for phase in ("forward", "backward"))
    both = {t.sent for t in forward} & {t.sent for t in backward}
    assert len(both) >= 2, "backward mirrors forward"


def test_capacity_is_rounded_up():
    assert cost.capacity(1.0, 8, 2, 5) == 4 and cost.capacity(1.25, 64, 2, 8) == 20
    assert cost.capacity(1e-05, 8, 2, 5) == 1


def test_capacity_is_not_rounded_up_from_what_floats_add():
    """1.1 x 100 / 10 is 11.000000000000002 in floats; with a tenth in the factor and tokens that divide, it is exact."""
    for tenths in range(1, 40):
        for mean in (1, 10, 30, 70):
            expected = -(-tenths * mean // 10)
            assert cost.capacity(tenths / 10, mean * 8, 1, 8) == expected
            assert cost.capacity(tenths / 10, mean * 4, 2, 8) == expected


def test_experts_memory_is_divided():
    """DeepSeek-V3: 256 experts of 7168 x 2048, three matrices: 11.27 G parameters a layer, 1/32 of it on 32 ranks."""
    whole = cost.expert_parameters(256, 7168, 2048)
    assert whole == 256 * 3 * 7168 * 2048 == 32 * cost.expert_parameters(256, 7168, 2048, ranks=32)
    assert cost.expert_parameters(8, 64, 30, etp=4) == 8 * 3 * 64 * 8  # filled up to 8 columns


def test_ranking_of_links():
    """EP-6: EP over TP is k / 2N in forward, from the bytes of both; DeepSeek-V3 on 64 ranks."""
    tokens, hidden, width, top_k, ranks = 4096, 512, 2, 8, 4
    each = tokens // ranks
    expert = cost.expected_bytes(each, top_k, hidden, width, ranks, passes=2)
    tensor = 2 * 2 * (ranks - 1) / ranks * tokens * hidden * width
    boundary = tokens * hidden * width
    found = cost.placement(top_k, ranks, layers=10)
    assert found.over_tensor == pytest.approx(expert / tensor) == top_k / (2 * ranks)
    assert found.over_pipeline == pytest.approx(10 * expert / boundary)
    assert cost.placement(8, 64, 58).over_tensor == 1 / 16 and cost.placement(8, 4, 1).over_tensor == 1
    assert cost.placement(1, 64, 8).over_pipeline < 1 < cost.placement(8, 64, 58).over_pipeline


def test_groups_over_machines():
    within, across = cost.across_machines(1000, 2, 16, 2, ranks=16, per_machine=8)
    assert within + across == pytest.approx(cost.expected_bytes(1000, 2, 16, 2, 16, passes=1))
    assert across / within == 8 / 7
    assert cost.all_to_all_time(within, across, 8 * 1e9, 1e9) == across / 1e9


def test_card_names_the_axis():
    assert CARD.key == "ep" and CARD.primitive == "all_to_all"
    assert math.isfinite(cost.placement(2, 1, 1).over_tensor)
