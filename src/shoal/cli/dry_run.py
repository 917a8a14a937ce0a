"""`shoal train --dry-run`: one rank's step of a layout of any size, on one CPU, held against the plan."""

import argparse
import sys

from rich.console import Console
from rich.table import Table

from shoal.cli.options import print_json
from shoal.spec.errors import RequestError
from shoal.spec.job import Job


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="execute the step of one rank on tensors without values, and hold what it sends, keeps and computes against the plan",
    )
    parser.add_argument("--rank", metavar="R", help="with --dry-run: the rank, counted from 0 (default: 0)")
    parser.add_argument("--world", metavar="N", help="with --dry-run: the ranks that the layout must have")


def asked(arguments: argparse.Namespace) -> bool:
    """Whether a dry run is asked for. Raises RequestError for options that only it has."""
    for name in ("rank", "world"):
        if getattr(arguments, name) is not None and not arguments.dry_run:
            raise RequestError(
                name, f"--{name} is for a dry run; --dry-run --{name} {getattr(arguments, name)} would do"
            )
    return arguments.dry_run


def run(job: Job, arguments: argparse.Namespace) -> int:
    """Rehearses the rank's step and shows what came of it; the exit code. Raises RequestError."""
    rank, world = (_number(name, getattr(arguments, name)) for name in ("rank", "world"))
    _check_world(job, world)
    from shoal.verify.rehearsal import rehearse  # torch comes with it; what was wrong above answers at once

    rehearsal = rehearse(job, rank or 0)
    show(job, rehearsal, Console(file=sys.stderr if arguments.json else sys.stdout, highlight=False))
    if arguments.json:
        print_json(rehearsal.as_dict())
    return 1 if rehearsal.failures else 0


def _number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal():
        example = {"rank": 0, "world": 16}[name]
        raise RequestError(name, f"--{name} {text} is not a whole number; --{name} {example} would do")
    return int(text)


def _check_world(job: Job, world: int | None) -> None:
    """Raises RequestError, with a layout that would do, where `world` is not the layout's."""
    layout = job.layout
    if world is None or world == layout.world:
        return
    rest = layout.world // layout.dp
    advice = f"dp={world // rest}" if world and world % rest == 0 else f"--world {layout.world}"
    raise RequestError("layout", f"layout = {layout} has {layout.world:,} ranks, not {world:,}; {advice} would do")


def show(job: Job, rehearsal, console: Console) -> None:
    """The rehearsal as one table and a closing line."""
    places = ", ".join(f"{axis} {place}" for axis, place in rehearsal.coordinates.items())
    console.print(f"{rehearsal.layout}: one step of rank {rehearsal.rank:,} of {rehearsal.world:,} ({places})")
    table = Table(caption=f"bytes sent (received, of a receive), most bytes held, FLOPs; in {rehearsal.seconds:.0f} s")
    table.add_column("what")
    for column in ("calls", "planned", "executed"):
        table.add_column(column, justify="right")
    table.add_column("")
    for row in rehearsal.rows:
        received = row.op == "receive"
        sides = (row.predicted_received, row.measured_received) if received else (row.predicted_sent, row.measured_sent)
        sums = (f"{sum(side):,}" for side in (row.measured_calls, *sides))
        table.add_row(f"{row.phase} {row.op} over {row.axis}", *sums, "equal" if row.ok else "DIFFERS")
    table.add_section()
    for line in rehearsal.memory:
        if line.predicted or line.measured:
            word = "equal" if line.predicted == line.measured else "ok" if line.ok else "DIFFERS"
            table.add_row(line.category, "", f"{line.predicted:,}", f"{line.measured:,}", word)
    table.add_row("all tensors at one time", "", "", f"{rehearsal.most:,}", "")
    table.add_section()
    for kind, (planned, seen) in rehearsal.flops.items():
        word = "equal" if planned == seen else "DIFFERS"
        table.add_row(f"FLOPs of {kind}", "", f"{planned:.4e}", f"{seen:.4e}", word)
    console.print(table)
    for failure in rehearsal.failures:
        console.print(f"differs: {failure}", style="red", markup=False, soft_wrap=True)
    console.print("NOT ok" if rehearsal.failures else "ok: as planned", style="bold")
