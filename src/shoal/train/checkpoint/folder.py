"""The folder of a run's checkpoints: which there are, which is the last good one, and what goes. No torch.

A checkpoint gets its name, step-00000120 after 120 steps, when it is complete; until then, and while one is being deleted,
its folder is a hidden one. So a process killed at any moment leaves nothing that looks like a checkpoint and is none.
"""

import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path

from shoal.train.checkpoint.index import INDEX, Damaged, File, Index, read_index
from shoal.train.data.naming import named

CHECKPOINTS = "checkpoints"  # in the folder of a run
PIECE = 1 << 22  # bytes read or written at once


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return folder / f"step-{step:08d}"


def unfinished(folder: Path, step: int) -> Path:
    """Where it lies while it is written."""
    return folder / f".step-{step:08d}.unfinished"


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, sound or not, ascending."""
    if not folder.is_dir():
        return []
    return sorted(
        int(found[1]) for entry in os.scandir(folder) if (found := re.fullmatch(r"step-(\d{8,})", entry.name))
    )


def candidates(path: Path) -> list[Path]:
    """The checkpoints that a path may stand for, newest first: itself, those in it, or those of the run in it."""
    if (path / INDEX).exists() or re.fullmatch(r"step-\d{8,}", path.name):
        return [path]
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    return [path_of(folder, step) for step in reversed(steps(folder))]


def latest(path: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest of the candidates that is whole, to the last byte; warn: is told of each one that is not."""
    for candidate in candidates(path):
        try:
            check(candidate)
            return candidate
        except Damaged as damaged:
            warn(passed_over(candidate, str(damaged)))
    return None


def passed_over(candidate: Path, why: str) -> str:
    """The line about a checkpoint that is passed over."""
    return f"the checkpoint {named(candidate)} is passed over: {why}"


def check(path: Path, part: int = 0, parts: int = 1) -> Index:
    """The index of a checkpoint whose every byte is as it was written; of `parts` checkers each reads its part of the
    files. Raises Damaged.
    """
    index = read_index(path)
    chunks: dict[int, list[tuple[int, int, int]]] = {}
    for stored in index.tensors.values():
        for chunk in stored.chunks:
            chunks.setdefault(chunk.file, []).append((chunk.at, stored.size(chunk), chunk.check))
    for number in range(part, len(index.files), parts):
        file = index.files[number]
        with opened(path, file) as content:
            place = 0
            for at, size, expected in [(0, file.head, file.check), *sorted(chunks.get(number, ()))]:
                if at != place or _crc(content, size) != expected:
                    raise Damaged(f"the checksums of its {file.name} do not fit its content")
                place += size
            if place != file.size:
                raise Damaged(f"its {file.name} holds what its {INDEX} does not name")
    return index


def opened(path: Path, file: File) -> BufferedReader:
    """A file of a checkpoint, of the right size. Raises Damaged."""
    try:
        content = (path / file.name).open("rb")
    except FileNotFoundError:
        raise Damaged(f"its {file.name} is missing") from None
    except OSError as error:
        raise Damaged(f"its {file.name} cannot be read ({error.strerror})") from None
    actual = os.fstat(content.fileno()).st_size
    if actual != file.size:
        content.close()
        raise Damaged(f"its {file.name} has {actual:,} bytes and should have {file.size:,}")
    return content


def _crc(content: BufferedReader, size: int) -> int:
    """CRC-32 of the next `size` bytes."""
    check = 0
    for start in range(0, size, PIECE):
        check = zlib.crc32(content.read(min(PIECE, size - start)), check)
    return check


def begin(folder: Path, step: int) -> Path:
    """The empty hidden folder in which a checkpoint is written."""
    hidden = unfinished(folder, step)
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    return hidden


def commit(folder: Path, step: int, index: bytes) -> Path:
    """Makes the hidden folder, whose files are complete and on the disk, a checkpoint with this index."""
    hidden, path = unfinished(folder, step), path_of(folder, step)
    with (hidden / INDEX).open("xb") as file:
        file.write(index)
        file.flush()
        os.fsync(file.fileno())
    _sync(hidden)
    hidden.rename(path)
    _sync(folder)
    return path


def prune(folder: Path, keep: int) -> None:
    """Deletes all checkpoints but the `keep` newest."""
    for step in steps(folder)[:-keep]:
        gone = folder / f".step-{step:08d}.deleted"
        shutil.rmtree(gone, ignore_errors=True)
        path_of(folder, step).rename(gone)  # first, so that it is never there in part
        shutil.rmtree(gone)


def clean(folder: Path) -> None:
    """Removes what saves and deletions that were killed have left; nobody else may be at work in the folder."""
    for remains in _hidden(folder):
        shutil.rmtree(remains, ignore_errors=True)


def _hidden(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from folder.glob(".step-*.unfinished")
        yield from folder.glob(".step-*.deleted")


def set_aside(folder: Path, beyond: int) -> None:
    """Moves the checkpoints after more than `beyond` steps, which the run that starts now does not continue, into a folder
    beside: checkpoints.1, checkpoints.2 and so on.
    """
    moved = [step for step in steps(folder) if step > beyond]
    if not moved:
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    aside.mkdir()
    for step in moved:
        path_of(folder, step).rename(path_of(aside, step))


def _sync(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
