"""Composes what mixtures of experts send and keep: what the layout alone decides, and what the routing decides. No torch.

Which rank a token goes to is known when its router has chosen. Before a run the plan has means; after one it takes what
the routers chose, a few numbers per layer, and must come out at the bytes that were moved and kept.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from shoal.axes.expert import cost, memory
from shoal.axes.expert.memory import Mixture
from shoal.axes.recompute.cost import repeated_transfers
from shoal.mesh import Mesh
from shoal.plan.pieces import mesh_of
from shoal.plan.stages import stages_for
from shoal.spec.job import WIDTH, Job
from shoal.spec.layout import Layout
from shoal.spec.moe import MoESpec
from shoal.transfer import Transfer, pieces

# What a rank's routers sent, by layer, by use ("step", "evaluate"): (2, N), choices and rows for each expert rank.
Sent = Mapping[int, Mapping[str, np.ndarray]]
# The same of one step, by layer and micro-batch: (M, 2, N).
Routed = Mapping[int, np.ndarray]


def router_axes(layout: Layout) -> tuple[str, ...]:
    """The axes whose ranks choose experts for different tokens."""
    return (*layout.data_axes, "tp") if layout.routes_apart else layout.data_axes


def load_axes(layout: Layout) -> tuple[str, ...]:
    """The axes over which loads are collected, so that every rank knows those of all layers."""
    return (*router_axes(layout), "pp") if layout.pp > 1 else router_axes(layout)


def scope_axes(layout: Layout, moe: MoESpec) -> tuple[str, ...]:
    """The axes whose ranks have other tokens of the scope that balance is taken over."""
    across = {
        "tp": layout.routes_apart,
        "cp": layout.cp > 1,
        "dp": moe.balance == "micro_batch" and layout.dp > 1,
    }
    return tuple(axis for axis, others in across.items() if others)


def fixed_transfers(job: Job, mesh: Mesh, rank: int, layer: int, micro_batch: int) -> Iterator[Transfer]:
    """What a layer's experts move for one micro-batch whatever their routers choose."""
    moe, layout, width = job.model.moe, job.layout, WIDTH[job.train.dtype]
    assert moe is not None
    b, s, tensor = job.micro_batch, job.own_sequence, mesh.coordinate("tp", rank)
    scope = scope_axes(layout, moe)
    group = mesh.group(scope, rank)
    held = own_tokens(job, mesh, rank) * len(group)
    yield from cost.statistics_transfers(
        "+".join(scope),
        len(group),
        group.index(rank),
        b if moe.balance == "sequence" else 1,
        moe.experts,
        losses=moe.losses,
        limited=moe.capacity > 0,
        choices=held * moe.top_k,
        tokens=held,
        layer=layer,
        micro_batch=micro_batch,
    )
    if layout.etp > 1:
        yield from cost.tensor_transfers(
            "tp",
            layout.tp_size,
            tensor,
            b * s,
            job.model.hidden,
            moe.top_k,
            width,
            sequence=layout.sp,
            shared_gate=moe.shared_gate,
            weight_width=max(4, width),
            layer=layer,
            micro_batch=micro_batch,
        )
    elif not layout.sp:
        yield from cost.share_transfers("tp", layout.tp_size, tensor, b, s, job.model.hidden, width, layer, micro_batch)
    expert_rank = mesh.coordinate("ep", rank)
    yield from cost.count_transfers(moe.experts, layout.ep, expert_rank, layout.dedup, layer, micro_batch)


def expected_transfers(job: Job, mesh: Mesh, rank: int, layer: int, micro_batch: int) -> Iterator[Transfer]:
    """What a layer's tokens move for one micro-batch on average, if all sets of k experts are equally likely (spec EP-4)."""
    moe, layout = job.model.moe, job.layout
    assert moe is not None
    if layout.ep > 1:
        tokens = _entering(job, mesh, rank)
        choices, rows = (
            cost.expected_rows(tokens, moe.top_k, moe.experts, layout.ep, dedup) for dedup in (False, layout.dedup)
        )
        yield from _moved(job, mesh, rank, choices, rows, 1, layer, micro_batch)


def routed_transfers(
    job: Job, rank: int, sent: Mapping[int, Sent], use: str, runs: int, forwards: int
) -> Iterator[Transfer]:
    """What the tokens of a run moved, exactly: from what the routers of every rank `sent`, by rank of the world.

    use, runs, forwards: `runs` training steps ("step") or evaluations ("evaluate") of `forwards` micro-batches each.
    """
    if job.model.moe is None or job.layout.ep == 1 or not runs * forwards:
        return
    mesh = mesh_of(job)
    group = mesh.group("ep", rank)
    calls: dict[int, int] = {}
    full: set[int] = set()
    for micro_batch in range(forwards):
        for stage in stages_for(job, mesh, rank, micro_batch):
            full |= set(stage.full())
            for layer in stage.layers:
                calls[layer] = calls.get(layer, 0) + runs
    for layer in sorted(set(calls) & set(job.model.mixtures)):
        choices, rows = np.stack([sent[member][layer][use] for member in group], axis=1)
        moved = [*_moved(job, mesh, rank, choices, rows, calls[layer], layer, None)]
        if use == "evaluate":
            yield from evaluated(moved)
        else:
            yield from moved
            yield from repeated_transfers(moved, full)


def routed_step(job: Job, rank: int, routed: Mapping[int, Routed]) -> Iterator[Transfer]:
    """The same of one step, from what routers sent in each of its micro-batches."""
    sent = {
        member: {layer: {"step": tables.sum(0)} for layer, tables in of_rank.items()}
        for member, of_rank in routed.items()
    }
    yield from routed_transfers(job, rank, sent, "step", 1, job.layout.micro_batches)


def mixture_bytes(
    job: Job, rank: int, micro_batch: int, routed: Mapping[int, Routed] | None, layer: int, selective: bool
) -> Mixture | None:
    """What a layer's experts keep of a micro-batch on `rank`; None for a dense layer.

    routed: by rank of the world what the routers of a step sent; None: the mean, as for `expected_transfers`, and no choice
    dropped. selective: whether the block is computed again selectively.
    """
    moe, layout = job.model.moe, job.layout
    if moe is None or not moe.at(layer):
        return None
    part = job.own_sequence // (layout.tp_size if layout.sp else 1)
    own = own_tokens(job, mesh_of(job), rank) // job.micro_batch
    gathered = layout.tp_size if layout.etp > 1 and layout.sp else 1
    around = memory.Around.of(moe, job.micro_batch, part, own, gathered)
    sizes = memory.Sizes(
        job.model.hidden,
        -(-moe.expert_ffn // layout.etp),
        -(-moe.shared_width // layout.etp),
        moe.experts // layout.ep,
        layout.ep,
        layout.dedup,
        WIDTH[job.train.dtype],
    )
    return memory.mixture(moe, sizes, around, _flow(job, rank, layer, micro_batch, routed), selective)


def expert_rows(job: Job, rank: int, layer: int, micro_batch: int, routed: Mapping[int, Routed] | None) -> float:
    """Rows that the experts of `rank` compute in a layer for a micro-batch; routed: as in `mixture_bytes`."""
    return _flow(job, rank, layer, micro_batch, routed).came


def _flow(job: Job, rank: int, layer: int, micro_batch: int, routed: Mapping[int, Routed] | None) -> memory.Flow:
    moe, layout = job.model.moe, job.layout
    assert moe is not None
    if routed is None or (layout.ep == 1 and not moe.capacity):
        tokens = _entering(job, mesh_of(job), rank)
        return memory.Flow.mean(tokens, moe.top_k, moe.experts, layout.ep, layout.dedup)
    group = mesh_of(job).group("ep", rank)
    choices, rows = np.stack([routed[member][layer][micro_batch] for member in group], axis=1)
    return memory.Flow.between(choices, rows, group.index(rank))


def evaluated(transfers: Iterable[Transfer]) -> Iterator[Transfer]:
    """Those of a forward, as an evaluation makes them."""
    for transfer in transfers:
        if transfer.phase == "forward":
            yield replace(transfer, phase="evaluate", micro_batch=None)


def _moved(
    job: Job,
    mesh: Mesh,
    rank: int,
    choices: np.ndarray,
    rows: np.ndarray,
    calls: int,
    layer: int,
    micro_batch: int | None,
) -> Iterator[Transfer]:
    """Of tokens, in `calls` forwards of a layer that together send choices and rows [i, j]."""
    width, index = WIDTH[job.train.dtype], mesh.coordinate("ep", rank)
    weights = max(4, width) if job.layout.dedup else None
    yield from cost.row_transfers(choices, rows, job.model.hidden, width, index, weights, calls, layer, micro_batch)
    if job.layout.dedup:
        yield cost.place_transfer(choices, index, calls, layer, micro_batch)


def _entering(job: Job, mesh: Mesh, rank: int) -> int:
    """Tokens of a micro-batch that enter the experts of `rank`, of which it may compute a part; all its tensor ranks' where
    these cut experts.
    """
    return job.micro_batch * job.own_sequence if job.layout.etp > 1 else own_tokens(job, mesh, rank)


def own_tokens(job: Job, mesh: Mesh, rank: int) -> int:
    """Tokens of a micro-batch for which `rank` chooses experts."""
    layout, own = job.layout, job.own_sequence
    if layout.routes_apart:
        own = pieces(own, layout.tp_size)[mesh.coordinate("tp", rank)]
    return job.micro_batch * own
