"""Every bit of a run's state comes back, under whatever layout: weights, masters, moments, buffers, the count of updates."""

import numpy as np
import pytest
import torch

from checkpoints import continued, error, run, small, whole
from shoal.spec.layout import Layout
from shoal.train.checkpoint.folder import CHECKPOINTS, path_of
from shoal.train.checkpoint.index import read_index

MOE = {
    "tied": False,
    "moe": {"experts": 4, "top_k": 2, "expert_ffn": 8, "shared_experts": 1, "bias": True, "first_dense": 1},
}
LAYOUTS = [
    ("dp=4,hsdp=2,zero=3", {}),
    ("dp=3,zero=2,micro_batches=2", {"batch": 12}),
    ("tp=4", {}),  # two ranks keep each KV head
    ("cp=2,dp=2,zero=1", {}),
    ("pp=4", {}),
    ("pp=2,schedule=dualpipe", {}),  # every stage twice
    ("pp=2,tp=2,zero=3,dp=2", {}),
    ("dp=2,zero=2", {"dtype": "bfloat16"}),
    ("tp=2,sp,dp=2,zero=3", {"dtype": "bfloat16", "reduce_dtype": "float32"}),
    ("dp=2,zero=1", {"offload": "host"}),
    ("dp=2,zero=3", {"offload": "disk", "dtype": "bfloat16"}),
    ("dp=2", {"async_save": False}),
    ("pp=2,schedule=pipedream", {"clip": 0, "model": {"tied": False}}),
    ("dp=4,ep=2,zero=3", {"model": MOE}),
    ("dp=8,ep=2,hsdp=2,zero=3", {"model": MOE}),
    ("pp=2,dp=2,ep=2", {"model": MOE}),
    ("tp=2,ep=2", {"model": MOE, "dtype": "bfloat16"}),
]


def buffered(trainer):
    """Two buffers, as a router has one; those of a run that continues another are yet to be read."""
    fresh = trainer.job.train.resume == "never"
    trainer.model.register_buffer("load", torch.tensor([0.5, -0.25, 3.0]) * fresh)
    trainer.model.register_buffer("count", torch.tensor(9 * fresh))


def same_bits(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not np.array_equal(one[name], other[name])]


@pytest.mark.parametrize(("layout", "train"), LAYOUTS, ids=[f"{layout} {train}" for layout, train in LAYOUTS])
def test_one_process_reads_every_bit_and_the_layout_reads_them_back(pool, tmp_path, layout, train):
    ranks = Layout.parse(layout).world
    first = small(layout, tmp_path / "first", save_every=2, **train)
    alone = continued(first, "dp=1", tmp_path / "alone", offload="none", reduce_dtype="same", save_every=1)
    again = continued(alone, layout, tmp_path / "again", save_every=0)
    before = whole(pool.run(run, ranks, first, 2, None, buffered))
    read = pool.run(run, 1, alone, 2, None, buffered)
    assert read[0].started == 2 and read[0].losses == []
    assert same_bits(whole(read), before) == []
    assert {name.split("/")[0] for name in before} == {"weight", "moment1", "moment2", "buffer"}
    assert before["buffer/count"] == 9 and before["buffer/load"].tolist() == [0.5, -0.25, 3.0]
    # and the other way: one process goes on for a step, then the layout does
    after = whole(pool.run(run, 1, alone, 3, None, buffered))
    assert same_bits(whole(pool.run(run, ranks, again, 3, None, buffered)), after) == []
    updates = [
        read_index(path_of(tmp_path / out / CHECKPOINTS, step)).updates for out, step in (("first", 2), ("alone", 3))
    ]
    assert updates[0] >= 2 and updates[1] == updates[0] + 1, "pipedream updates more than once a step"


def test_bfloat16_goes_on_to_the_bit_and_keeps_its_masters(pool, tmp_path):
    job = small("dp=2,zero=2", tmp_path / "first", save_every=2, dtype="bfloat16")
    through = pool.run(run, 2, job, 4)
    for layout in ("dp=2,zero=2", "dp=2,zero=3", "dp=2"):
        step_two = path_of(tmp_path / "first" / CHECKPOINTS, 2)
        later = pool.run(run, 2, continued(job, layout, tmp_path / layout, save_every=0, resume=str(step_two)), 4)
        assert later[0].losses == through[0].losses[2:]
        assert same_bits(whole(later), whole(through)) == []
    index = read_index(step_two)
    assert {stored.dtype for stored in index.tensors.values()} == {"float32"}, "masters, and no weights beside them"


def test_experts_in_replicas_go_on_without_and_come_back(pool, tmp_path):
    """The losses and states of one process, whichever of the two had the steps before."""
    hybrid, plain = "dp=4,ep=2,hsdp=2,zero=3", "dp=2,ep=2"
    alone = pool.run(run, 1, small("dp=1", tmp_path / "alone", model=MOE), 6)
    for there, back in ((hybrid, plain), (plain, hybrid)):
        first = small(there, tmp_path / there / "first", model=MOE, save_every=2)
        second = continued(first, back, tmp_path / there / "second", save_every=4)
        third = continued(second, there, tmp_path / there / "third", save_every=0)
        losses = []
        for job, stop in ((first, 2), (second, 4), (third, 6)):
            rans = pool.run(run, job.layout.world, job, stop)
            assert rans[0].started == stop - 2 and all(ran.losses == rans[0].losses for ran in rans)
            losses += rans[0].losses
        np.testing.assert_allclose(losses, alone[0].losses, rtol=1e-12)
        assert error(whole(rans), whole(alone)) < 1e-10


def test_more_steps_follow_the_schedule_of_the_longer_run(pool, tmp_path):
    """A constant rate, so that the shorter run did what the longer one does."""
    flat = {"schedule": "constant"}
    short = small("dp=2", tmp_path / "short", save_every=3, steps=3, **flat)
    pool.run(run, 2, short, 3)
    longer = continued(short, "tp=2", tmp_path / "longer", steps=6, save_every=0)
    rest = pool.run(run, 2, longer, 6)
    uninterrupted = pool.run(run, 1, small("dp=1", tmp_path / "whole", **flat), 6)
    np.testing.assert_allclose(rest[0].losses, uninterrupted[0].losses[3:], rtol=1e-12)
