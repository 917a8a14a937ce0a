"""Saves checkpoints while training goes on: a copy of what this rank writes, and a thread that writes it."""

import errno
import shutil
import threading
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint import save as plan_and_write
from torch.distributed.checkpoint.api import CheckpointException

from shoal.comm.whereabouts import SAVE
from shoal.spec.build import job_to_tree
from shoal.spec.errors import RequestError
from shoal.train.checkpoint.folder import unfinished
from shoal.train.checkpoint.index import Damaged, Index, Progress
from shoal.train.checkpoint.peers import Peers
from shoal.train.checkpoint.planner import SavePlanner
from shoal.train.checkpoint.state import Key, Part, parts_of
from shoal.train.checkpoint.storage import Describe, Writer
from shoal.train.data.naming import named
from shoal.train.files import room_in
from shoal.train.trainer import Trainer


class Saver:
    """Saves the states of `trainer` into `folder`, of which the `keep` newest checkpoints stay.

    data: what identifies the tokens that are trained on. Every rank makes one and calls `save` after the same steps.
    Ranks that hold the same share the writing of it.
    """

    def __init__(self, trainer: Trainer, folder: Path, peers: Peers, data: str):
        train = trainer.job.train
        self.trainer, self.folder, self.peers, self.data = trainer, folder, peers, data
        self.keep, self.asynchronous = train.keep, train.async_save
        self.parts = _own(parts_of(trainer), peers)
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(self, step: int, progress: Progress) -> None:
        """Saves what stands after `step` steps; waits for the save before, if that is still under way.

        With train.async_save it returns when the copy is made. Raises RequestError when a save, this or an earlier one, has
        failed; the checkpoints before stay.
        """
        self.wait()
        parts = _copies(self.parts) if self.asynchronous else self.parts
        describe = partial(
            Index,
            step,
            self.trainer.optimizer.updates,
            job_to_tree(self.trainer.job),
            self.data,
            progress,
        )
        self._thread = threading.Thread(target=self._run, args=(step, parts, describe), daemon=True)
        self._thread.start()
        if not self.asynchronous:
            self.wait()

    def poll(self) -> None:
        """Raises RequestError when a save has failed since the last call."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Returns when no save is under way. Raises RequestError when one has failed."""
        if self._thread is not None:
            call = self.peers.calls.begin(SAVE)
            self.finish()
            if self._failure is None:
                call.done()
        self.poll()

    def finish(self) -> None:
        """The same, whether or not it has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, step: int, parts: Sequence[Part], describe: Describe) -> None:
        try:
            with self.trainer.world.ledger.whereabouts.saving(step):
                self._write(step, parts, describe)
        except BaseException as error:
            if self.peers.rank == 0:
                shutil.rmtree(unfinished(self.folder, step), ignore_errors=True)
            self._failure = _explained(error, self.folder)

    def _write(self, step: int, parts: Sequence[Part], describe: Describe) -> None:
        alone = self.peers.group is None
        if alone:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # so it is, and rightly
        writer = Writer(self.folder, step, self.keep, describe, self.trainer.world.ledger.whereabouts)
        plan_and_write(
            {}, storage_writer=writer, planner=SavePlanner(parts), process_group=self.peers.group, no_dist=alone
        )


def _own(parts: Sequence[Part], peers: Peers) -> list[Part]:
    """The parts that this rank writes: each by one of the ranks that hold it, which share them evenly."""
    sizes = {part.key: part.tensor.nbytes for part in parts}
    mine = peers.decide(sizes, _shared_out)
    return [part for part in parts if part.key in mine]


def _shared_out(held: Sequence[dict[Key, int]]) -> list[set[Key]]:
    """Which keys each rank writes, from the bytes of those that each holds: the largest first, to the least laden."""
    holders: dict[Key, list[int]] = {}
    for rank, sizes in enumerate(held):
        for key in sizes:
            holders.setdefault(key, []).append(rank)
    laden, shares = [0] * len(held), [set[Key]() for _ in held]
    for key, ranks in sorted(holders.items(), key=lambda entry: -held[entry[1][0]][entry[0]]):
        rank = min(ranks, key=lambda rank: laden[rank])
        laden[rank] += held[rank][key]
        shares[rank].add(key)
    return shares


def _copies(parts: Sequence[Part]) -> list[Part]:
    """The parts as they stand now, in the host's memory."""
    copies = []
    for part in parts:
        pinned = part.tensor.is_cuda
        copy = torch.empty(part.tensor.shape, dtype=part.tensor.dtype, pin_memory=pinned)
        copies.append(part._replace(tensor=copy.copy_(part.tensor, non_blocking=pinned)))
    if any(part.tensor.is_cuda for part in parts):
        torch.cuda.current_stream().synchronize()
    return copies


def _explained(error: BaseException, folder: Path) -> Exception:
    """What a failed save is to a person: one line, about the disk where it was the disk; else what it was."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    try:
        with room_in(folder):
            raise error
    except RequestError as full:
        return full
    except OSError as refused:
        why = "a file may not be so large" if refused.errno == errno.EFBIG else refused.strerror
        would_do = "that all ranks share" if refused.errno == errno.ENOENT else "of yours with room"
        return RequestError(
            "train.out", f"train.out = {named(folder)} takes no checkpoint ({why}); a folder {would_do} would do"
        )
    except Damaged as lost:
        return RequestError(
            "train.out",
            f"train.out = {named(folder)} lost a checkpoint while it was written ({lost}); a folder that all ranks share "
            "would do",
        )
    except Exception as other:
        return other
    except BaseException as other:
        return RuntimeError(f"a checkpoint was not saved: {other!r}")
