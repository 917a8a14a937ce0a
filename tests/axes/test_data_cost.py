"""Data parallelism's closed forms against arithmetic done by hand (spec DP-2..5, MEM-1)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.axes.data import cost
from shoal.spec.inventory import elements, inventory, parameter_count
from shoal.spec.model import ModelSpec

MODEL = ModelSpec(layers=3, hidden=48, heads=4, vocab=131)


def sent(transfers, phase):
    return sum(transfer.sent for transfer in transfers if transfer.phase == phase)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_gradient_bytes_of_all_ranks_are_those_of_a_ring(ranks):
    steps = [
        list(cost.step_transfers(inventory(MODEL), ranks, rank, width=2, bucket_bytes=30_000)) for rank in range(ranks)
    ]
    assert sum(sent(step, "backward") for step in steps) == 2 * (ranks - 1) * parameter_count(MODEL) * 2


def test_golden_of_dp_2():
    """4 Psi (N-1)/N bytes in 16 bit: 1000 parameters on 4 ranks send 3000 bytes each."""
    parameters = [p for p in inventory(MODEL) if elements(p) == 48][:1] * 1
    (bucket,) = cost.buckets(parameters, 1e9, 2)
    assert sum(map(elements, bucket)) == 48
    for rank in range(4):
        transfers = cost.step_transfers(parameters, 4, rank, width=2, bucket_bytes=1e9)
        assert sent(list(transfers), "backward") == 2 * 3 * 48 * 2 // 4


@given(size=st.floats(1, 1e6), width=st.sampled_from([2, 4, 8]))
def test_buckets_partition_the_parameters_from_last_to_first(size, width):
    parameters = inventory(MODEL)
    runs = cost.buckets(parameters, size, width)
    assert [p for run in runs for p in run] == list(reversed(parameters))
    for run in runs[:-1]:
        assert sum(map(elements, run)) * width >= size
        assert sum(map(elements, run[:-1])) * width < size


@given(size=st.floats(1, 1e6), micro_batches=st.integers(1, 8))
def test_bytes_do_not_depend_on_buckets_or_accumulation(size, micro_batches):
    many = list(cost.step_transfers(inventory(MODEL), 2, 0, width=4, bucket_bytes=size, micro_batches=micro_batches))
    backward = [transfer for transfer in many if transfer.phase == "backward"]
    assert abs(sent(many, "backward") - parameter_count(MODEL) * 4) <= 4 * len(backward)  # odd buckets round by one
    assert len(backward) == len(cost.buckets(inventory(MODEL), size, 4))
    assert {transfer.micro_batch for transfer in backward} == {micro_batches - 1}


def test_state_bytes_of_mixed_precision_adam_are_sixteen_per_parameter():
    assert sum(cost.state_bytes(7_000_000_000, "bfloat16").values()) == 112_000_000_000
    assert sum(cost.state_bytes(1_000, "float32").values()) == 16_000


def test_time_saturates_when_communication_is_exposed():
    assert cost.speed_up(8, one_process=80.0, exposed=0.0) == 8
    assert cost.speed_up(8, one_process=80.0, exposed=10.0) == 4
    assert cost.step_time(1.0, 2.0, communication=1.5, tail=0.25) == 3.25
    assert cost.step_time(1.0, 2.0, communication=2.5, tail=0.25) == 3.75
    assert cost.hides(8, tokens=4096, flops=4e14, bandwidth=1e11) is True  # 0.875 x 4000 <= 4096
    assert cost.hides(8, tokens=3000, flops=4e14, bandwidth=1e11) is False
