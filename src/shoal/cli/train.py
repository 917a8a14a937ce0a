"""`shoal train`: checks the request, prepares the data, starts or joins the ranks, and tells how it ended."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.cli.options import add_job_options, print_json, read_job
from shoal.launch.cluster import Place, find_place
from shoal.launch.local import RankDied, Stopped, check_port, run_local, stoppable
from shoal.plan.runnable import refuse_unbuilt
from shoal.spec.errors import RequestError
from shoal.spec.job import Job
from shoal.spec.toml import job_toml
from shoal.train.summary import NotFinite, Summary
from shoal.verify.audit import audit

BASE = {"model": {"preset": "demo"}}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_job_options(parser)


def run(arguments: argparse.Namespace) -> int:
    job = read_job(arguments, BASE)
    refuse_unbuilt(job.layout)
    job.check()
    if arguments.dump_config:
        print(job_toml(job), end="")
        return 0
    place = find_place(os.environ, job.machine.port)
    try:
        with stoppable():
            summary = _train(job, place, arguments.json)
    except Stopped as stopped:
        print(f"shoal: {stopped}; the steps done are in {job.train.out}/metrics.jsonl", file=sys.stderr)
        return 128 + stopped.number
    except (RankDied, NotFinite) as failed:
        print(f"shoal: {failed}", file=sys.stderr)
        return 1
    return _end(summary, arguments.json) if place is None or place.rank == 0 else 0


def _train(job: Job, place: Place | None, as_json: bool) -> Summary:
    """The Summary of this rank when others started it, else that of rank 0 of the ranks started here."""
    if place is not None:
        return train_rank(job, place, as_json)
    # Here, so that what is wrong with the request is said before any rank starts.
    check_port(job.machine.port)
    _check_data(job)
    _check_folder(Path(job.train.out))
    if job.layout.world == 1:
        return train_rank(job, None, as_json)
    return run_local(_train_local_rank, job.layout.world, job, as_json, port=job.machine.port)[0]


def _train_local_rank(job: Job, as_json: bool) -> Summary:
    """What each process of run_local calls."""
    return train_rank(job, find_place(os.environ), as_json)


def train_rank(job: Job, place: Place | None, as_json: bool) -> Summary:
    """Trains as one rank; the Summary of this rank."""
    from shoal.launch.process import connected
    from shoal.train.data.corpus import prepare
    from shoal.train.loop import run as train

    tokens = prepare(job.data, show_progress=place is None or place.local_rank == 0)
    with connected(job, place) as world:
        return train(job, world, tokens, sys.stderr if as_json else sys.stdout)


def _end(summary: Summary, as_json: bool) -> int:
    """Shows how the run ended; the exit code."""
    rows = audit([summary.predicted], [summary.measured])
    console = Console(file=sys.stderr if as_json else sys.stdout, highlight=False)
    if rows:
        table = Table(title="transfers of rank 0 over the whole run, bytes sent")
        table.add_column("transfer")
        for column in ("calls", "planned", "measured"):
            table.add_column(column, justify="right")
        table.add_column("")
        for row in rows:
            table.add_row(
                f"{row.phase} {row.op} over {row.axis}",
                f"{sum(row.measured_calls):,}",
                f"{sum(row.predicted_sent):,}",
                f"{sum(row.measured_sent):,}",
                "equal" if row.ok else "DIFFERS",
            )
        console.print(table)
    if summary.text:
        console.print("a sample of what it writes:", style="bold")
        console.print(summary.text, markup=False)
    console.print(
        f"loss {summary.first_loss:.3f} -> {summary.loss:.3f} in {summary.steps} steps and {summary.seconds:.0f} s; "
        f"held out {summary.eval_loss:.3f}; {summary.out}/ holds job.toml, metrics.jsonl, model.safetensors",
        soft_wrap=True,
    )
    wrong = [row.difference() for row in rows if not row.ok]
    for line in wrong:
        console.print(f"differs: {line}", style="red", soft_wrap=True)
    if as_json:
        print_json({"ok": not wrong, **summary.as_dict(), "transfers": [row.as_dict() for row in rows]})
    return 1 if wrong else 0


def _check_data(job: Job) -> None:
    """Builds the token file if there is none yet, and raises RequestError for data that this job cannot train on."""
    from shoal.train.data.batches import Dataset, check_vocabulary
    from shoal.train.data.corpus import prepare
    from shoal.train.metrics import check_log

    check_log(job.train.log)
    dataset = Dataset(prepare(job.data, show_progress=True), job.data, "train")
    check_vocabulary(dataset.file, job.model.vocab)


def _check_folder(out: Path) -> None:
    """Makes the output folder; raises RequestError when it cannot be made or written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise RequestError(
            "train.out",
            f"train.out = {out} cannot be written ({error.strerror}); a folder of yours, runs/first, would do",
        ) from None
