"""Costs of context parallelism against the spec's goldens, hand-made cases and brute force (CP-4..8)."""

from dataclasses import replace

import numpy as np
import pytest

from shoal.axes.context import cost
from shoal.axes.context.card import GATHER, HYBRID, RING, ULYSSES
from shoal.axes.context.cost import Crossing
from shoal.transfer import Transfer

# CP-4's case: N = 4, b = 2, s = 128, h = 64, two bytes; four heads of 16
GOLDEN = Crossing("ring", 4, 2, 128, 4, 4, 16, width=2, accumulate_width=2)


def sent(cut, phase=None, op=None):
    return sum(t.sent for t in cost.transfers(cut) if phase in (None, t.phase) and op in (None, t.op))


def calls(cut, phase, op):
    return sum(t.calls for t in cost.transfers(cut) if (t.phase, t.op) == (phase, op))


@pytest.mark.parametrize("kind", ["ring", "zigzag", "striped", "allgather"])
def test_golden_bytes_of_a_ring_and_a_gather(kind):
    cut = replace(GOLDEN, kind=kind)
    assert sent(cut, "forward") == 49152
    assert sent(cut) == 6 * 3 * 2 * 128 * 64 * 2 // 4 == 3 * 49152  # the least there is: sums as wide as the rest
    wide = replace(cut, accumulate_width=4)
    assert sent(wide, "forward") == 49152 and sent(wide, "backward") == 3 * 49152
    assert sent(replace(cut, kv_heads=1)) == 3 * 49152 // 4, "keys and values are never expanded"


def test_a_ring_of_n_makes_n_minus_1_transfers():
    for ranks in (1, 2, 4, 8):
        cut = replace(GOLDEN, ranks=ranks)
        assert calls(cut, "forward", "send") == calls(cut, "forward", "receive") == ranks - 1
        assert calls(cut, "backward", "send") == 2 * (ranks - 1)
    assert list(cost.transfers(replace(GOLDEN, ranks=1))) == []


def test_golden_bytes_of_ulysses():
    cut = replace(GOLDEN, kind="ulysses")
    assert sent(cut, "forward") == sent(cut, "backward") == 24576  # half of the ring's: 2 / P
    assert calls(cut, "forward", "all_to_all") == 2
    # (2 h + 2 h_kv) b s (P-1)/P^2 elements; one KV head is sent to all four
    for kv_heads, kv_width in ((4, 64), (2, 64), (1, 64)):
        assert sent(replace(cut, kv_heads=kv_heads), "forward") == (2 * 64 + 2 * kv_width) * 2 * 128 * 3 // 16 * 2
    eight = Crossing("ulysses", 4, 2, 128, 16, 8, 4, width=2)
    assert sent(eight, "forward") == (2 * 64 + 2 * 32) * 2 * 128 * 3 // 16 * 2


def test_a_hybrid_is_both():
    cut = Crossing("hybrid", 4, 1, 16, 4, 2, 8, width=2, accumulate_width=4, ulysses=2)
    # to 1 other rank: 4 tokens of 2 + 2 x 1 heads, and of 2 heads back; a block: k and v of 8 tokens, 1 head
    assert list(cost.transfers(cut, 5, 1)) == [
        Transfer("forward", "ulysses", "all_to_all", 4 * 6 * 8 * 2, 4 * 6 * 8 * 2, 2, 5, 1),
        Transfer("forward", "ring", "send", 2 * 8 * 8 * 2, 0, 1, 5, 1),
        Transfer("forward", "ring", "receive", 0, 2 * 8 * 8 * 2, 1, 5, 1),
        Transfer("backward", "ulysses", "all_to_all", 4 * 6 * 8 * 2, 4 * 6 * 8 * 2, 2, 5, 1),
        Transfer("backward", "ring", "send", 2 * 8 * 8 * (2 + 4), 0, 2, 5, 1),
        Transfer("backward", "ring", "receive", 0, 2 * 8 * 8 * (2 + 4), 2, 5, 1),
    ]
    assert [t.axis for t in cost.transfers(replace(cut, ulysses=4), 0, 0)] == ["ulysses"] * 2
    around = list(cost.transfers(replace(cut, ulysses=1), 0, 0))
    zigzag = list(cost.transfers(replace(cut, kind="zigzag", ulysses=1), 0, 0))
    assert [replace(t, axis="cp") for t in around] == zigzag


def test_evaluations_make_a_forward_s_transfers():
    for kind in ("zigzag", "allgather", "ulysses"):
        cut = replace(GOLDEN, kind=kind)
        forward = [t for t in cost.transfers(cut) if t.phase == "forward"]
        assert [(t.phase, t.axis, t.op, t.sent, t.received, t.calls) for t in cost.evaluation_transfers(cut, 3)] == [
            ("evaluate", t.axis, t.op, 3 * t.sent, 3 * t.received, 3 * t.calls) for t in forward
        ]
        assert list(cost.evaluation_transfers(cut, 0)) == []


def test_a_window_spares_transfers_of_a_contiguous_ring():
    cut = replace(GOLDEN, ranks=8, window=17)  # shares of 16: only the one before is seen
    assert calls(cut, "forward", "send") == 1 and calls(cut, "backward", "send") == 2
    assert sent(cut, "forward") * 7 == sent(replace(cut, window=None), "forward")


def test_memory_by_hand():
    cut = replace(GOLDEN, kv_heads=2, accumulate_width=4)  # 32 tokens of 2 sequences here
    # q and out of 64, k and v of 32 elements a token, two bytes each, and 4 heads' log-sum-exp of 4 bytes
    assert cost.saved_bytes(cut) == 2 * 32 * ((64 + 64 + 32 + 32) * 2 + 4 * 4)
    assert cost.saved_bytes(replace(cut, ranks=1)) == 4 * cost.saved_bytes(cut)
    block = 2 * 2 * 32 * 32
    assert cost.travelling_bytes(cut) == {"blocks": 2 * block * 2, "gradients": 4 * block * 4}
    assert cost.travelling_bytes(replace(cut, kind="allgather"))["blocks"] == 4 * block * 2
    assert cost.travelling_bytes(replace(cut, kind="ulysses"))["blocks"] == 0


def test_balance():
    def of(kind, sequence=64, ranks=4, **other):
        return cost.imbalance(Crossing(kind, ranks, 1, sequence, 4, 4, 8, **other))

    assert of("ring") == {"rank": 904 / 520, "step": 904 / 520}
    assert of("zigzag") == of("allgather") == of("ulysses") == {"rank": 1, "step": 1}
    assert of("striped") == {"rank": 544 / 520, "step": 544 / 520}
    assert of("ring", causal=False) == {"rank": 1, "step": 1}
    assert of("ring", 8192)["rank"] == pytest.approx(7 / 4, rel=1e-3)  # (2N - 1)/N
    hybrid = cost.pairs(Crossing("hybrid", 8, 1, 64, 4, 4, 8, ulysses=2))
    assert hybrid.shape == (4, 4) and (hybrid.sum(1) == 520).all()


def test_overlap_threshold():
    """Where hiding just succeeds, 4 c^2 h flops take as long as 2 c h_kv width bytes."""
    flops, bandwidth, h = 3e14, 4e11, 4096
    for width, share in ((2, 1.0), (2, 0.25), (4, 1.0)):
        tokens = cost.hiding_tokens(flops, bandwidth, width, share)
        assert 4 * tokens**2 * h / flops == pytest.approx(2 * tokens * h * share * width / bandwidth)
    assert cost.hiding_tokens(flops, bandwidth, 2) == flops / bandwidth


def test_timeline_of_equal_ranks_is_the_closed_form():
    for compute, transfer in ((3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (1.0, 0.0)):
        start, end = cost.ring_timeline(np.full((4, 4), compute), transfer)
        assert (end[:, -1] == 3 * max(compute, transfer) + compute).all() and (start[:, 0] == 0).all()


def test_timeline_by_hand():
    """Two ranks; the second's block is late because the first computes longer, and the exchange waits for nobody else."""
    start, end = cost.ring_timeline([[5.0, 1.0], [1.0, 1.0]], 2.0)
    assert start.tolist() == [[0, 5], [0, 2]] and end.tolist() == [[5, 6], [1, 3]]
    # three ranks: the slow first step of rank 0 delays its exchange of step 1 with both neighbours
    start, _ = cost.ring_timeline([[5.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], 2.0)
    assert start[:, 1].tolist() == [5, 2, 2] and start[:, 2].tolist() == [7, 7, 7]


def test_a_contiguous_ring_takes_as_long_as_its_last_rank():
    for kind, units in (("ring", 904), ("zigzag", 520)):
        _, end = cost.ring_timeline(cost.pairs(Crossing(kind, 4, 1, 64, 1, 1, 1)), 0.0)
        assert end[:, -1].max() == units


def test_which_scheme_sends_least():
    """DP < CP < TP from 12 h tokens on, DP < TP from 3 h; measured by the formulas on both sides of the thresholds."""
    h, crossings = 1024, cost.crossovers(1024)
    assert crossings == {"dp": 3 * h, "cp": 12 * h}
    for tokens, order in ((2 * h, "tp dp cp"), (6 * h, "dp tp cp"), (13 * h, "dp cp tp")):
        sizes = cost.scheme_elements(8, tokens, h)
        assert sorted(("dp", "cp", "tp"), key=sizes.__getitem__) == order.split()
        assert sizes["cp activations"] < sizes["tp"]
        assert sizes["dp"] == 24 * h**2 * 7 / 8
    at = cost.scheme_elements(8, 12 * h, h)
    assert at["cp"] == at["tp"]
    grouped = cost.crossovers(h, kv_hidden=h // 4, parameters=9 * h**2)
    sizes = cost.scheme_elements(4, grouped["cp"], h, h // 4, 9 * h**2)
    assert sizes["cp"] == pytest.approx(sizes["tp"])


def test_scheme_elements_are_the_transfers():
    """One sequence of G tokens: cp's activations are what `transfers` counts, for sums as wide as the rest."""
    cut = Crossing("zigzag", 8, 1, 4096, 16, 4, 64, width=1, accumulate_width=1)
    assert sent(cut) == cost.scheme_elements(8, 4096, 1024, 256)["cp activations"]


def test_cards_name_kinds_that_a_layout_takes():
    from shoal.spec.layout import Layout

    for card in (RING, GATHER, ULYSSES, HYBRID):
        assert Layout.parse(f"cp=4,{card.key}").cp == 4
