"""Ring algorithms as data: in which round which rank passes which piece to its neighbour (spec COL-3). No torch.

A plan is run by comm/ring_run.py, drawn by the viewer, and sums up to the closed forms of shoal/transfer.py. Ranks and
pieces are numbered modulo the ranks; every round each rank sends one piece to the next rank and receives one from the
one before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Move:
    """In one round `rank` sends `piece` to `to`, which adds it to its own or overwrites its own with it."""

    rank: int
    piece: int
    to: int
    action: Literal["add", "copy"]


Plan = list[list[Move]]  # per round, one Move for each rank


def reduce_scatter_plan(ranks: int) -> Plan:
    """N - 1 rounds after which rank i owns the complete piece i: in round k it sends piece i - k - 1."""
    return _rounds(ranks, shift=-1, action="add")


def all_gather_plan(ranks: int) -> Plan:
    """N - 1 rounds that start with piece i on rank i: in round k it sends piece i - k, the last that it received."""
    return _rounds(ranks, shift=0, action="copy")


def all_reduce_plan(ranks: int) -> Plan:
    """2 (N - 1) rounds: rank i sends piece i - k until it owns i + 1, complete; then the same with i + 1 - k, copying.

    The numbering of spec COL-3; it differs by one from `reduce_scatter_plan`, whose result each rank keeps.
    """
    return _rounds(ranks, shift=0, action="add") + _rounds(ranks, shift=1, action="copy")


def elements_moved(plan: Plan, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """(sent, received) by rank: elements over all rounds, with sizes[j] elements in piece j."""
    sent, received = [0] * len(sizes), [0] * len(sizes)
    for moves in plan:
        for move in moves:
            sent[move.rank] += sizes[move.piece]
            received[move.to] += sizes[move.piece]
    return sent, received


def _rounds(ranks: int, shift: int, action: Literal["add", "copy"]) -> Plan:
    """N - 1 rounds; in round k rank i sends piece i - k + shift."""
    return [[Move(i, (i - k + shift) % ranks, (i + 1) % ranks, action) for i in range(ranks)] for k in range(ranks - 1)]
