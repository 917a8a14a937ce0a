"""Does a layout fit a model, a sequence length and a batch? Only arithmetic: what divides what. No torch."""

import re
from math import lcm

from shoal.spec.errors import RequestError, alternatives, divisors, multiples_around
from shoal.spec.layout import Layout
from shoal.spec.model import ModelSpec


def check_fit(model: ModelSpec, layout: Layout, sequence: int, batch: int) -> None:
    """Raises RequestError, with sizes that would do, when something must be cut into equal parts and cannot be.

    sequence: tokens; batch: sequences per step over all ranks.
    """
    _check_batch(layout, batch)
    _check_tensor(model, layout, batch // (layout.dp * layout.micro_batches))
    _check_pipeline(model, layout)
    _check_sequence(model, layout, sequence)


def _check_batch(layout: Layout, batch: int) -> None:
    parts = layout.dp * layout.micro_batches
    if batch % parts:
        raise RequestError(
            "train.batch",
            f"train.batch = {batch} does not divide over dp = {layout.dp} x micro_batches = {layout.micro_batches}; "
            f"{multiples_around(batch, parts)} would",
        )


def _check_tensor(model: ModelSpec, layout: Layout, micro_batch: int) -> None:
    """Heads are cut over the tensor ranks; KV heads too, or each is kept by equally many ranks. The rest is padded."""

    def cuts(parts: int) -> bool:
        shared = model.kv_heads % parts == 0 or parts % model.kv_heads == 0
        along_hidden = layout.tp_grid is None or model.hidden % parts == 0
        return model.heads % parts == 0 and shared and along_hidden

    parts = _tensor_parts(layout)
    if not cuts(parts):
        sizes = alternatives((size for size in divisors(model.heads) if cuts(size)), parts)
        if layout.tp_grid:
            sizes = re.sub(r"\d+", r"\g<0>x\g<0>", sizes)
        hidden = f" and hidden {model.hidden}" if layout.tp_grid else ""
        raise RequestError(
            "layout.tp",
            f"layout.tp = {layout.tp} does not cut the model's {model.heads} heads, {model.kv_heads} KV heads{hidden} "
            f"evenly; {sizes} would",
        )
    if layout.tp_grid and micro_batch % parts:
        batch = micro_batch * layout.dp * layout.micro_batches
        raise RequestError(
            "train.batch",
            f"train.batch = {batch} gives micro-batches of {micro_batch} sequences, which {parts} rows of tensor ranks do "
            f"not cut evenly; {multiples_around(batch, parts * layout.dp * layout.micro_batches)} would do",
        )


def _check_pipeline(model: ModelSpec, layout: Layout) -> None:
    chunks = layout.pp * layout.v
    if chunks <= model.layers:
        return
    if layout.v > 1 and layout.pp <= model.layers:
        raise RequestError(
            "layout.v",
            f"layout.v = {layout.v} with pp={layout.pp} wants {chunks} layers, the model has {model.layers}; "
            f"at most {model.layers // layout.pp} would do",
        )
    raise RequestError(
        "layout.pp",
        f"layout.pp = {layout.pp} wants {chunks} layers, the model has {model.layers}; "
        f"at most {max(1, model.layers // layout.v)} would do",
    )


def _check_sequence(model: ModelSpec, layout: Layout, sequence: int) -> None:
    if sequence > model.positions_max:
        raise RequestError(
            "data.sequence",
            f"data.sequence = {sequence} is longer than model.positions_max = {model.positions_max}; "
            f"{model.positions_max} would do",
        )
    parts = sequence_parts(layout)
    if sequence % parts:
        raise RequestError(
            "data.sequence",
            f"data.sequence = {sequence} does not divide into the {parts} parts of layout {layout}; "
            f"{multiples_around(sequence, parts)} would, or data.pad=true",
        )
    key, ranks = {"ulysses": ("cp", layout.cp), "hybrid": ("ulysses", layout.ulysses)}.get(layout.cp_kind, ("cp", 1))
    tensor = _tensor_parts(layout)
    heads, kv_heads = model.heads // tensor, max(1, model.kv_heads // tensor)
    if not exchanges(heads, kv_heads, ranks):
        fitting = [ranks for ranks in divisors(heads) if exchanges(heads, kv_heads, ranks)]
        raise RequestError(
            f"layout.{key}",
            f"layout.{key} = {ranks} cannot share out the {heads} heads and {kv_heads} KV heads of a tensor rank, which "
            f"{layout.cp_kind} hands around; {alternatives(fitting, ranks)} would, or cp_kind=zigzag",
        )


def sequence_parts(layout: Layout) -> int:
    """What the length of a sequence must be a multiple of."""
    if layout.cp == 1:
        parts = 1
    elif layout.cp_kind in ("zigzag", "allgather"):  # an early and a late part for each rank
        parts = 2 * layout.cp
    elif layout.cp_kind == "hybrid":
        parts = layout.cp // layout.ulysses * lcm(2, layout.ulysses)
    else:
        parts = layout.cp
    return lcm(parts, layout.cp * (layout.tp_size if layout.sp else 1))


def exchanges(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether an all-to-all can give each of `ranks` as many heads, with KV heads of their own or shared by as many."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _tensor_parts(layout: Layout) -> int:
    """Into how many parts heads are cut: all tensor ranks, or one side of their grid."""
    return layout.tp_grid[0] if layout.tp_grid else layout.tp_size
