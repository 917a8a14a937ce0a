"""Runs that save and continue, on made-up tokens: what the tests of checkpoints share."""

from dataclasses import dataclass, replace
from math import nan

import numpy as np

from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.plan.pieces import mesh_of
from shoal.spec.build import job_from_tree
from shoal.train.checkpoint.index import Progress
from shoal.train.checkpoint.run import Checkpoints
from shoal.train.trainer import Trainer
from shoal.verify.trial import MadeUpBatches

PROGRESS = Progress(tokens=7, skipped=0, skipped_in_a_row=0, first_loss=5.0, loss=4.0, eval_loss=nan)
DATA = "made up"


def small(layout, out, model=None, **train):
    """A job of six steps, small but with a bit of everything: KV heads shared, an odd vocabulary, tied ends, dropout."""
    tiny = {"preset": "tiny", "layers": 4, "vocab": 61, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24,
            "positions_max": 32, "tied": True, "dropout": 0.1, "qkv_bias": True}  # fmt: skip
    common = {"out": str(out), "steps": 6, "batch": 8, "dtype": "float64", "warmup": 1, "learning_rate": 0.02}
    return job_from_tree(
        {"model": {**tiny, **(model or {})}, "layout": layout, "data": {"sequence": 16}, "train": {**common, **train}}
    )


@dataclass
class Ran:
    """What a rank saw. held: every part of its state as (name, whole shape, offsets, values)."""

    losses: list
    held: list
    sent: list
    started: int


def run(rank, world, job, stop, meddle=None, prepare=None):
    """Trains from where the job says up to step `stop`.

    prepare(trainer): before the start; meddle(trainer): what a test breaks after it.
    """
    mesh = mesh_of(job)
    here = World(mesh, rank, Ledger()) if world > 1 else World.single()
    trainer = Trainer(job, here, MadeUpBatches(job, mesh.coordinates(rank)["dp"]))
    if prepare:
        prepare(trainer)
    checkpoints = Checkpoints(trainer, DATA, warn=lambda line: None)
    resumed = checkpoints.start()
    if meddle:
        meddle(trainer)
    started, losses = resumed.index.step if resumed else 0, []
    with checkpoints:
        for step in range(started, stop):
            losses.append(trainer.step(step).loss)
            checkpoints.poll()
            if checkpoints.due(step + 1):
                checkpoints.save(step + 1, PROGRESS)
    sent = here.ledger.transfers()
    held = snapshot(trainer)
    here.close()
    return Ran(losses, held, sent, started)


def run_each(rank, world, jobs, stop):
    """One run after the other in the same processes."""
    return [run(rank, world, job, stop) for job in jobs]


def snapshot(trainer):
    from shoal.train.checkpoint.state import parts_of

    return [(part.name, part.shape, part.offsets, part.tensor.detach().numpy().copy()) for part in parts_of(trainer)]


def whole(rans):
    """Every tensor of the state, put together from all ranks' parts; NaN where no rank has any."""
    tensors = {}
    for ran in rans:
        for name, shape, offsets, values in ran.held:
            there = tensors.setdefault(name, np.full(shape, np.nan))
            there[tuple(slice(start, start + size) for start, size in zip(offsets, values.shape, strict=True))] = values
    return tensors


def error(one, other):
    """The largest relative L2 difference between two states, over their tensors."""
    assert one.keys() == other.keys()
    return max(float(np.linalg.norm(one[name] - other[name]) / np.linalg.norm(other[name])) for name in other)


def continued(job, layout, out, **train):
    """The same job under another layout, going on from what `job` left."""
    changed = {"out": str(out), "resume": job.train.out, **train}
    return replace(job, layout=type(job.layout).parse(layout), train=replace(job.train, **changed))
