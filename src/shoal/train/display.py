"""What a person sees of a run: a live bar on a terminal, plain lines elsewhere."""

import math
import os
import re
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from shoal.spec.job import Job

LINES = 20  # plain lines of a run, about


class Display:
    """Shows steps on `stream`: live on a terminal, else in about LINES plain lines. active: False on ranks that show nothing.

    first: the step that this run begins with.
    """

    def __init__(self, job: Job, stream: TextIO, active: bool = True, first: int = 0):
        self.job, self.active, self.first = job, active, first
        # Not rich's own guess, which takes files for terminals when FORCE_COLOR is set.
        self.live = active and stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self.console = Console(file=stream, highlight=False, force_terminal=self.live)
        self.bar = _TwoLines(job.train.steps, first, self.console, disable=not self.live)
        # At least log_every apart, and so that the first step, LINES more and the last are about all.
        self.every = max(job.train.log_every, 1 if self.live else math.ceil(job.train.steps / LINES))
        self.started = time.monotonic()

    def __enter__(self) -> Self:
        if self.job.machine.peak(self.job.train.dtype) is None:
            self.note("utilisation is unknown: no machine.name with a known peak; machine.peak_tflops sets one")
        self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def step(self, line: dict[str, Any]) -> None:
        """Shows one step's metrics, as they stand in metrics.jsonl."""
        done, total = line["step"] + 1, self.job.train.steps
        if not self.active or not (done in (self.first + 1, total) or done % self.every == 0 or "eval_loss" in line):
            return
        words = self._words(line)
        self.bar.show(done, words)
        if not self.live:
            left = (time.monotonic() - self.started) / (done - self.first) * (total - done)
            self.note(f"step {done}/{total}  {words}  {left:.0f} s left")

    def note(self, text: str) -> None:
        """Shows a line of text, above the bar where there is one."""
        if self.active:
            self.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Ends the live display; what it last showed stays."""
        self.bar.stop()

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
            return "utilisation unknown"
        machine, dtype = self.job.machine, self.job.train.dtype
        peak = machine.peak(dtype)
        assert peak is not None
        return f"{line['utilisation']:.1%} of {machine.name}'s {peak / 1e12:g} TFLOP/s {dtype}"


class _TwoLines(Progress):
    """The bar, and below it the words of the last step, so that both have room on 80 columns."""

    def __init__(self, total: int, first: int, console: Console, disable: bool):
        self.words = ""
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("left"))
        super().__init__(*columns, console=console, disable=disable)
        self.task = self.add_task("training", total=total, completed=first)

    def show(self, done: int, words: str) -> None:
        self.words = words
        self.update(self.task, completed=done)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.words:
            yield Text(self.words, no_wrap=True, overflow="ellipsis")


def peak_memory(device: str) -> int:
    """The most memory this process has held, bytes: resident memory on a CPU, allocated by torch on a GPU."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    # Linux hands ru_maxrss on through exec: a rank would report the memory of whatever started it. VmHWM is its own.
    own = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE) if status.exists() else None
    if own:
        return int(own[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
