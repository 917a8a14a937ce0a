"""Composes the axes' memory of activations into what a rank keeps of its blocks' forwards, and the most of it. No torch.

Exact for blocks run eagerly on CPUs, as axes/tensor/memory.py counts: what autograd keeps, and what weight gradients that
are put off wait for. Not counted are embedding and head, what the blocks of a micro-batch share (rope's rotation, keys of
dropout), tensors that live during a single operation, and messages between stages.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from typing import NamedTuple

from shoal.axes.context.memory import exchanged_bytes
from shoal.axes.expert.memory import Mixture
from shoal.axes.pipeline import cost as pipeline
from shoal.axes.pipeline.stage import Stage
from shoal.axes.recompute.cost import Mode, remade_bytes
from shoal.axes.tensor.cost import Axis, Shape
from shoal.axes.tensor.memory import block_activations, masked_products
from shoal.axes.tensor2d import cost as tensor2d
from shoal.plan.experts import Routed, mixture_bytes
from shoal.plan.pieces import mesh_of
from shoal.plan.stages import schedule_of, stages_of
from shoal.plan.traffic import crossing
from shoal.spec.job import WIDTH, Job


@dataclass(frozen=True)
class Block:
    """Bytes of one block and one micro-batch on a rank.

    kept: from the end of its forward to its backward, the block's input included. remade: what comes on top in backward,
    where the block is computed again. waiting: what its weight gradients need from I to W, where backward is split.
    """

    kept: float
    remade: float
    waiting: float


def activation_bytes(
    job: Job, rank: int, ends: tuple[int, int] = (0, 0), routed: Mapping[int, Routed] | None = None
) -> int:
    """The most bytes of activations that the blocks on `rank` keep at once, over all micro-batches that are alive.

    As it is before and after every instruction of the schedule, and when a block has been computed again. ends: what the
    embedding and the head keep of a micro-batch, on the ranks that have them. routed: by rank of the world what routers sent
    in the step; None: experts' activations are means.
    """
    schedule = schedule_of(job) if job.layout.pp > 1 else None
    place = mesh_of(job).coordinate("pp", rank)
    split = (
        {schedule.stage_of(place, x.chunk) for x in schedule.instructions(place) if x.kind == "W"} if schedule else ()
    )
    apart = routed is not None and job.model.moe is not None  # else micro-batches are alike
    stages = stages_of(job)

    @cache
    def alive(stage: int, micro_batch: int) -> _Alive:
        experts = partial(mixture_bytes, job, rank, micro_batch, routed)
        return _stage(job, stages[stage], stage in split, ends, experts)

    def sized(what: str) -> Callable[[int, int], float]:
        return lambda stage, micro_batch: getattr(alive(stage, micro_batch if apart else 0), what)

    if schedule is None:
        each = [alive(0, micro_batch) for micro_batch in range(job.layout.micro_batches if apart else 1)]
        return round(max(one.kept + one.beyond for one in each))
    most = pipeline.activation_bytes(schedule, place, sized("beyond"), sized("waiting"), kept=sized("kept"))
    return round(most)


class _Alive(NamedTuple):
    """Bytes of one micro-batch in a stage. beyond: what backward needs at most on top of kept."""

    kept: float
    waiting: float
    beyond: float


def _stage(
    job: Job, stage: Stage, split: bool, ends: tuple[int, int], experts: Callable[[int, bool], Mixture | None]
) -> _Alive:
    """When a block is computed again, those behind it are gone; where backward is `split` they wait for W.

    experts: what those of a layer keep, by its number and whether it is computed again selectively.
    """
    embedding, head = (Block(size, 0, 0) for size in ends)
    modes = [(layer, stage.mode(layer)) for layer in reversed(stage.layers)]
    blocks = [block_bytes(job, mode, experts(layer, mode == "selective")) for layer, mode in modes]
    blocks = [head] * stage.last + blocks + [embedding] * stage.first
    change = [(block.waiting if split else 0) - block.kept for block in blocks]
    behind = accumulate(change, initial=0)
    beyond = max([0, *(block.remade + gone for block, gone in zip(blocks, behind, strict=False) if block.remade)])
    return _Alive(sum(block.kept for block in blocks), sum(block.waiting for block in blocks), beyond)


def block_bytes(job: Job, mode: Mode, experts: Mixture | None = None) -> Block:
    """Those of a block in a mode; without experts, whose bytes are given, they are the same on every rank."""
    layout, model, width = job.layout, job.model, WIDTH[job.train.dtype]
    side = layout.tp_grid[0] if layout.tp_grid else 1
    own = Shape(job.micro_batch // side, job.own_sequence, model.hidden, width)  # of whole hidden features
    axis = Axis(side if layout.tp_grid else layout.tp_size, 0, layout.sp, layout.regather)
    documents = job.data.packing == "packed"
    cut = crossing(job)
    if layout.cp > 1:  # attention across ranks looks at tiles, under masks of their own
        model, documents = replace(model, window=None), False
    whole: float
    if layout.tp_grid:
        grid = tensor2d.Grid(side, 0, 0, job.micro_batch, job.own_sequence, width)
        whole = tensor2d.activation_bytes(grid, model, documents)
    else:
        whole = block_activations(model, own, axis, documents, mlp=experts is None).total
    whole += exchanged_bytes(model, cut)
    whole += experts.kept if experts else 0
    waiting = _waiting(job, own, axis, mlp=experts is None) + (experts.waiting if experts else 0)
    if mode == "full":
        kept = own.elements * width // (side if layout.tp_grid else axis.ranks if layout.sp else 1)
        return Block(kept, whole - kept, waiting)
    if mode == "selective":
        turned = cut.across == 1 and not masked_products(model, own.s, documents)
        whole -= remade_bytes(model, own, axis, turned, normed=side == 1, mlp=experts is None)
        whole -= experts.remade if experts else 0
    return Block(whole, 0, waiting)


def _waiting(job: Job, own: Shape, axis: Axis, mlp: bool) -> int:
    """What linear layers' weight gradients need: inputs, and gradients of outputs, whole where the sequence is cut.

    mlp: whether the block's two layers of an MLP are among them, or experts take their place.
    """
    model, hidden = job.model, own.h // (axis.ranks if job.layout.tp_grid else 1)
    heads, kv_heads, ffn = model.heads // axis.ranks, max(1, model.kv_heads // axis.ranks), -(-model.ffn // axis.ranks)
    elements = 2 * hidden + (2 * heads + 2 * kv_heads) * model.head_size
    elements += 2 * hidden + (3 if model.mlp == "swiglu" else 2) * ffn if mlp else 0
    return own.b * own.s * elements * own.width
