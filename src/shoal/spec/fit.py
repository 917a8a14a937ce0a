"""Does a layout fit a model, a sequence length and a batch? Only arithmetic: what divides what. No torch."""

import re
from dataclasses import replace
from math import lcm

from shoal.spec.errors import RequestError, alternatives, divisors, multiples_around
from shoal.spec.layout import Layout
from shoal.spec.model import ModelSpec


def check_fit(model: ModelSpec, layout: Layout, sequence: int, batch: int, filled: int = 0) -> None:
    """Raises RequestError, with sizes that would do, when something must be cut into equal parts and cannot be.

    sequence: tokens, of which the last `filled` only fill it up; batch: sequences per step over all ranks.
    """
    _check_batch(layout, batch)
    _check_tensor(model, layout, batch // (layout.dp * layout.micro_batches))
    _check_pipeline(model, layout)
    _check_sequence(model, layout, sequence, filled)
    _check_experts(model, layout, sequence)


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


def _check_sequence(model: ModelSpec, layout: Layout, sequence: int, filled: int) -> None:
    if sequence - filled > model.positions_max:
        raise RequestError(
            "data.sequence",
            f"data.sequence = {sequence - filled} is longer than model.positions_max = {model.positions_max}; "
            f"{model.positions_max} would do",
        )
    _check_cut(model, layout, sequence)
    _check_exchange(model, layout, sequence)


def _check_cut(model: ModelSpec, layout: Layout, sequence: int) -> None:
    parts = sequence_parts(layout)
    if sequence % parts:
        below = sequence // parts * parts
        fitting = [length for length in (below, below + parts) if 0 < length <= model.positions_max]
        lengths = f"{alternatives(fitting, sequence)} would, or data.pad=true" if fitting else "data.pad=true would"
        raise RequestError(
            "data.sequence",
            f"data.sequence = {sequence} does not divide into the {parts} parts of layout {layout}; {lengths}",
        )


def _check_exchange(model: ModelSpec, layout: Layout, sequence: int) -> None:
    """Whether an all-to-all between context ranks can share out the heads."""
    key, possible = "cp", divisors(model.heads)
    if layout.cp_kind == "hybrid":
        key, possible = "ulysses", divisors(layout.cp)
    elif layout.cp_kind != "ulysses":
        return
    tensor, value = _tensor_parts(layout), getattr(layout, key)
    heads, kv_heads = model.heads // tensor, max(1, model.kv_heads // tensor)
    if exchanges(heads, kv_heads, value):
        return
    fitting = [
        ranks
        for ranks in possible
        if exchanges(heads, kv_heads, ranks) and sequence % sequence_parts(layout, **{key: ranks}) == 0
    ]
    rings = [
        kind for kind in ("zigzag", "ring") if sequence % sequence_parts(replace(layout, ulysses=1, cp_kind=kind)) == 0
    ]
    would = f"{alternatives(fitting, value)} would" + (f", or cp_kind={rings[0]}" if key == "cp" else "")
    raise RequestError(
        f"layout.{key}",
        f"layout.{key} = {value} cannot share out the {heads} heads and {kv_heads} KV heads of a tensor rank, which "
        f"{layout.cp_kind} hands around; {would}",
    )


def _check_experts(model: ModelSpec, layout: Layout, sequence: int) -> None:
    if model.moe is None:
        return
    model.moe.check_ranks(layout.ep, layout.token_ranks)
    own, tensor = sequence // layout.cp, layout.tp_size
    if model.moe.capacity and layout.etp == 1 and own % tensor:
        raise RequestError(
            "data.sequence",
            f"data.sequence = {sequence} gives context ranks {own} tokens, which {tensor} tensor ranks do not share evenly, "
            f"as model.moe.capacity wants; {multiples_around(sequence, layout.cp * tensor)} would do",
        )


def sequence_parts(layout: Layout, cp: int = 0, ulysses: int = 0) -> int:
    """What the length of a sequence must be a multiple of; cp, ulysses: in place of the layout's."""
    cp, ulysses = cp or layout.cp, ulysses or layout.ulysses
    parts = context_parts(layout.cp_kind, cp, ulysses) if cp > 1 else 1
    return lcm(parts, cp * (layout.tp_size if layout.sp else 1))


def context_parts(kind: str, ranks: int, ulysses: int = 1) -> int:
    """What context ranks need a sequence to be a multiple of. ulysses: ranks of the all-to-all part of a hybrid."""
    match kind:
        case "zigzag" | "allgather":  # an early and a late part for each rank
            return 2 * ranks
        case "hybrid":
            return ranks // ulysses * lcm(2, ulysses)
        case _:
            return ranks


def exchanges(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether an all-to-all can give each of `ranks` as many heads, with KV heads of their own or shared by as many."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _tensor_parts(layout: Layout) -> int:
    """Into how many parts heads are cut: all tensor ranks, or one side of their grid."""
    return layout.tp_grid[0] if layout.tp_grid else layout.tp_size
