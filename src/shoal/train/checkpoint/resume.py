"""Continues a run from a checkpoint, under whatever layout: finds it, checks that it fits, reads what this rank needs."""

import warnings
from collections.abc import Callable
from pathlib import Path

from torch.distributed.checkpoint import load as plan_and_read
from torch.distributed.checkpoint.api import CheckpointException

from shoal.spec.errors import RequestError
from shoal.train.checkpoint.fit import Resumed, check_fits, no_checkpoint, wanted
from shoal.train.checkpoint.folder import CHECKPOINTS, candidates, check, passed_over
from shoal.train.checkpoint.index import Damaged, Index
from shoal.train.checkpoint.peers import Peers
from shoal.train.checkpoint.planner import LoadPlanner
from shoal.train.checkpoint.state import parts_of, settle
from shoal.train.checkpoint.storage import Reader
from shoal.train.data.naming import named
from shoal.train.trainer import Trainer


def resume(trainer: Trainer, peers: Peers, data: str, warn: Callable[[str], None]) -> Resumed | None:
    """Puts the trainer where train.resume says; None where it says to start afresh, or there is nothing to go on from.

    data: what identifies the tokens. warn: is told, on rank 0, of checkpoints that are not whole. Every rank calls it.
    Raises RequestError naming what does not fit.
    """
    job = trainer.job
    path = wanted(job.train)
    if path is None:
        return None
    found, damages = latest_of(path, peers)
    if found is None and job.train.resume != "auto":
        raise no_checkpoint(job.train, list(damages.values()))
    for candidate, why in damages.items() if peers.rank == 0 else ():
        warn(passed_over(candidate, why))
    if found is None:
        return None
    chosen, index = found
    check_fits(job, chosen, index, data)
    restore(trainer, peers, chosen, index)
    in_place = chosen.resolve().parent == (Path(job.train.out) / CHECKPOINTS).resolve()
    return Resumed(chosen, index, in_place)


def latest_of(path: Path, peers: Peers) -> tuple[tuple[Path, Index] | None, dict[Path, str]]:
    """The newest checkpoint below `path` that is whole to the last byte, and why newer ones are not.

    The ranks share the work; all get what rank 0 would find.
    """
    damages: dict[Path, str] = {}
    for candidate in peers.everyone(candidates(path) if peers.rank == 0 else [])[0]:
        index, why = None, None
        try:
            index = check(candidate, peers.rank, peers.size)
        except Damaged as damaged:
            why = str(damaged)
        reasons = [reason for reason in peers.everyone(why) if reason]
        if not reasons:
            assert index is not None
            return (candidate, index), damages
        damages[candidate] = reasons[0]
    return None, damages


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
