"""What other ranks hold too, bit for bit: which of a rank's states, along which axes, and what comparing them sends. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from shoal.axes.piece import Piece, Span
from shoal.axes.zero import cost as zero
from shoal.mesh import BASE, Mesh
from shoal.plan.pieces import mesh_of, pair_of, pieces_of
from shoal.plan.traffic import Store, stores_of
from shoal.spec.inventory import buffers
from shoal.spec.job import Job
from shoal.transfer import Transfer, traffic

HASH = 8  # bytes of a hash
MOMENTS = ("moment1", "moment2")

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Copy:
    """Elements [start, stop) of what a rank keeps, flattened, of the parameter or buffer `name`.

    kind: "weight", "buffer", or a state of the optimizer: "moment1", "moment2", "master" of bfloat16 weights.
    """

    kind: str
    name: str
    start: int
    stop: int


def copies_of(job: Job, rank: int) -> dict[Axes, list[Copy]]:
    """What `rank` holds that others hold too, by the axes whose ranks do, in an order that these agree on.

    The axes are all that any rank of the job asks for, in one order, so that all can make their groups; a list may be empty.
    """
    mesh = mesh_of(job)
    stages = mesh.group("pp", rank)
    asked = {axes for stage in stages for axes, _, _ in _candidates(job, mesh, stage)}
    copies: dict[Axes, list[Copy]] = {axes: [] for axes in sorted(asked)}
    for axes, copy, held in _candidates(job, mesh, rank):
        start, stop = max(copy.start, held.start), min(copy.stop, held.stop)
        if start < stop:
            copies[axes].append(Copy(copy.kind, copy.name, start, stop))
    return copies


def everyone(job: Job) -> Axes:
    """The axes along which all ranks of the job lie."""
    mesh = mesh_of(job)
    return tuple(axis for axis in BASE if mesh.size(axis) > 1)


def check_transfers(job: Job, rank: int) -> list[Transfer]:
    """What one check of the replicas sends on `rank`: its hashes to those who hold the same, and one word to all."""
    mesh = mesh_of(job)
    moved = []
    for axes, copies in copies_of(job, rank).items():
        if copies:
            moved.append(_transfer(mesh, axes, rank, "all_gather", len(copies) * len(mesh.group(axes, rank))))
    if mesh.world > 1:
        moved.append(_transfer(mesh, everyone(job), rank, "all_reduce", 1))
    return moved


def _transfer(mesh: Mesh, axes: Axes, rank: int, op: str, hashes: int) -> Transfer:
    ranks = mesh.group(axes, rank)
    return Transfer("check", "+".join(axes), op, *traffic(op, hashes, HASH, len(ranks), ranks.index(rank)))


def _candidates(job: Job, mesh: Mesh, rank: int) -> Iterator[tuple[Axes, Copy, range]]:
    """(axes, copy, the elements of the flattened piece that `rank` holds in this kind), where the axes have several ranks.

    Whatever ZeRO's shards hold of it: so pipeline ranks alone differ in what axes they name.
    """
    pieces = pieces_of(job, rank)
    stores = stores_of(job, rank)
    homes = {parameter.name: store for store in stores for part in store.parts.values() for parameter in part}
    shards = {span.name: span for store in stores for span in _spans(store)}
    states = (*MOMENTS, "master") if stores[0].cut.masters else MOMENTS
    for piece in pieces:
        name, size = piece.parameter.name, prod(piece.shape)
        span, store = shards.get(name), homes[name]
        shard = range(span.first, span.first + span.stop - span.start) if span else range(0)
        for kind in ("weight", *states):
            sharded = store.cut.stage == 3 or (store.cut.stage > 0 and kind != "weight")
            along = ("replicate",) if sharded else store.axes
            for start, stop, shared in _segments(piece):
                if axes := _several(mesh, (*along, *shared)):
                    yield axes, Copy(kind, name, start, stop), shard if sharded else range(size)
    held = {piece.parameter.name for piece in pieces}
    axes = _several(mesh, ("dp", "cp", "tp", *(["twin"] if pair_of(job) == "twin" else [])))
    for name, shape in buffers(job.model).items():
        if axes and name.replace("bias", "weight") in held:  # a bias lies where its router's weight does
            yield axes, Copy("buffer", name, 0, prod(shape)), range(prod(shape))


def _spans(store: Store) -> Iterator[Span]:
    """What lies in this rank's shards of a store; all of it where nothing is cut."""
    for spans in zero.held_spans(store.parts, store.cut, store.shard):
        yield from spans


def _segments(piece: Piece) -> Iterator[tuple[int, int, Axes]]:
    """The elements [start, stop) of a flattened piece that the ranks along some axes all keep, and those axes."""
    row = prod(piece.shape[1:])
    edges = {0, piece.shape[0], *(edge for share in piece.shares for edge in (share.start, share.stop))}
    for start, stop in pairwise(sorted(edges)):
        axes = tuple(share.axis for share in piece.shares if share.start <= start and stop <= share.stop)
        yield start * row, stop * row, axes


def _several(mesh: Mesh, axes: Axes) -> Axes:
    """Those of the axes that have more than one rank."""
    return tuple(axis for axis in axes if mesh.size(axis) > 1)
