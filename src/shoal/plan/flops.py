"""Floating-point operations of one rank's step in closed form: matrix products, and attention's two. No torch.

Two per multiplication, causal attention only for the pairs that count, backward twice as much as forward; what is computed
again in backward counts once more. Norms, activation functions and the optimizer count nothing. As torch computes it on
CPUs: pairs that a mask hides are computed where a tile has a mask.
"""

from math import prod

from shoal.axes.context.order import kv_heads_each, places
from shoal.axes.context.tiles import Sight
from shoal.axes.pipeline.stage import Stage
from shoal.axes.tensor.memory import masked_products
from shoal.mesh import Mesh
from shoal.plan.pieces import mesh_of, pieces_of
from shoal.plan.traffic import crossing, stages_for
from shoal.spec.job import Job


def step_flops(job: Job, rank: int) -> dict[str, int]:
    """Of one training step on `rank` in which every target counts: "products" and "attention"."""
    mesh, totals = mesh_of(job), {"products": 0, "attention": 0}
    weights = _weights(job, rank)
    attention = 6 * _multiplications(job, mesh, rank) 
    for micro_batch in range(job.layout.micro_batches):
        for stage in stages_for(job, mesh, rank, micro_batch):
            ...
    return totals
