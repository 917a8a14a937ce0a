"""Files of a run: a full disk is one line, and what is not finished does not stay."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from shoal.spec.errors import RequestError


@contextmanager
def room_in(folder: Path) -> Iterator[None]:
    """Inside, a disk that is full or a quota that is used up raises RequestError naming train.out."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full and "No space left" not in str(error):
            raise
        raise RequestError(
            "train.out", f"train.out = {folder} is on a disk with no space left; a folder on another one would do"
        ) from None


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A hidden file's path to write to, which at the end becomes `path`; after a failure `path` is as it was.

    A full disk is as in `room_in`.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with room_in(path.parent):
        try:
            yield unfinished
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
