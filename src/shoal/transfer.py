"""Transfers: the bytes that a collective sends and receives, in closed form (spec CNT-1..3, COL-2, COL-3). No torch.

The ledger records these while a layout runs, and axes/*/cost.py yields the same without running. Bytes are payload,
sent and received apart; what a rank keeps for itself counts nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    """Bytes that one rank sent and received by `calls` calls of one collective.

    phase: "setup", "forward", "backward", "optimizer", "evaluate" or "check". axis: a mesh axis, several joined with "+".
    layer and micro_batch: None where the transfer belongs to no single one.
    """

    phase: str
    axis: str
    op: str
    sent: int
    received: int
    calls: int = 1
    layer: int | None = None
    micro_batch: int | None = None


# What a rank of a ring sends per byte of the full tensor in a large group; all_to_all: of its own buffer (CNT-2)
LARGE_GROUP_FACTOR = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def factor(op: str, ranks):
    """What a rank of N sends per byte, exact where lengths divide: the large group's, times (N - 1) / N. ranks: N."""
    return LARGE_GROUP_FACTOR[op] * (ranks - 1) / ranks


def pieces(elements: int, ranks: int) -> list[int]:
    """Sizes of `ranks` pieces of `elements`: as equal as can be, the first `elements % ranks` one longer."""
    return [_piece(elements, ranks, index) for index in range(ranks)]


def traffic(
    op: str,
    elements: int,
    width: int,
    ranks: int,
    rank: int,
    root: int = 0,
    sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
) -> tuple[int, int]:
    """(sent, received) bytes of rank number `rank` in a group of `ranks`; (0, 0) in a group of one.

    elements: of the full tensor, all pieces together; for all_to_all of this rank's own buffer; for send and receive of
    the message. width: bytes per element; 1 counts elements. sizes: elements of piece i, by default those of
    pieces(elements, ranks); for all_to_all sizes[i] goes to rank i and receive_sizes[i] comes from it (by default every
    rank cuts a buffer of the same length in the same way). elements and rank may be NumPy arrays when neither sizes nor
    receive_sizes is given.

    With Z elements cut into pieces z (spec COL-2, COL-3; indices modulo the ranks):
      all_reduce      the two rings of COL-3: sends 2Z - z[i+1] - z[i+2], receives 2Z - z[i] - z[i+1]
      reduce_scatter  a ring that ends with piece i on rank i: sends Z - z[i], receives Z - z[i-1]
      all_gather      a ring that starts with piece i on rank i: sends Z - z[i+1], receives Z - z[i]
      broadcast       a chain root, root + 1, ...: all but the last send Z, all but the root receive Z
      reduce          a chain root + 1, ..., root: all but the root send Z, all but the first receive Z
      scatter, gather straight from or to the root
    """

    def z(index):
        return _piece(elements, ranks, index % ranks) if sizes is None else sizes[index % ranks]

    total = elements if sizes is None else sum(sizes)
    from_root = (rank - root) % ranks  # place in the chain that starts at the root
    match op:
        case "all_reduce":
            sent, received = 2 * total - z(rank + 1) - z(rank + 2), 2 * total - z(rank) - z(rank + 1)
        case "reduce_scatter":
            sent, received = total - z(rank), total - z(rank - 1)
        case "all_gather":
            sent, received = total - z(rank + 1), total - z(rank)
        case "broadcast":
            sent, received = total * (from_root != ranks - 1), total * (from_root != 0)
        case "reduce":
            sent, received = total * (from_root != 0), total * (from_root != 1 % ranks)
        case "scatter":
            sent, received = (total - z(rank)) * (from_root == 0), z(rank) * (from_root != 0)
        case "gather":
            sent, received = z(rank) * (from_root != 0), (total - z(rank)) * (from_root == 0)
        case "all_to_all":
            sent = total - z(rank)
            received = (ranks - 1) * z(rank) if receive_sizes is None else sum(receive_sizes) - receive_sizes[rank]
        case "send":
            sent, received = total * (ranks > 1), 0
        case "receive":
            sent, received = 0, total * (ranks > 1)
        case "barrier":
            sent, received = 0, 0
        case _:
            raise AssertionError(f"{op} is not a collective")
    return sent * width, received * width


def _piece(elements, ranks, index):
    """Size of piece `index`; integers or NumPy arrays alike."""
    return elements // ranks + (index < elements % ranks)
