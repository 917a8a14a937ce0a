"""Every bit of a run's state comes back, under whatever layout: weights, masters, moments, buffers, the count of updates."""

import numpy as np
import pytest

from checkpoints import continued, run, small, whole
from shoal.spec.layout import Layout
from shoal.train.checkpoint.folder import CHECKPOINTS, path_of
from shoal.train.checkpoint.index import read_index

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
]


def buffered(trainer):
    """Two buffers, as a router has one, whose values say what a step has made of them."""
    trainer.model.register_buffer("load", trainer.places.sum() + _tensor([0.5, -0.25, 3.0]))
    trainer.model.register_buffer("count", _tensor(0, "int64"))
    if trainer.job.train.resume == "never":
        trainer.model.load.fill_(1.25)
        trainer.model.count.fill_(9)


def _tensor(value, dtype="float32"):
    import torch

    return torch.tensor(value, dtype=getattr(torch, dtype))


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
    assert before["buffer/count"] == 9 and (before["buffer/load"] == 1.25).all()
    # and the other way: one process goes on for a step, then the layout does
    after = whole(pool.run(run, 1, alone, 3, None, buffered))
    assert same_bits(whole(pool.run(run, ranks, again, 3, None, buffered)), after) == []
    assert read_index(path_of(tmp_path / "alone" / CHECKPOINTS, 3)).updates == 3


def test_bfloat16_goes_on_to_the_bit_and_keeps_its_masters(pool, tmp_path):
    job = small("dp=2,zero=2", tmp_path / "first", save_every=2, dtype="bfloat16")
    through = pool.run(run, 2, job, 4)
    for layout in ("dp=2,zero=2", "dp=2,zero=3", "dp=2"):
        from_two = continued(job, layout, tmp_path / layout, save_every=0)
        step_two = path_of(tmp_path / "first" / CHECKPOINTS, 2)
        from_two = type(job)(
            job.model, from_two.layout, job.machine, job.data, _with(from_two.train, resume=str(step_two))
        )
        later = pool.run(run, 2, from_two, 4)
        assert later[0].losses == through[0].losses[2:]
        assert same_bits(whole(later), whole(through)) == []
    index = read_index(step_two)
    assert {stored.dtype for stored in index.tensors.values()} == {"float32"}, "masters, and no weights beside them"


def _with(train, **changes):
    from dataclasses import replace

    return replace(train, **changes)


def test_more_steps_follow_the_schedule_of_the_longer_run(pool, tmp_path):
    """wsd holds its peak, so a run of three steps that did not yet decay can be made a longer one."""
    flat = {"schedule": "constant"}
    short = small("dp=2", tmp_path / "short", save_every=3, steps=3, **flat)
    pool.run(run, 2, short, 3)
    longer = continued(short, "tp=2", tmp_path / "longer", steps=6, save_every=0)
    rest = pool.run(run, 2, longer, 6)
    uninterrupted = pool.run(run, 1, small("dp=1", tmp_path / "whole", **flat), 6)
    np.testing.assert_allclose(rest[0].losses, uninterrupted[0].losses[3:], rtol=1e-12)
