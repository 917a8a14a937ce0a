"""ZeRO for any module: `shard` takes a list of units and leaves a model that trains in shards."""

from collections.abc import Sequence

import torch
from torch import nn

from shoal.axes.zero.run import ZeRO
from shoal.comm.world import Group


def shard(
    module: nn.Module,
    units: Sequence[nn.Module],
    group: Group,
    *,
    stage: int,
    reshard: str = "always",
    replicas: Group | None = None,
    literal: bool = False,
    gradient_dtype: torch.dtype | None = None,
) -> ZeRO:
    """Shards the parameters of `module` over `group` and returns its states, which the optimizer and the loop use.

    units: submodules in the order of forward, each called as a module; parameters outside them form one more part, which
    in stage 3 stays gathered while the module runs. Around each micro-batch's forward and backward stands
    `states.micro_batch(first, last)`; the optimizer updates `states.runs()`, and `states.spread()` follows it. Losses are
    summed over the ranks, so divide them by global counts. In stage 3 every rank must call the same units in the same
    order, since each call gathers; which parameters inside them take part
    may differ from rank to rank. reshard: "always", "never" or "keep_last"; literal: stage 1
    by all-reduce; replicas: ranks with the same shards, for hybrid shard; gradient_dtype: of gradients on the wire.

    Parameters of two dims and more get weight decay. Raises ValueError for a stage or a reshard that there is not, and
    for a parameter that belongs to two units.
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"stage = {stage} is no ZeRO stage that shards; 1, 2 or 3 would do")
    if reshard not in ("always", "never", "keep_last"):
        raise ValueError(f"reshard = {reshard} is unknown; always, never or keep_last would do")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    runs: dict[str, list[tuple[str, nn.Parameter]]] = {}
    modules: dict[str, list[nn.Module]] = {}
    taken: dict[int, str] = {}
    for number, unit in enumerate(units):
        own = list(dict.fromkeys(unit.parameters()))
        for parameter in own:
            if id(parameter) in taken:
                raise ValueError(
                    f"{names[id(parameter)]} belongs to {taken[id(parameter)]} and to unit {number}; one unit for both would do"
                )
            taken[id(parameter)] = f"unit {number}"
        if own:
            runs[f"unit {number}"] = [(names[id(parameter)], parameter) for parameter in own]
            modules[f"unit {number}"] = [unit]
    kept = {"always": set(), "never": set(runs), "keep_last": set(list(runs)[-1:])}[reshard]
    rest = [(name, parameter) for name, parameter in module.named_parameters() if id(parameter) not in taken]
    if rest:
        runs = {"rest": rest, **runs}
        modules["rest"] = [module]
        kept = kept | {"rest"}
    if stage < 3:
        runs = dict(reversed(runs.items()))  # as backward finishes them
    decays = {name for name, parameter in module.named_parameters() if parameter.dim() > 1}
    return ZeRO(
        runs,
        decays,
        group,
        stage=stage,
        modules=modules,
        kept=kept,
        replicas=replicas,
        literal=literal,
        gradient_dtype=gradient_dtype,
    )
