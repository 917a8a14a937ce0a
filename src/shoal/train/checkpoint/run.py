"""The checkpoints of a run, as its loop sees them: where to start, when to save, and that all is written at the end.

Rooms that need torch.distributed.checkpoint are entered late: it takes a second to load, which a run without any saves.
"""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from shoal.train.checkpoint.fit import Resumed
from shoal.train.checkpoint.folder import CHECKPOINTS, clean, set_aside
from shoal.train.checkpoint.index import Progress
from shoal.train.checkpoint.peers import Peers
from shoal.train.trainer import Trainer

if TYPE_CHECKING:
    from shoal.train.checkpoint.save import Saver


class Checkpoints:
    """Those of `trainer`'s run, in the folder "checkpoints" of job.train.out. Every rank makes one and calls the same.

    data: what identifies the tokens that are trained on. warn: is told, on rank 0, of checkpoints that are not whole.
    """

    def __init__(self, trainer: Trainer, data: str, warn: Callable[[str], None]):
        train = trainer.job.train
        self.trainer, self.train, self.data, self.warn = trainer, train, data, warn
        self.folder = Path(train.out) / CHECKPOINTS
        self.peers = Peers(trainer.world) if train.save_every or train.resume != "never" else None
        self.saver: Saver | None = None

    def start(self) -> Resumed | None:
        """Puts the trainer where the job says; the checkpoint it goes on from, None where it starts afresh.

        Checkpoints of the folder that this run does not continue are moved aside. Raises RequestError.
        """
        train, resumed = self.train, None
        if self.peers is not None:
            from shoal.train.checkpoint.resume import resume

            resumed = resume(self.trainer, self.peers, self.data, self.warn)
        if resumed is None and train.weights:
            from shoal.train.checkpoint.start import start_from

            start_from(self.trainer, Path(train.weights))
        if self.trainer.world.rank == 0:
            clean(self.folder)
            set_aside(self.folder, resumed.index.step if resumed and resumed.in_place else -1)
        if self.peers is not None and train.save_every:
            from shoal.train.checkpoint.save import Saver

            self.peers.everyone(None)  # nobody writes before the folder is as it should be
            self.saver = Saver(self.trainer, self.folder, self.peers, self.data)
        return resumed

    def due(self, step: int) -> bool:
        """Whether a checkpoint is wanted after `step` steps: every save_every, and at the end."""
        return self.saver is not None and (step % self.train.save_every == 0 or step == self.train.steps)

    def save(self, step: int, progress: Progress) -> None:
        """Saves what stands after `step` steps. Raises RequestError as Saver.save."""
        assert self.saver is not None, "nothing is due without train.save_every"
        self.saver.save(step, progress)

    def poll(self) -> None:
        """Raises RequestError when a save in the background has failed."""
        if self.saver is not None:
            self.saver.poll()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Returns when the last save is done. After an error its own is nobody's concern any more."""
        if self.saver is not None:
            self.saver.finish() if error else self.saver.wait()
        if self.peers is not None and error is None:
            self.peers.close()
