"""metrics.jsonl, always; TensorBoard and Weights & Biases beside it when asked for."""

import importlib.util
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shoal.spec.errors import RequestError, shown
from shoal.train.data.naming import named
from shoal.train.files import whole

FILE = "metrics.jsonl"


class MetricsWriter:
    """Writes one JSON line per step into `folder`/metrics.jsonl, whole and at once; NaN and infinity become null.

    A metrics.jsonl of an earlier run is kept under the next free name, metrics.1.jsonl and so on; goes_on_from: unless
    this run continues that one from that step on, whose lines then stay, those of the steps before. log: other places,
    "tensorboard" (in `folder`/tensorboard) or "wandb". active: False on ranks that write nothing.
    The folder is made if need be. Raises RequestError naming train.log when a package is missing or does not start,
    train.out when the file cannot be written.
    """

    def __init__(self, folder: Path, log: Sequence[str] = (), active: bool = True, goes_on_from: int | None = None):
        self._file = None
        self._sinks: list[Any] = []
        if not active:
            return
        check_log(log)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in log:
                self._sinks.append({"tensorboard": _TensorBoard, "wandb": _WandB}[name](folder))
            if goes_on_from is None:
                _keep_old(folder / FILE)
            else:
                _cut(folder / FILE, goes_on_from)
            self._file = (folder / FILE).open("a", encoding="utf-8")
        except OSError as error:
            self.close()
            raise RequestError(
                "train.out",
                f"train.out = {named(folder)} cannot be written ({error.strerror}); a folder of yours would do",
            ) from None
        except RequestError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the file and the loggers."""
        if self._file:
            self._file.close()
        for sink in self._sinks:
            sink.close()

    def write(self, line: dict[str, Any]) -> None:
        """Appends one step's metrics; `line` has a "step"."""
        if self._file is None:
            return
        clean = {name: value if _finite(value) else None for name, value in line.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()
        numbers = {name: value for name, value in clean.items() if isinstance(value, int | float) and name != "step"}
        for sink in self._sinks:
            sink.write(line["step"], numbers)

    def sync(self) -> None:
        """Brings what was written to the disk, so that no checkpoint is ahead of its metrics."""
        if self._file is not None:
            os.fsync(self._file.fileno())


class _TensorBoard:
    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, folder: Path):
        import wandb

        try:
            self._run = wandb.init(dir=str(folder), name=folder.name)
        except wandb.Error as error:  # no account on this machine, no network
            raise RequestError(
                "train.log",
                f"train.log = wandb does not start ({shown(error)}); `wandb login` or WANDB_MODE=offline would do",
            ) from None

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


def check_log(log: Sequence[str]) -> None:
    """Raises RequestError naming train.log when a package that it needs is missing."""
    for name in log:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # None too for a mere folder of that name, as W&B leaves behind
            raise RequestError(
                "train.log",
                f"train.log = {name} needs the package {name}, which is not installed; "
                f"pip install 'shoal[log]' brings it",
            )


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _keep_old(file: Path) -> None:
    """Moves an earlier run's metrics out of the way, never over something else."""
    if not file.exists():
        return
    number = 1
    while (kept := file.with_name(f"metrics.{number}.jsonl")).exists():
        number += 1
    file.rename(kept)


def _cut(file: Path, stop: int) -> None:
    """Leaves the lines of the steps before `stop`, whole ones, in a file that is there whole at every moment."""
    if not file.exists():
        return
    kept = [line for line in file.read_text(encoding="utf-8").splitlines() if _step(line) < stop]
    with whole(file) as unfinished:
        unfinished.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _step(line: str) -> float:
    """The step of a line; infinite for a torn one."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
