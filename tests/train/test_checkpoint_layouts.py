"""What one layout saved any other continues, and nobody can tell from the numbers."""

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from checkpoints import continued, error, run, run_each, small, whole
from shoal.plan.traffic import step_transfers, times
from shoal.spec.layout import Layout
from shoal.train.checkpoint.folder import CHECKPOINTS, path_of
from shoal.train.checkpoint.index import read_index
from shoal.verify.audit import audit

LAYOUTS = [
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=3",
    "tp=2,sp",
    "tp=2x2",
    "pp=2,schedule=interleaved",
    "cp=2",
    "dp=2,tp=2,pp=2,zero=2",
]


def folder(job):
    return Path(job.train.out) / CHECKPOINTS


def size(layout):
    return Layout.parse(layout).world


@pytest.fixture(scope="module")
def truth(pool, tmp_path_factory):
    """The run of one process that nothing interrupts."""
    return pool.run(run, 1, small("dp=1", tmp_path_factory.mktemp("truth")), 6)


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """By layout, a job that ended after three of its six steps, with a checkpoint."""
    jobs = {layout: small(layout, tmp_path_factory.mktemp("saved"), save_every=3) for layout in LAYOUTS}
    for layout, job in jobs.items():
        pool.run(run, size(layout), job, 3)
    return jobs


@pytest.fixture(scope="module")
def continuations(pool, saved, tmp_path_factory):
    """By (layout that saved, layout that goes on), what each rank of the latter saw."""
    found = {}
    for later in LAYOUTS:
        out = tmp_path_factory.mktemp("continued")
        others = [layout for layout in LAYOUTS if layout != later]
        jobs = [continued(saved[layout], later, out, save_every=0) for layout in others]
        by_rank = pool.run(run_each, size(later), jobs, 6)
        found.update({(first, later): list(ran) for first, ran in zip(others, zip(*by_rank, strict=True), strict=True)})
    return found


@pytest.mark.parametrize(("first", "later"), list(permutations(LAYOUTS, 2)))
def test_a_continued_run_equals_the_uninterrupted_one(continuations, truth, first, later):
    rans = continuations[first, later]
    assert [ran.started for ran in rans] == [3] * len(rans)
    for ran in rans:
        np.testing.assert_allclose(ran.losses, truth[0].losses[3:], rtol=1e-12)
    assert error(whole(rans), whole(truth)) < 1e-10
    ledger = audit([times(step_transfers(small(later, "any"), 0), 3)], [rans[0].sent])
    assert all(row.ok for row in ledger), "going on costs no transfer that training does not"


def forget_moments(trainer):
    for states in trainer.optimizer.states:
        states["moment1"].zero_()


def forget_updates(trainer):
    trainer.optimizer.restored(0)


def other_weights(trainer):
    next(iter(trainer.optimizer.kept()))["weight"][0] += 1e-6


def other_data(trainer):
    whole_batch = trainer.batches.batch
    trainer.batches.batch = lambda step: whole_batch(step + 1)


@pytest.mark.parametrize("meddle", [forget_moments, forget_updates, other_weights, other_data])
def test_what_is_not_restored_shows(pool, saved, truth, tmp_path, meddle):
    rans = pool.run(run, 2, continued(saved["dp=2"], "dp=2,zero=1", tmp_path, save_every=0), 6, meddle)
    assert error(whole(rans), whole(truth)) > 1e-8
    assert abs(rans[0].losses[-1] - truth[0].losses[-1]) > 1e-12


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_is_written_once_and_replicas_share_the_work(saved, layout):
    job = saved[layout]
    index = read_index(path_of(folder(job), 3))
    elements = sum(int(np.prod(stored.shape)) for stored in index.tensors.values())
    written = [file.size - file.head for file in index.files]
    assert sum(written) == 8 * elements
    assert len(written) == size(layout) and max(written) < 1.35 * min(written)
    assert json.loads((path_of(folder(job), 3) / "index.json").read_text())["body"]["step"] == 3
