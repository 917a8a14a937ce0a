"""`shoal verify --matrix NAME`: one layout after the other through the same ranks, a line for each."""

import argparse
import time
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console

from shoal.cli.options import given_fields
from shoal.launch.pool import Pool
from shoal.spec.errors import RequestError, refuse_choice
from shoal.verify.matrix import NAMES, Entry, matrix


def entries_of(arguments: argparse.Namespace) -> list[Entry]:
    """The layouts of --matrix. Raises RequestError for an unknown name, and for options beside it that would be lost."""
    name = arguments.matrix
    if name not in NAMES:
        raise refuse_choice("--matrix", name, NAMES, "core")
    given = sorted(given_fields(arguments))
    if given or arguments.job or arguments.layout or arguments.as_is or arguments.dump_config:
        what = f"--{given[0]}" if given else "a job, a layout, --as-is or --dump-config"
        raise RequestError("matrix", f"--matrix {name} brings its own jobs; {what} beside it would do nothing")
    return matrix(name)


def run(entries: list[Entry], steps: int, console: Console) -> list[dict[str, Any]]:
    """Proves every layout and prints a line for each; their documents. One that breaks does not keep the next from running."""
    documents = []
    with Pool(max(entry.ranks for entry in entries)) as pool:
        for number, (entry, document, seconds) in enumerate(_documents(entries, steps, pool), 1):
            documents.append(document)
            word = "ok     " if document["ok"] else "DIFFERS"
            told = f"{number:3}/{len(entries)} {word} {entry.layout} on {document['ran']}  {_figures(document)}{seconds:.1f} s"
            console.print(told, style=None if document["ok"] else "red", markup=False, highlight=False, soft_wrap=True)
            for failure in document["failures"]:
                console.print(f"        {failure}", style="red", markup=False, highlight=False, soft_wrap=True)
    right = sum(document["ok"] for document in documents)
    console.print(f"{right} of {len(entries)} layouts: the same numbers, the planned bytes and memory", style="bold")
    return documents


def _documents(entries: Iterable[Entry], steps: int, pool: Pool) -> Iterator[tuple[Entry, dict[str, Any], float]]:
    from shoal.verify.verify import small_job, verify  # torch comes with it

    for entry in entries:
        began = time.perf_counter()
        try:
            document = verify(small_job(entry.asked()), steps, pool=pool).as_dict()
        except Exception as failed:  # whatever one layout breaks with, the others are proven
            what = str(failed) or type(failed).__name__
            document = {"ok": False, "layout": entry.layout, "ran": "nothing", "failures": [what]}
        yield entry, document, time.perf_counter() - began


def _figures(document: dict[str, Any]) -> str:
    """The largest error, the bytes, and how far memory is from the plan."""
    if "max_rel_err" not in document:
        return ""
    errors = [error for error in document["max_rel_err"].values() if error is not None]
    sent = sum(row["measured_bytes"] for row in document["transfers"])
    off = max(
        (
            abs(row["measured_bytes"] / row["predicted_bytes"] - 1)
            for row in document["memory"]
            if row["predicted_bytes"]
        ),
        default=0.0,
    )
    return f"errors up to {max(errors):.0e}, {sent:,} bytes sent, memory within {off:.2%}, "
