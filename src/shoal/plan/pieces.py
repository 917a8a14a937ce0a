"""Which piece of every parameter a rank keeps, composed from the axes that cut parameters. No torch."""

from shoal.axes.piece import Piece
from shoal.axes.tensor import cut as tensor
from shoal.axes.tensor2d import cut as tensor2d
from shoal.mesh import Mesh
from shoal.spec.inventory import inventory
from shoal.spec.job import Job


def mesh_of(job: Job) -> Mesh:
    """The mesh of a job's layout, with the axes that its model's KV heads ask for."""
    return Mesh.of(job.layout, job.model.kv_heads)


def pieces_of(job: Job, rank: int) -> list[Piece]:
    """What `rank` keeps of each parameter, in the inventory's order."""
    layout, mesh, parameters = job.layout, mesh_of(job), inventory(job.model)
    if layout.tp_grid:
        # rank (i, j) is number i of its column and number j of its row
        row, column = mesh.coordinate("column", rank), mesh.coordinate("row", rank)
        return [tensor2d.piece(parameter, layout.tp_grid[0], row, column) for parameter in parameters]
    index = mesh.coordinate("tp", rank)
    return [tensor.piece(parameter, layout.tp_size, index, layout.sp) for parameter in parameters]
