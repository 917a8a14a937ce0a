"""What a trainer has to do with mixtures of experts: who takes part in them, their losses, their loads, what they sent."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.axes.expert.run import (
    ExpertRanks,
    Load,
    MixtureOfExperts,
    collect_loads,
    take_auxiliary,
    update_bias,
)
from shoal.comm.collectives import all_gather, all_reduce
from shoal.comm.world import World
from shoal.model.decoder import Decoder
from shoal.plan.experts import Routed, Sent, load_axes, scope_axes
from shoal.spec.job import Job
from shoal.spec.moe import MoESpec

USES = ("step", "evaluate")


def as_array(x: Tensor) -> np.ndarray:
    """The values of a tensor."""
    return x.cpu().numpy()


def mixture_of(job: Job, world: World) -> Callable[[int, MoESpec], MixtureOfExperts]:
    """What makes the mixtures of this rank of `world` under the job's layout."""
    layout, moe = job.layout, job.model.moe
    if moe is None:
        return MixtureOfExperts
    tensor = world.group("tp")
    ranks = ExpertRanks(
        ep=world.group("ep"),
        etp=tensor if layout.etp > 1 else tensor.alone(),
        same_scope=world.group(scope_axes(layout, moe)),
        same_tokens=tensor.alone() if layout.sp or layout.etp > 1 else tensor,
        sequence=layout.sp and layout.etp > 1,
    )
    return partial(MixtureOfExperts, ranks=ranks, duplicate_free=layout.dedup)


class Mixtures:
    """The mixtures of experts of a model whose part `decoder` is on this rank; silent where there are none."""

    def __init__(self, job: Job, world: World, decoder: Decoder):
        self.job, self.world = job, world
        self.layers: dict[int, MixtureOfExperts | None] = {}
        for layer in job.model.mixtures:
            held = decoder.blocks[str(layer)].mlp if str(layer) in decoder.blocks else None
            self.layers[layer] = held if isinstance(held, MixtureOfExperts) else None
        self.everywhere = world.group(load_axes(job.layout)) if self.layers else world.group("tp").alone()

    def auxiliary(self) -> float:
        """This step's auxiliary losses so far of this rank's layers and samples, whole on every tensor rank."""
        moe = self.job.model.moe
        if moe is None or not moe.losses:
            return 0.0
        share = take_auxiliary([*self.layers.values()]).to(self.world.device).reshape(1)
        return float(all_reduce(share, self.world.group("tp")) if self.job.layout.routes_apart else share)

    def settle(self, moves_bias: bool) -> tuple["LayerLoad", ...]:
        """The loads of a step that is over, the same on every rank; moves_bias: moves routing biases towards even load."""
        moe = self.job.model.moe
        if moe is None:
            return ()
        layers = [*self.layers.values()]
        loads = collect_loads(layers, moe.experts, self.everywhere)
        if moves_bias:
            update_bias(layers, loads)
        return tuple(LayerLoad(layer, load) for layer, load in zip(self.layers, loads, strict=True))

    def sent(self) -> Sent:
        """What this rank's routers sent so far, for the plan."""
        found: dict[int, dict[str, np.ndarray]] = {}
        for layer, mixture in self.layers.items():
            if mixture is not None:
                nothing = torch.zeros(2, self.job.layout.ep, dtype=torch.int64)
                sums = {use: [x for key, x in mixture.sent.items() if key[0] == use] for use in USES}
                found[layer] = {
                    use: sum(each, start=nothing.to(self.world.device)).cpu().numpy() for use, each in sums.items()
                }
        return found

    def routed(self, values: Callable[[Tensor], np.ndarray] = as_array) -> Routed:
        """The same of training steps, by micro-batch. values: of a tensor."""
        nothing, count = np.zeros((2, self.job.layout.ep), np.int64), self.job.layout.micro_batches
        found = {}
        for layer, mixture in self.layers.items():
            if mixture is not None:
                sent = [mixture.sent.get(("step", micro_batch)) for micro_batch in range(count)]
                found[layer] = np.stack([nothing if x is None else values(x) for x in sent])
        return found

    def sent_by_all(self) -> dict[int, Sent]:
        """The same of every rank that this one exchanges tokens with, by rank; all of these call it, nothing is counted."""
        own = self.sent()
        group = self.world.group("ep") if own else self.world.group("tp").alone()
        table = np.stack([[own[layer][use] for use in USES] for layer in own]) if own else np.zeros(0, np.int64)
        with self.world.ledger.off():
            tables = all_gather(torch.from_numpy(table)[None].to(self.world.device), group).cpu().numpy()
        return {
            rank: {layer: dict(zip(USES, of_layer, strict=True)) for layer, of_layer in zip(own, of_rank, strict=True)}
            for rank, of_rank in zip(group.ranks, tables, strict=True)
        }


@dataclass(frozen=True)
class LayerLoad:
    """How the experts of layer number `layer` were used in a step."""

    layer: int
    load: Load


def load_metrics(loads: tuple[LayerLoad, ...], ranks: int) -> Mapping[str, Any]:
    """What metrics.jsonl says of a step's loads: of the worst layer, and layer by layer. ranks: of the expert axis.

    expert_load, rank_load: tokens of the most used expert, or expert rank, over the mean: a step waits for the latter.
    dropped: choices for which there was no capacity; expert_entropy in nats, ln E at even load.
    """
    if not loads:
        return {}
    by_layer = [
        {
            "layer": of.layer,
            "expert_load": of.load.max_over_mean,
            "rank_load": of.load.rank_max_over_mean(ranks),
            "dropped": of.load.dropped,
            "expert_entropy": of.load.entropy,
        }
        for of in loads
    ]
    return {
        "expert_load": max(row["expert_load"] for row in by_layer),
        "rank_load": max(row["rank_load"] for row in by_layer),
        "dropped": sum(row["dropped"] for row in by_layer),
        "expert_entropy": min(row["expert_entropy"] for row in by_layer),
        "expert_layers": by_layer,
    }
