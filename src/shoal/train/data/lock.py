"""One process at a time: the others wait until it is done, however it ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock that the file `path` stands for while the block runs; the file is gone afterwards.

    The kernel frees the lock of a process that dies. Where the file system has no locks the block just runs.
    Raises OSError when the file cannot be made.
    """
    handle = _acquire(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock is freed, or another's could be removed
        os.close(handle)


def _acquire(path: Path) -> int:
    """An open file that holds the lock."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            return handle
        except BaseException:  # Ctrl-C while waiting
            os.close(handle)
            raise
        try:
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except FileNotFoundError:
            pass
        os.close(handle)  # whoever held the lock before has removed this file: the lock is that of a new one
