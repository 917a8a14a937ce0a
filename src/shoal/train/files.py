"""Files of a run: a full disk is one line, and what is not finished does not stay."""

import errno
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
def removed(unfinished: Path) -> Iterator[None]:
    """Afterwards the file `unfinished` is gone, whatever happened, unless it has got its real name."""
    try:
        yield
    finally:
        unfinished.unlink(missing_ok=True)
