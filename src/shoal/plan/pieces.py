"""Which piece of every parameter a rank keeps, composed from the axes that cut parameters. No torch."""

from dataclasses import replace

from shoal.axes.expert import cut as expert
from shoal.axes.piece import Piece, Share
from shoal.axes.tensor import cut as tensor
from shoal.axes.tensor2d import cut as tensor2d
from shoal.mesh import Mesh
from shoal.plan.stages import chunks_of, schedule_of
from shoal.spec.inventory import Parameter, inventory
from shoal.spec.job import Job

TIED = "embedding.weight"  # the matrix that a tied model uses at both ends


def mesh_of(job: Job) -> Mesh:
    """The mesh of a job's layout, with the axes that its model's KV heads ask for."""
    return Mesh.of(job.layout, job.model.kv_heads)


def pieces_of(job: Job, rank: int) -> list[Piece]:
    """What `rank` keeps of each parameter that it keeps anything of, in the inventory's order."""
    mesh = mesh_of(job)
    if job.layout.pp == 1:
        return [_cut(job, mesh, rank, parameter) for parameter in inventory(job.model)]
    held = {name for names in names_by_chunk(job, rank) for name in names}
    pieces = [_cut(job, mesh, rank, parameter) for parameter in inventory(job.model) if parameter.name in held]
    return [_shared_along_pipeline(job, piece) for piece in pieces]


def names_by_chunk(job: Job, rank: int) -> list[set[str]]:
    """The parameters of each chunk of a pipeline rank. A tied matrix is in each chunk that uses it."""
    named = []
    for stage in chunks_of(job, mesh_of(job), rank):
        units = set(stage.units())
        names = {parameter.name for parameter in inventory(job.model) if parameter.unit in units}
        if job.model.tied and stage.last:
            names.add(TIED)
        named.append(names)
    return named


def _cut(job: Job, mesh: Mesh, rank: int, parameter: Parameter) -> Piece:
    """What the tensor and the expert axis leave `rank` of a parameter."""
    layout = job.layout
    if parameter.mixture:
        ep, tp = mesh.coordinate("ep", rank), mesh.coordinate("tp", rank)
        place = expert.Place(layout.ep, ep, layout.tp_size, tp, cut=layout.etp > 1, sequence=layout.sp)
        return expert.piece(parameter, place)
    if layout.tp_grid:
        # rank (i, j) is number i of its column and number j of its row
        row, column = mesh.coordinate("column", rank), mesh.coordinate("row", rank)
        return tensor2d.piece(parameter, layout.tp_grid[0], row, column)
    return tensor.piece(parameter, layout.tp_size, mesh.coordinate("tp", rank), layout.sp)


def pair_of(job: Job) -> str | None:
    """The axis along which some pipeline ranks keep the same: "twin" where stages exist twice, "ends" where both ends use a
    tied matrix. All ranks have to know, since all of them take part in making its groups.
    """
    if job.layout.pp == 1:
        return None
    routes = schedule_of(job).routes
    if len(routes) > 1:
        return "twin"
    return "ends" if job.model.tied and routes[0][0].rank != routes[0][-1].rank else None


def _shared_along_pipeline(job: Job, piece: Piece) -> Piece:
    """The piece, with the pipeline rank that keeps it too."""
    axis = pair_of(job)
    if axis is None or (axis == "ends" and piece.parameter.name != TIED):
        return piece
    return replace(piece, shares=(*piece.shares, Share(axis, 0, piece.shape[0], partial=True)))
