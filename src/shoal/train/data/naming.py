"""Paths in messages: on one line, and whole, since the end of a path says most."""

from pathlib import Path

from shoal.spec.errors import shown

LONGEST = 1000  # characters


def named(path: str | Path) -> str:
    """A path as a message shows it."""
    return shown(path, LONGEST)
