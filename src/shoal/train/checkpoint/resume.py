"""Continues a run from a checkpoint, under whatever layout: finds it, checks that it fits, reads what this rank needs."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch.distributed.checkpoint import load as plan_and_read
from torch.distributed.checkpoint.api import CheckpointException

from shoal.spec.errors import RequestError
from shoal.train.checkpoint.fit import check_fits, no_checkpoint, wanted
from shoal.train.checkpoint.folder import CHECKPOINTS, candidates, check, skipped
from shoal.train.checkpoint.index import Damaged, Index
from shoal.train.checkpoint.peers import Peers
from shoal.train.checkpoint.planner import LoadPlanner
from shoal.train.checkpoint.state import parts_of, settle
from shoal.train.checkpoint.storage import Reader
from shoal.train.data.naming import named
from shoal.train.trainer import Trainer


class Resumed(NamedTuple):
    """The checkpoint that a run goes on from; in_place: whether it is one of the run's own folder."""

    path: Path
    index: Index
    in_place: bool


def resume(trainer: Trainer, peers: Peers, data: str, warn: Callable[[str], None]) -> Resumed | None:
    """Puts the trainer where train.resume says; None where it says to start afresh, or there is nothing to go on from.

    data: what identifies the tokens. warn: is told, on rank 0, of checkpoints that are not whole. Every rank calls it.
    Raises RequestError naming what does not fit.
    """
    job = trainer.job
    path = wanted(job.train)
    if path is None:
        return None
    found = latest_of(path, peers, warn)
    if found is None:
        if job.train.resume == "auto":
            return None
        raise no_checkpoint(job.train)
    chosen, index = found
    check_fits(job, chosen, index, data)
    restore(trainer, peers, chosen, index)
    in_place = chosen.resolve().parent == (Path(job.train.out) / CHECKPOINTS).resolve()
    return Resumed(chosen, index, in_place)


def latest_of(path: Path, peers: Peers, warn: Callable[[str], None]) -> tuple[Path, Index] | None:
    """As `latest` of folder.py, with its index, the ranks sharing the work; the same on every rank, as rank 0 sees it."""
    for candidate in peers.everyone(candidates(path) if peers.rank == 0 else [])[0]:
        index, why = None, None
        try:
            index = check(candidate, peers.rank, peers.size)
        except Damaged as damaged:
            why = str(damaged)
        reasons = [reason for reason in peers.everyone(why) if reason]
        if not reasons:
            assert index is not None
            return candidate, index
        if peers.rank == 0:
            warn(skipped(candidate, reasons[0]))
    return None


def restore(trainer: Trainer, peers: Peers, path: Path, index: Index) -> None:
    """Fills weights and optimizer states of a trainer from a checkpoint; every rank reads the chunks that it needs.

    Raises RequestError when the checkpoint does not hold them all as they were written.
    """
    alone = peers.group is None
    if alone:
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
    planner, reader = LoadPlanner(parts_of(trainer)), Reader(path, index)
    try:
        plan_and_read({}, storage_reader=reader, planner=planner, process_group=peers.group, no_dist=alone)
    except CheckpointException as failed:
        error = next(iter(failed.failures.values()))[0]
        if isinstance(error, Damaged):
            raise RequestError(
                "train.resume",
                f"the checkpoint {named(path)} cannot be continued: {error}; train.resume = auto finds the last good one",
            ) from None
        raise error from None
    settle(trainer, index.updates)
