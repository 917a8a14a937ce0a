"""Floating-point operations of one rank's step in closed form: matrix products, and attention's two. No torch.

Two per multiplication; backward twice as much as forward, and what is computed again in backward once more. Norms, activation
functions and the optimizer count nothing. Attention counts as torch computes it on CPUs: causal where nothing else is
masked, so only the pairs that see each other; all pairs of a tile that has a mask.
"""

from collections.abc import Mapping
from functools import cache
from math import prod

from shoal.axes.context.order import places
from shoal.axes.context.tiles import Sight
from shoal.axes.piece import Piece
from shoal.axes.pipeline.stage import Stage
from shoal.axes.tensor.memory import masked_products
from shoal.mesh import Mesh
from shoal.plan.experts import Routed, expert_rows, own_tokens
from shoal.plan.pieces import TIED, mesh_of, pieces_of
from shoal.plan.stages import stages_for
from shoal.plan.traffic import crossing
from shoal.spec.inventory import Parameter
from shoal.spec.job import Job

FORWARD, STEP = 2, 6  # per multiplication


def step_flops(job: Job, rank: int, routed: Mapping[int, Routed] | None = None) -> dict[str, int]:
    """Of one training step on `rank` in which every target counts: "products" and "attention".

    routed: by rank of the world what routers sent in it; None: experts have as many tokens as they have on average.
    """
    mesh, pieces = mesh_of(job), pieces_of(job, rank)
    attention = _pairs(job, mesh, rank)
    chooses = own_tokens(job, mesh, rank)
    of_stage = cache(lambda stage: _products(job, stage, pieces, chooses))
    of_experts = cache(lambda layer, again, i: _experts(job, rank, layer, again, chooses, i, routed))
    totals = {"products": 0, "attention": 0}
    for micro_batch in range(job.layout.micro_batches):
        for stage in stages_for(job, mesh, rank, micro_batch):
            totals["products"] += of_stage(stage)
            for layer in set(stage.layers) & set(job.model.mixtures):
                totals["products"] += of_experts(layer, layer in stage.full(), micro_batch if routed else 0)
            totals["attention"] += attention * (STEP * len(stage.layers) + FORWARD * len(stage.full()))
    return totals


def _products(job: Job, stage: Stage, pieces: list[Piece], chooses: int) -> int:
    """Of a stage's matrix products for one micro-batch. A rank of a grid forms as many: its part of q blocks of tokens."""
    again = {f"blocks.{layer}" for layer in stage.full()}
    blocks = {f"blocks.{layer}" for layer in stage.layers}
    flops = 0.0
    for piece in pieces:
        parameter = piece.parameter
        if parameter.unit in blocks and parameter.decay and not parameter.experts:
            flops += prod(piece.shape) * _use(job, parameter, chooses) * (STEP + FORWARD * (parameter.unit in again))
        elif stage.last and parameter.name == (TIED if job.model.tied else "head.weight"):
            flops += _head(job, piece)
    return round(flops * job.micro_batch * job.own_sequence)


def _use(job: Job, parameter: Parameter, chooses: int) -> float:
    """How often a rank uses a parameter of a block, which no routed expert has, for each of its tokens.

    chooses: how many of them it chooses experts for. Tensor ranks that do not cut a mixture of experts share its tokens
    out, and its router's where the sequence is cut.
    """
    layout = job.layout
    apart = parameter.mixture and (layout.etp == 1 or (layout.sp and parameter.cut is None))
    return chooses / (job.micro_batch * job.own_sequence) if apart else 1.0


def _experts(
    job: Job,
    rank: int,
    layer: int,
    again: bool,
    chooses: int,
    micro_batch: int,
    routed: Mapping[int, Routed] | None,
) -> int:
    """Of a layer's routed experts for one micro-batch, and of its auxiliary losses, a product over experts for each token."""
    moe = job.model.moe
    assert moe is not None
    rows = expert_rows(job, rank, layer, micro_batch, routed)
    flops = (STEP + FORWARD * again) * rows * 3 * job.model.hidden * -(-moe.expert_ffn // job.layout.etp)
    if moe.losses:  # loads have no gradient, so backward has one product
        flops += FORWARD * (2 + again) * chooses * moe.experts
    return round(flops)


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
