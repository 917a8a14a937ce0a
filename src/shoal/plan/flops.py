"""Floating-point operations of one rank's step in closed form: matrix products, and attention's two. No torch.

Two per multiplication; backward twice as much as forward, and what is computed again in backward once more. Norms, activation
functions and the optimizer count nothing. Attention counts as torch computes it on CPUs: causal where nothing else is
masked, so only the pairs that see each other; all pairs of a tile that has a mask.
"""

from functools import cache
from math import prod

from shoal.axes.context.order import places
from shoal.axes.context.tiles import Sight
from shoal.axes.piece import Piece
from shoal.axes.pipeline.stage import Stage
from shoal.axes.tensor.memory import masked_products
from shoal.mesh import Mesh
from shoal.plan.pieces import TIED, mesh_of, pieces_of
from shoal.plan.stages import stages_for
from shoal.plan.traffic import crossing
from shoal.spec.inventory import Parameter
from shoal.spec.job import Job

FORWARD, STEP = 2, 6  # per multiplication


def step_flops(job: Job, rank: int) -> dict[str, int]:
    """Of one training step on `rank` in which every target counts: "products" and "attention"."""
    mesh, pieces = mesh_of(job), pieces_of(job, rank)
    attention = _pairs(job, mesh, rank)
    of_stage = cache(lambda stage: _products(job, stage, pieces))
    totals = {"products": 0, "attention": 0}
    for micro_batch in range(job.layout.micro_batches):
        for stage in stages_for(job, mesh, rank, micro_batch):
            totals["products"] += of_stage(stage)
            totals["attention"] += attention * (STEP * len(stage.layers) + FORWARD * len(stage.full()))
    return totals


def _products(job: Job, stage: Stage, pieces: list[Piece]) -> int:
    """Of a stage's matrix products for one micro-batch. A rank of a grid forms as many: its part of q blocks of tokens."""
    again = {f"blocks.{layer}" for layer in stage.full()}
    blocks = {f"blocks.{layer}" for layer in stage.layers}
    flops = 0.0
    for piece in pieces:
        parameter = piece.parameter
        if parameter.unit in blocks and parameter.decay:
            flops += prod(piece.shape) * _use(job, parameter) * (STEP + FORWARD * (parameter.unit in again))
        elif stage.last and parameter.name == (TIED if job.model.tied else "head.weight"):
            flops += _head(job, piece)
    return round(flops * job.micro_batch * job.own_sequence)


def _use(job: Job, parameter: Parameter) -> float:
    """How often a rank uses a parameter of a block for each of its tokens: experts as often as tokens choose them on average.

    Tensor ranks that do not cut a mixture of experts share its tokens out, and its router's where the sequence is cut.
    """
    layout, moe = job.layout, job.model.moe
    if moe is None or not parameter.mixture:
        return 1
    apart = layout.etp == 1 or (layout.sp and parameter.cut is None)
    use = 1 / layout.tp_size if apart else 1.0
    return use * layout.ep * moe.top_k / moe.experts if parameter.experts else use


def _head(job: Job, piece: Piece) -> int:
    """Of the head's product for one token: of real ids alone; on a grid of all, whose logits are formed twice."""
    if job.layout.tp_grid:
        return prod(piece.shape) * (STEP + FORWARD)
    return sum(run.stop - run.start for run in piece.runs[0]) * job.model.hidden * STEP


def _pairs(job: Job, mesh: Mesh, rank: int) -> int:
    """Multiplications of attention's two products in one layer's forward for one micro-batch."""
    cut, model = crossing(job), job.model
    if job.layout.cp == 1:
        masked = masked_products(model, cut.sequence, job.data.packing == "packed")
        pairs = sum(rows * keys for rows, keys in masked) if masked else cut.sequence * (cut.sequence + 1) // 2
        return 2 * cut.batch * cut.heads * model.head_size * pairs
    axis = {"ulysses": None, "hybrid": "ring"}.get(cut.kind, "cp")
    index = 0 if axis is None else mesh.coordinate(axis, rank)
    shares = [places(cut.ring_kind, cut.sequence, cut.around, owner) for owner in range(cut.around)]
    sight = Sight(cut.sequence, window=model.window)
    pairs = 0
    for owner in shares:
        for tile in sight.tiles(shares[index], owner):
            rows, keys = (part.stop - part.start for part in (tile.queries, tile.keys))
            pairs += rows * (rows + 1) // 2 if tile.seen == "causal" else rows * keys
    return 2 * cut.batch * (cut.heads // cut.across) * model.head_size * pairs
