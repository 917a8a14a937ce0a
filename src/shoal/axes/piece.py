"""What one rank keeps of one parameter: which part, which of it others keep too, and whose gradients add up. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

from shoal.spec.inventory import Parameter


class Run(NamedTuple):
    """Indices [start, stop) of the whole parameter along one dim, which lie at [at, at + stop - start) of the piece."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Share:
    """Rows [start, stop) of a piece's dim 0 that every rank along `axis` keeps.

    partial: each of these ranks finds only a part of the rows' gradient, so a step ends with a sum over them.
    """

    axis: str
    start: int
    stop: int
    partial: bool


@dataclass(frozen=True)
class Piece:
    """A rank's piece of `parameter`, of `shape`. runs: by dim; what no run covers is padding, which stays zero."""

    parameter: Parameter
    shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    shares: tuple[Share, ...] = ()

    @property
    def local(self) -> Parameter:
        """The parameter as this rank sees it: under its own name, in the piece's shape."""
        return Parameter(**{**vars(self.parameter), "shape": self.shape})

    def blocks(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """(where in the whole, where in the piece) of each block that is kept."""
        for runs in product(*self.runs):
            yield (
                tuple(slice(run.start, run.stop) for run in runs),
                tuple(slice(run.at, run.at + run.stop - run.start) for run in runs),
            )

    def take(self, whole: Any, piece: Any) -> None:
        """Copies this rank's part of the array or tensor `whole` into `piece`, whose padding stays as it is."""
        for there, here in self.blocks():
            piece[here] = whole[there]

    def put(self, piece: Any, whole: Any) -> None:
        """Copies the array or tensor `piece` to its place in `whole`."""
        for there, here in self.blocks():
            whole[there] = piece[here]


def everything(parameter: Parameter, shares: Sequence[Share] = ()) -> Piece:
    """The piece that is the whole parameter."""
    return Piece(parameter, parameter.shape, tuple((Run(0, size, 0),) for size in parameter.shape), tuple(shares))


def even(rows: int, units: int, ranks: int, index: int) -> tuple[Run, int]:
    """Share number `index` of `ranks` of `rows` rows that hold `units` whole units, and the length of every share.

    Shares are equally long; where the units do not divide, the last ones are filled up with padding.
    """
    size = rows // units
    length = -(-units // ranks) * size
    start = min(index * length, rows)
    return Run(start, min(start + length, rows), 0), length


class Span(NamedTuple):
    """Elements [start, stop) of a flat buffer that belong to the parameter `name`, whose piece's element `first` comes first."""

    name: str
    first: int
    start: int
    stop: int


def shared_runs(spans: Sequence[Span], pieces: Mapping[str, Piece], axis: str) -> list[tuple[int, int]]:
    """Runs [start, stop) of a flat buffer that hold partial gradients of what the ranks along `axis` all keep."""
    return [
        run
        for span in spans
        for share in pieces[span.name].shares
        if share.axis == axis and share.partial
        for run in _overlap(span, pieces[span.name], share)
    ]


def counted_runs(spans: Sequence[Span], pieces: Mapping[str, Piece], elsewhere: set[str]) -> list[tuple[int, int]]:
    """Runs of a flat buffer that this rank counts in a global norm, so that every element counts once.

    elsewhere: axes along which this rank is not the first, so that another counts what they share.
    """
    counted: list[tuple[int, int]] = []
    for span in spans:
        piece = pieces[span.name]
        skipped = sorted(
            run for share in piece.shares if share.axis in elsewhere for run in _overlap(span, piece, share)
        )
        place = span.start
        for start, stop in [*skipped, (span.stop, span.stop)]:
            if start > place:
                begin = counted.pop()[0] if counted and counted[-1][1] == place else place
                counted.append((begin, start))
            place = max(place, stop)
    return counted


def _overlap(span: Span, piece: Piece, share: Share) -> list[tuple[int, int]]:
    """Where a share's elements lie in the buffer, as far as the span holds them: one run or none."""
    row = prod(piece.shape[1:])
    shift = span.start - span.first
    start, stop = max(span.start, share.start * row + shift), min(span.stop, share.stop * row + shift)
    return [(start, stop)] if start < stop else []
