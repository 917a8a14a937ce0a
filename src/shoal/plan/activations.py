"""Composes the axes' memory of activations into what a rank keeps of its blocks' forwards, and the most of it. No torch.

Exact for blocks run eagerly on CPUs, as axes/tensor/memory.py counts: what autograd keeps, and what weight gradients that
are put off wait for. Not counted are embedding and head, what the blocks of a micro-batch share (rope's rotation, keys of
dropout), tensors that live during a single operation, and messages between stages.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

from shoal.axes.context.memory import exchanged_bytes
from shoal.axes.pipeline import cost as pipeline
from shoal.axes.pipeline.stage import Stage
from shoal.axes.recompute.cost import Mode, remade_bytes
from shoal.axes.tensor.cost import Axis, Shape
from shoal.axes.tensor.memory import block_activations, masked_products
from shoal.axes.tensor2d import cost as tensor2d
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

    kept: int
    remade: int
    waiting: int


def activation_bytes(job: Job, rank: int, ends: tuple[int, int] = (0, 0)) -> int:
    """The most bytes of activations that the blocks on `rank` keep at once, over all micro-batches that are alive.

    As it is before and after every instruction of the schedule, and when a block has been computed again. ends: what the
    embedding and the head keep of a micro-batch, on the ranks that have them.
    """
    if job.layout.pp == 1:
        (stage,) = stages_of(job)
        kept, _, beyond = _stage(job, stage, False, ends)
        return kept + beyond
    schedule, place = schedule_of(job), mesh_of(job).coordinate("pp", rank)
    split = {schedule.stage_of(place, x.chunk) for x in schedule.instructions(place) if x.kind == "W"}
    stages = enumerate(stages_of(job))
    whole, waiting, again = zip(*(_stage(job, stage, number in split, ends) for number, stage in stages), strict=True)
    return int(pipeline.activation_bytes(schedule, place, whole=again, waiting=waiting, kept=whole))


def _stage(job: Job, stage: Stage, split: bool, ends: tuple[int, int]) -> tuple[int, int, int]:
    """(kept, waiting, what backward needs at most beyond kept) of one micro-batch in a stage.

    When a block is computed again, those behind it are gone; where backward is `split` they wait for W.
    """
    embedding, head = (Block(size, 0, 0) for size in ends)
    blocks = [block_bytes(job, stage.mode(layer)) for layer in reversed(stage.layers)]
    blocks = [head] * stage.last + blocks + [embedding] * stage.first
    change = [(block.waiting if split else 0) - block.kept for block in blocks]
    behind = accumulate(change, initial=0)
    beyond = max([0, *(block.remade + gone for block, gone in zip(blocks, behind, strict=False) if block.remade)])
    return sum(block.kept for block in blocks), sum(block.waiting for block in blocks), beyond


def block_bytes(job: Job, mode: Mode) -> Block:
    """Those of a dense block in a mode; they are the same on every rank."""
    assert job.model.moe is None, "what experts keep depends on where tokens go"
    layout, model, width = job.layout, job.model, WIDTH[job.train.dtype]
    side = layout.tp_grid[0] if layout.tp_grid else 1
    own = Shape(job.micro_batch // side, job.own_sequence, model.hidden, width)  # of whole hidden features
    axis = Axis(side if layout.tp_grid else layout.tp_size, 0, layout.sp, layout.regather)
    documents = job.data.packing == "packed"
    cut = crossing(job)
    if layout.cp > 1:  # attention across ranks looks at tiles, under masks of their own
        model, documents = replace(model, window=None), False
    if layout.tp_grid:
        grid = tensor2d.Grid(side, 0, 0, job.micro_batch, job.own_sequence, width)
        whole = tensor2d.activation_bytes(grid, model, documents)
    else:
        whole = block_activations(model, own, axis, documents).total
    whole += exchanged_bytes(model, cut)
    waiting = _waiting(job, own, axis)
    if mode == "full":
        kept = own.elements * width // (side if layout.tp_grid else axis.ranks if layout.sp else 1)
        return Block(kept, whole - kept, waiting)
    if mode == "selective":
        turned = cut.across == 1 and not masked_products(model, own.s, documents)
        whole -= remade_bytes(model, own, axis, turned, normed=side == 1)
    return Block(whole, 0, waiting)


def _waiting(job: Job, own: Shape, axis: Axis) -> int:
    """What the four layers' weight gradients need: inputs, and gradients of outputs, whole where the sequence is cut."""
    model, hidden = job.model, own.h // (axis.ranks if job.layout.tp_grid else 1)
    heads, kv_heads, ffn = model.heads // axis.ranks, max(1, model.kv_heads // axis.ranks), -(-model.ffn // axis.ranks)
    attention = (2 * heads + 2 * kv_heads) * model.head_size
    mlp = (3 if model.mlp == "swiglu" else 2) * ffn
    return own.b * own.s * (4 * hidden + attention + mlp) * own.width
