"""Puts the pieces that ranks hold of each parameter together, and finds ranks that disagree on what they share. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from shoal.axes.piece import Piece
from shoal.verify.compare import Record

Held = Mapping[str, np.ndarray]  # by parameter, what one rank holds of it
Seen = dict[tuple[str, str], tuple[int, bytes]]  # by name and block, the first rank that holds it, and its bits


def whole_record(records: Sequence[Record], pieces: Sequence[Sequence[Piece]]) -> Record:
    """What all ranks together saw: losses of the first, gradients, weights and buffers whole. Both arguments go by rank."""
    steps = range(len(records[0].gradients))
    return replace(
        records[0],
        gradients=[assembled([record.gradients[step] for record in records], pieces) for step in steps],
        before=[
            assembled([record.before[step] for record in records], pieces) for step in range(len(records[0].before))
        ],
        weights=assembled([record.weights for record in records], pieces),
        buffers={name: buffer for record in reversed(records) for name, buffer in record.buffers.items()},
    )


def assembled(held: Sequence[Held], pieces: Sequence[Sequence[Piece]]) -> dict[str, np.ndarray]:
    """Every parameter from the first rank that holds each block of it; NaN where no rank does."""
    whole: dict[str, np.ndarray] = {}
    for of_rank, kept in zip(reversed(held), reversed(pieces), strict=True):
        for piece in kept:
            name = piece.parameter.name
            if name in of_rank:
                if name not in whole:
                    whole[name] = np.full(piece.parameter.shape, np.nan)
                piece.put(of_rank[name], whole[name])
    return whole


def disagreement(held: Sequence[Held], pieces: Sequence[Sequence[Piece]]) -> str | None:
    """The first difference, as a line: a block whose bits differ between ranks that keep it, or padding that is not zero."""
    seen: Seen = {}
    for rank, (of_rank, kept) in enumerate(zip(held, pieces, strict=True)):
        for piece in kept:
            name = piece.parameter.name
            rest = of_rank[name].copy()
            for there, here in piece.blocks():
                if strayed := _strayed(seen, name, str(there), rank, of_rank[name][here].tobytes()):
                    return strayed
                rest[here] = 0
            if rest.any():
                return f"{name}: its padding on rank {rank} is not zero"
    return None


def strayed_buffer(buffers: Sequence[Held]) -> str | None:
    """The first difference between ranks that keep the same buffer, as a line. buffers: whole ones, by rank."""
    seen: Seen = {}
    for rank, of_rank in enumerate(buffers):
        for name, buffer in of_rank.items():
            if strayed := _strayed(seen, name, "", rank, buffer.tobytes()):
                return strayed
    return None


def _strayed(seen: Seen, name: str, block: str, rank: int, bits: bytes) -> str | None:
    """A line if the rank's bits of a block are not those of the first rank that was seen to hold it."""
    first, expected = seen.setdefault((name, block), (rank, bits))
    if bits == expected:
        return None
    return f"{name} differs between rank {first} and rank {rank}, which should hold the same bits"
