"""What a person sees of a run: a live bar on a terminal, plain lines elsewhere."""

import resource
import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shoal.spec.job import Job

LINES = 20  # plain lines of a run, about


class Display:
    """Shows steps on `stream`. active: False on ranks that show nothing."""

    def __init__(self, job: Job, stream: TextIO, active: bool = True):
        self.job, self.active = job, active
        self.console = Console(file=stream, highlight=False)
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (active and self.console.is_terminal),
        )
        self.task = self.bar.add_task("training", total=job.train.steps, words="")
        self.started = time.monotonic()

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def step(self, line: dict[str, Any]) -> None:
        """Shows one step's metrics, as they stand in metrics.jsonl."""
        done, total = line["step"] + 1, self.job.train.steps
        if not self.active or done % self.job.train.log_every:
            return
        words = self._words(line)
        self.bar.update(self.task, completed=done, words=words)
        every = max(1, total // LINES)
        if not self.console.is_terminal and (done in (1, total) or done % every == 0 or "eval_loss" in line):
            left = (time.monotonic() - self.started) / done * (total - done)
            self.console.print(f"step {done}/{total}  {words}  {left:.0f} s left", markup=False, soft_wrap=True)

    def _words(self, line: dict[str, Any]) -> str:
        words = [f"loss {line['loss']:.3f}", f"{line['tokens_per_s']:,.0f} tokens/s", self._utilisation(line)]
        if "eval_loss" in line:
            words.append(f"held out {line['eval_loss']:.3f}")
        if line["skipped"]:
            words.append(f"{line['skipped']} skipped")
        return "  ".join(words)

    def _utilisation(self, line: dict[str, Any]) -> str:
        """Part of a *named* peak; unknown hardware is called unknown."""
        if line["utilisation"] is None:
            return "utilisation unknown (no machine.name or machine.peak_tflops)"
        machine, dtype = self.job.machine, self.job.train.dtype
        peak = machine.peak(dtype)
        assert peak is not None
        return f"{line['utilisation']:.1%} of {machine.name}'s {peak / 1e12:g} TFLOP/s {dtype}"


def peak_memory(device: str) -> int:
    """The most memory this process has held, bytes: resident memory on a CPU, allocated by torch on a GPU."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
