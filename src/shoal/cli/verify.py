"""`shoal verify`: one table of errors and transfers, exit code 0 when all is as planned, 1 when it is not."""

import argparse
import sys
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from shoal.cli import matrix
from shoal.cli.options import add_job_options, given_fields, given_options, print_json, read_job
from shoal.cli.train import BASE as TRAIN_BASE
from shoal.plan.refusals import REFUSALS, refuse, updates_between
from shoal.plan.stages import check_pipeline
from shoal.spec.errors import RequestError
from shoal.spec.job import Dtype
from shoal.spec.toml import job_toml
from shoal.verify.matrix import NAMES

STEPS = 3
MOST_RANKS = 64  # processes that a machine is asked to start for a look
BASE = {"model": {"preset": "tiny"}}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_job_options(parser)
    parser.add_argument(
        "--as-is",
        action="store_true",
        help="run the job's own model, sequence and batch, not small ones of the same kind",
    )
    parser.add_argument(
        "--matrix", metavar="NAME", help=f"prove a named set of layouts, one after the other: {', '.join(NAMES)}"
    )
    parser.add_argument("--refusals", action="store_true", help="print what does not go together and do nothing")


def run(arguments: argparse.Namespace) -> int:
    steps = _steps(arguments)
    arguments.steps = None  # here: how many steps to compare, not the job's length
    if arguments.refusals:
        for refusal in REFUSALS:
            print(refusal)
        return 0
    console = Console(file=sys.stderr if arguments.json else sys.stdout)
    if arguments.matrix is not None:
        documents = matrix.run(matrix.entries_of(arguments), steps, console)
        right = all(document["ok"] for document in documents)
        if arguments.json:
            print_json({"ok": right, "matrix": arguments.matrix, "layouts": documents})
        return 0 if right else 1
    # A job file's own sizes stand on what `shoal train` would put under them; else a model that shows most.
    job = read_job(arguments, TRAIN_BASE if arguments.job else BASE)
    # a job file, as every run leaves one, says how the job trains; an option, how it is to be verified
    dtype: Dtype = job.train.dtype if "train.dtype" in given_options(arguments) else "float64"
    reduced = job.train.reduce_dtype if dtype == "bfloat16" else "same"
    refuse(replace(job, train=replace(job.train, clip=0.0, dtype=dtype, reduce_dtype=reduced)))  # as it is going to run
    check_pipeline(job.layout, job.model.tied)
    if job.machine.device == "cuda":
        raise RequestError(
            "machine.device", "machine.device = cuda: shoal verify computes on the CPU; auto or cpu would do"
        )
    given = given_fields(arguments)
    if dtype != "float64" and updates_between(job.layout):
        raise RequestError(
            "train.dtype",
            f"train.dtype = {dtype} with layout.schedule = {job.layout.schedule}: updates between micro-batches are compared "
            "in float64 alone; float64 would do, or schedule=1f1b",
        )
    if job.layout.world > MOST_RANKS:
        raise RequestError(
            "layout",
            f"layout = {job.layout} has {job.layout.world:,} ranks, more than the {MOST_RANKS} processes that shoal verify "
            "starts; a layout of the same kind with fewer would do, or shoal train --dry-run",
        )
    if arguments.dump_config:
        print(job_toml(job), end="")
        return 0
    if arguments.as_is:
        job.check()
    from shoal.verify.verify import (  # torch comes with it; what was wrong above answers at once
        as_it_is,
        check_given,
        small_job,
        verify,
    )

    small = as_it_is(job, dtype) if arguments.as_is else small_job(job, dtype)
    check_given(job, small, given)
    verdict = verify(small, steps)
    show(verdict, console)
    if arguments.json:
        print_json(verdict.as_dict())
    return 0 if verdict.ok else 1


def show(verdict, console: Console) -> None:
    """The verdict as one table and a closing line."""
    console.print(f"{verdict.layout} on {verdict.what}", highlight=False, soft_wrap=True)
    table = Table(title=f"{verdict.layout} against one process", caption="bytes sent, all ranks together")
    table.add_column("what")
    for column in ("planned", "measured", "calls"):
        table.add_column(column, justify="right")
    table.add_column("")
    for kind, error in verdict.errors.items():
        limit = verdict.limits[kind]
        word = "ok" if error.value <= limit else "DIFFERS"
        table.add_row(f"{kind}, relative error", f"{limit:.0e}", f"{error.value:.1e}", "", word)
    for row in verdict.rows:
        table.add_row(
            f"{row.phase} {row.op} over {row.axis}",
            f"{sum(row.predicted_sent):,}",
            f"{sum(row.measured_sent):,}",
            f"{sum(row.measured_calls):,}",
            "equal" if row.ok else "DIFFERS",
        )
    for category in dict.fromkeys(row.category for row in verdict.memory):
        of_category = [row for row in verdict.memory if row.category == category]
        worst = max(of_category, key=lambda row: row.measured)
        if worst.measured or not all(row.ok for row in of_category):
            word = "ok" if all(row.ok for row in of_category) else "DIFFERS"
            what = f"{category}, most bytes of a rank ({worst.rank})"
            table.add_row(what, f"{worst.predicted:,}", f"{worst.measured:,}", "", word)
    if verdict.schedule:
        steps = sum(len(row.planned) for row in verdict.schedule), sum(len(row.executed) for row in verdict.schedule)
        word = "equal" if all(row.ok for row in verdict.schedule) else "DIFFERS"
        table.add_row("schedule, instructions in order", *(f"{count:,}" for count in steps), "", word)
    console.print(table)
    for failure in verdict.failures:
        console.print(f"differs: {failure}", style="red", markup=False, highlight=False, soft_wrap=True)
    console.print(
        "ok: the same numbers, the planned bytes, the planned memory" if verdict.ok else "NOT ok", style="bold"
    )


def _steps(arguments: argparse.Namespace) -> int:
    text = str(STEPS) if arguments.steps is None else arguments.steps
    if not text.isdecimal() or not int(text):
        raise RequestError("steps", f"--steps {text} is not a number of steps to compare; {STEPS} would do")
    return int(text)
