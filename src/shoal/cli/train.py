"""`shoal train`: checks the request, prepares the data, starts or joins the ranks, and tells how it ended."""

import argparse
import fcntl
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.cli import dry_run
from shoal.cli.options import add_job_options, print_json, read_job
from shoal.comm.whereabouts import TOLD
from shoal.launch.cluster import Place, find_place
from shoal.launch.local import Stopped, check_port, run_local
from shoal.launch.report import telling
from shoal.plan.refusals import check_job
from shoal.spec.build import job_to_tree
from shoal.spec.errors import RequestError
from shoal.spec.job import Job
from shoal.spec.toml import job_toml
from shoal.train.checkpoint.fit import check_start
from shoal.train.summary import Summary
from shoal.verify.audit import audit

BASE = {"model": {"preset": "demo"}}
RANKS = ".ranks"  # in train.out: where ranks that others started say where they are, while they train


def add_options(parser: argparse.ArgumentParser) -> None:
    add_job_options(parser)
    dry_run.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    started = find_place(os.environ)
    job = read_job(arguments, BASE, started.world if started else None)
    check_job(job)
    if arguments.dump_config:
        if arguments.json:
            print_json(job_to_tree(job))
        else:
            print(job_toml(job), end="")
        return 0
    if dry_run.asked(arguments):
        return dry_run.run(job, arguments)
    place = find_place(os.environ, job.machine.port)
    out = Path(job.train.out)
    # Here, so that what is wrong with the request is said before any rank starts, and before anything is written.
    _check_device(job)
    if place is None:
        check_port(job.machine.port)
    _check_data(job)
    check_start(job)
    with _folder(out, alone=place is None or place.rank == 0):
        try:
            if place is not None:
                with telling(out / RANKS, place.rank):
                    summary = train_rank(job, place, arguments.json, out / RANKS)
            elif job.layout.world == 1:
                summary = train_rank(job, None, arguments.json)
            else:
                summary = _run_here(job, arguments.json)
        except Stopped as stopped:
            if place is not None and (out / RANKS / TOLD).exists():
                raise SystemExit(128 + stopped.number) from None  # one of us has said why
            if (out / "metrics.jsonl").exists() and (place is None or place.rank == 0):
                print(f"shoal: the steps done are in {out}/metrics.jsonl", file=sys.stderr)
            raise
    return _end(summary, arguments.json) if place is None or place.rank == 0 else 0


def _run_here(job: Job, as_json: bool) -> Summary:
    """Trains on processes of this machine; the Summary of rank 0."""
    with tempfile.TemporaryDirectory(prefix="shoal-ranks-") as folder:
        ranks, port = Path(folder), job.machine.port
        return run_local(_train_local_rank, job.layout.world, job, as_json, ranks, port=port, whereabouts=ranks)[0]


def _train_local_rank(job: Job, as_json: bool, whereabouts: Path) -> Summary:
    """What each process of run_local calls."""
    return train_rank(job, find_place(os.environ), as_json, whereabouts)


def train_rank(job: Job, place: Place | None, as_json: bool, whereabouts: Path | None = None) -> Summary:
    """Trains as one rank; the Summary of this rank. whereabouts: the folder in which the ranks say where they are."""
    from shoal.launch.process import connected
    from shoal.train.data.corpus import prepare
    from shoal.train.data.tokens import TokenFile
    from shoal.train.loop import run as train

    tokens = prepare(job.data, show_progress=place is None or place.local_rank == 0)
    with connected(job, place, whereabouts, TokenFile.open(tokens).content) as world:
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
    held_out = "" if math.isnan(summary.eval_loss) else f"held out {summary.eval_loss:.3f}; "
    console.print(
        f"loss {summary.first_loss:.3f} -> {summary.loss:.3f} in {summary.steps} steps and {summary.seconds:.0f} s; "
        f"{held_out}{summary.out}/ holds job.toml, metrics.jsonl, model.safetensors",
        soft_wrap=True,
    )
    wrong = [f"differs: {row.difference()}" for row in rows if not row.ok]
    if summary.skipped_at_end:
        wrong.append(
            f"the last {summary.skipped_at_end} steps were skipped, as their loss or gradients were not finite; "
            "a smaller train.learning_rate may do"
        )
    for line in wrong:
        console.print(line, style="red", soft_wrap=True)
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


def _check_device(job: Job) -> None:
    """Raises RequestError when the job asks for a GPU and there is none."""
    if job.machine.device == "cuda":
        from shoal.launch.process import device_of

        device_of(job.machine, 0)


@contextmanager
def _folder(out: Path, alone: bool) -> Iterator[None]:
    """Makes the output folder and, with `alone`, keeps other runs out of it. Raises RequestError when it cannot."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
        handle = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise RequestError(
            "train.out",
            f"train.out = {out} cannot be written ({error.strerror}); a folder of yours, runs/first, would do",
        ) from None
    try:
        if alone:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go with the process, however it ends
        yield
    except BlockingIOError:
        raise RequestError("train.out", f"train.out = {out} is in use by another run; {out}-2 would do") from None
    finally:
        os.close(handle)
