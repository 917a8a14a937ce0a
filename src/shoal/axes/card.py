"""The six facts by which every parallelism is described; each room of axes/ fills in one Card."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """What a person must know of one parallelism. All fields are for reading; the figures live in the room's cost.py."""

    key: str  # the key of a layout that switches it on
    name: str
    cuts: str  # the one tensor dimension that is cut
    keeps: str  # what a rank holds of its own
    replicated: str  # what every rank holds alike
    moves: str  # the cargo and its bytes, one direction, per rank
    primitive: str
    when: str
    pros: tuple[str, ...]
    cons: tuple[str, ...]
    cures: tuple[str, ...]  # "compute", "memory" or both
