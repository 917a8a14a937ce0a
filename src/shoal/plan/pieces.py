"""Which piece of every parameter a rank keeps, composed from the axes that cut parameters. No torch."""

from shoal.axes.piece import Piece
from shoal.axes.tensor import cut as tensor
from shoal.mesh import Mesh
from shoal.spec.inventory import inventory
from shoal.spec.job import Job


def mesh_of(job: Job) -> Mesh:
    """The mesh of a job's layout, with the axes that its model's KV heads ask for."""
    return Mesh.of(job.layout, job.model.kv_heads)


def pieces_of(job: Job, rank: int) -> list[Piece]:
    """What `rank` keeps of each parameter, in the inventory's order."""
    layout, index = job.layout, mesh_of(job).coordinate("tp", rank)
    return [tensor.piece(parameter, layout.tp_size, index, layout.sp) for parameter in inventory(job.model)]
