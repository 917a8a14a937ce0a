"""Schedules as CSV, to read, edit and bring along. No torch.

One row per rank, with the steps in order; before them where things are:

    schedule,1f1b
    versions,flush
    route,0.0,1.0          where stages 0, 1, ... live, as rank.chunk; a second such row is a second copy of the weights
    micro-batches,0,0,0    which route each micro-batch takes
    rank,F0,F1,B0,F2,B1,B2
    rank,F0,B0,F1,B1,F2,B2

A step is F0, B0, I3.1, W3.1, U2 (chunk after the dot, 0 where there is none) or F4&B1.1 for two that run together.
"""

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

from shoal.axes.pipeline.check import check
from shoal.axes.pipeline.schedules.instruction import Instruction, Kind, Overlap, Place, Schedule, Step
from shoal.spec.errors import RequestError, shown

INSTRUCTION = re.compile(r"([FBIWU])(\d{1,6})(?:\.(\d{1,4}))?")
PLACE = re.compile(r"(\d{1,6})\.(\d{1,4})")
VERSIONS = ("flush", "stash", "vertical", "2bw")
ROWS = ("schedule", "versions", "route", "micro-batches", "rank")


def to_csv(schedule: Schedule) -> str:
    """The text of a schedule; from_csv gives the schedule back."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["schedule", schedule.name])
    writer.writerow(["versions", schedule.versions])
    writer.writerows(["route", *route] for route in schedule.routes)
    writer.writerow(["micro-batches", *schedule.route_of])
    writer.writerows(["rank", *order] for order in schedule.orders)
    return text.getvalue()


def from_csv(text: str, file: str = "schedule") -> Schedule:
    """The schedule of a text as to_csv writes it, not yet checked. Raises RequestError naming file, row and cell."""
    found: dict[str, list[list[Any]]] = {name: [] for name in ROWS}
    for number, row in enumerate(csv.reader(io.StringIO(text)), 1):
        cells = [cell.strip() for cell in row]
        while cells and not cells[-1]:  # spreadsheets pad rows to equal lengths
            cells.pop()
        if not cells:
            continue
        if cells[0] not in found:
            _refuse(file, number, 1, cells[0], "does not say what the row holds", f"{', '.join(ROWS[:-1])} or rank")
        if found[cells[0]] and cells[0] not in ("route", "rank"):
            _refuse(file, number, 1, cells[0], "stands in an earlier row already", "one such row")
        read = _READERS[cells[0]]
        found[cells[0]].append([read(cell, file, number, place) for place, cell in enumerate(cells[1:], 2)])
    for name in ROWS:
        if not found[name] or not found[name][0]:
            raise RequestError("layout.schedule", f"{file} has no row {name} with values; {_EXAMPLES[name]} would do")
    return Schedule(
        found["schedule"][0][0], found["rank"], found["route"], found["micro-batches"][0], found["versions"][0][0]
    )


def load(path: Path) -> Schedule:
    """The schedule in a CSV file, checked. Raises RequestError naming the file, and the row and cell or the step."""
    try:
        schedule = from_csv(path.read_text(encoding="utf-8-sig"), str(path))
        check(schedule)
    except RequestError:
        raise
    except OSError as error:
        raise RequestError(
            "layout.schedule", f"layout.schedule = {path} cannot be read: {error.strerror}; 1f1b would do"
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError("layout.schedule", f"{path} is not UTF-8 text; a CSV file would do") from error
    except (ValueError, csv.Error) as error:
        raise RequestError("layout.schedule", f"{path}: {error}") from error
    return schedule


def _step(cell: str, file: str, row: int, place: int) -> Step:
    """A step from its cell."""
    matches = [INSTRUCTION.fullmatch(part.strip()) for part in cell.split("&")]
    would_do = "F0, B0, I3.1, W3.1, U2 or F4&B1.1"
    if not all(matches) or len(matches) > 2:
        _refuse(file, row, place, cell, "is no step", would_do)
    made = [Instruction(cast(Kind, match[1]), int(match[2]), int(match[3] or 0)) for match in matches if match]
    if len(made) == 1:
        return made[0]
    forward, backward = made
    if forward.kind != "F" or backward.kind not in "BI":
        _refuse(file, row, place, cell, "does not join a forward to a backward", would_do)
    return Overlap(forward, backward)


def _place(cell: str, file: str, row: int, place: int) -> Place:
    match = PLACE.fullmatch(cell)
    if not match:
        _refuse(file, row, place, cell, "is no place", "0.0, as rank.chunk,")
    return Place(int(match[1]), int(match[2]))


def _route(cell: str, file: str, row: int, place: int) -> int:
    if not re.fullmatch(r"\d{1,4}", cell):
        _refuse(file, row, place, cell, "is no number of a route", "0")
    return int(cell)


def _version(cell: str, file: str, row: int, place: int) -> str:
    if cell not in VERSIONS:
        _refuse(file, row, place, cell, f"is not one of {', '.join(VERSIONS)}", "flush")
    return cell


def _refuse(file: str, row: int, place: int, cell: str, why: str, would_do: str) -> NoReturn:
    raise RequestError("layout.schedule", f"{file}, row {row}, cell {place}: {shown(cell)} {why}; {would_do} would do")


_READERS: dict[str, Callable[[str, str, int, int], Any]] = {
    "schedule": lambda cell, *_: cell,
    "versions": _version,
    "route": _place,
    "micro-batches": _route,
    "rank": _step,
}
_EXAMPLES = {
    "schedule": "schedule,mine",
    "versions": "versions,flush",
    "route": "route,0.0,1.0",
    "micro-batches": "micro-batches,0,0",
    "rank": "rank,F0,B0,F1,B1",
}
