"""What recomputation saves and what it costs, in closed form (spec BG-5, PP-5, TP-6). No torch."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from shoal.axes.tensor.cost import Axis, Shape
from shoal.axes.tensor.memory import block_activations, masked_products
from shoal.spec.model import ModelSpec
from shoal.transfer import Transfer

Mode = Literal["none", "selective", "full"]


def mode_of(recompute: str | int, block: int) -> Mode:
    """What happens to a block, given a layout's `recompute`: "none", "selective", "full", or how many blocks are full.

    block: its number among those of its stage. Every stage recomputes as many, since every rank must fit.
    """
    match recompute:
        case "none" | "selective" | "full":
            return recompute
        case _:
            return "full" if block < int(recompute) else "none"


def kept_bytes(mode: Mode, model: ModelSpec, shape: Shape, axis: Axis, documents: bool = False) -> int:
    """What a rank keeps of one block and one micro-batch from forward to backward; the sequence is whole.

    full: the block's input, 2 s b h bytes at 16 bits, divided by t with sequence parallelism. selective: all but the
    outputs of both norms, queries and keys where these have norms, and the activation function's result.
    """
    if mode == "full":
        return shape.elements * shape.width // (axis.ranks if axis.sequence else 1)
    whole = block_activations(model, shape, axis, documents).total
    turned = not masked_products(model, shape.s, documents)
    return whole - (remade_bytes(model, shape, axis, turned) if mode == "selective" else 0)


def remade_bytes(
    model: ModelSpec, shape: Shape, axis: Axis, turned: bool = True, normed: bool = True, mlp: bool = True
) -> int:
    """What selective recomputation spares a rank, of one block and one micro-batch.

    turned: whether queries and keys are kept as norms and rope leave them; masked attention keeps copies and slices. normed:
    whether a norm's output can be made again without other ranks; one that a column layer has gathered is not, since that
    would take a second gather: `regather` says when one takes place anyway. mlp: as block_activations has it.
    """
    tokens, elements = shape.b * shape.s, 0
    if normed and (not axis.sequence or axis.regather):
        elements += (2 if mlp else 1) * shape.h * (tokens // axis.ranks if axis.sequence else tokens)
    if turned and model.qk_norm:
        heads, kv_heads = model.heads // axis.ranks, max(1, model.kv_heads // axis.ranks)
        elements += tokens * (heads + kv_heads) * model.head_size
    product = -(-model.ffn // axis.ranks) if mlp else 0
    return (elements + tokens * product) * shape.width


def repeated_transfers(transfers: Iterable[Transfer], full: Iterable[int]) -> Iterator[Transfer]:
    """The transfers that full recomputation adds to a step's: those of the forward of the layers `full`, in backward.

    Over a tensor axis two more all-reduces per block, so 12 (t-1)/t b s h in place of 8 (spec TP-6). Selective adds none.
    """
    layers = set(full)
    for transfer in transfers:
        if transfer.phase == "forward" and transfer.layer in layers:
            yield replace(transfer, phase="backward")


def extra_forwards(mode: Mode) -> float:
    """Time that backward gains, in forwards of the block: a third of the step where backward takes two (spec PP-5).

    Selective repeats no matrix product, which is left out here.
    """
    return 1.0 if mode == "full" else 0.0
