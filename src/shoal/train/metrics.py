"""metrics.jsonl, always; TensorBoard and Weights & Biases beside it when asked for."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shoal.spec.errors import RequestError

FILE = "metrics.jsonl"


class MetricsWriter:
    """Writes one JSON line per step into `folder`/metrics.jsonl, whole and at once; NaN and infinity become null.

    A metrics.jsonl of an earlier run is kept under the next free name, metrics.1.jsonl and so on. log: other places,
    "tensorboard" (in `folder`/tensorboard) or "wandb". active: False on ranks that write nothing.
    Raises RequestError naming train.log when a package is missing, train.out when the file cannot be written.
    """

    def __init__(self, folder: Path, log: Sequence[str] = (), active: bool = True):
        self._file = None
        self._sinks: list[Any] = []
        if not active:
            return
        try:
            _keep_old(folder / FILE)
            self._file = (folder / FILE).open("a", encoding="utf-8")
        except OSError as error:
            raise RequestError(
                "train.out", f"train.out = {folder} cannot be written ({error.strerror}); a folder of yours would do"
            ) from None
        self._sinks = [{"tensorboard": _TensorBoard, "wandb": _WandB}[name](folder) for name in log]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
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


class _TensorBoard:
    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard") from None
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, folder: Path):
        try:
            import wandb
        except ImportError:
            raise _missing("wandb") from None
        self._run = wandb.init(dir=str(folder), name=folder.name)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


def check_log(log: Sequence[str]) -> None:
    """Raises RequestError naming train.log when a package that it needs is missing."""
    import importlib.util

    for name in log:
        if importlib.util.find_spec(name) is None:
            raise _missing(name)


def _missing(name: str) -> RequestError:
    return RequestError(
        "train.log",
        f"train.log = {name} needs the package {name}, which is not installed; pip install 'shoal[log]' brings it",
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
