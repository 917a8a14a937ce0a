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


def gradients(ranks, rank, width, bucket_bytes, micro_batch=0, parameters=None):
    runs = cost.buckets(parameters or inventory(MODEL), bucket_bytes, width)
    sizes = [sum(map(elements, run)) for run in runs]
    return list(cost.gradient_transfers(sizes, ranks, rank, width, micro_batch))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_gradient_bytes_of_all_ranks_are_those_of_a_ring(ranks):
    total = sum(sent(gradients(ranks, rank, 2, 30_000), "backward") for rank in range(ranks))
    assert total == 2 * (ranks - 1) * parameter_count(MODEL) * 2


def test_golden_of_dp_2():
    """2 (N-1)/N of the bytes: 48 parameters in 16 bit on 4 ranks send 144 bytes each."""
    parameters = [p for p in inventory(MODEL) if elements(p) == 48][:1]
    for rank in range(4):
        assert sent(gradients(4, rank, 2, 1e9, parameters=parameters), "backward") == 144


def test_the_loss_needs_two_scalars():
    for rank in range(2):
        transfers = list(cost.loss_transfers(2, rank))
        assert [(t.phase, t.op, t.calls) for t in transfers] == [
            ("forward", "all_reduce", 1),
            ("optimizer", "all_reduce", 1),
        ]
    assert list(cost.loss_transfers(1, 0)) == []


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
    many = gradients(2, 0, 4, size, micro_batches - 1)
    assert abs(sent(many, "backward") - parameter_count(MODEL) * 4) <= 4 * len(many)  # odd buckets round by one
    assert len(many) == len(cost.buckets(inventory(MODEL), size, 4))
    assert {transfer.micro_batch for transfer in many} == {micro_batches - 1}


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
