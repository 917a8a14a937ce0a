"""The mixture-of-experts feed-forward running: on one process, and with its experts cut over ranks.

In groups of one all of this is the plain layer; the gradients of one process come out in every layout, once those of
each parameter are summed over the ranks that keep it and saw other tokens: of experts over their replicas, of the router
and of uncut shared experts over all ranks whose tokens they saw.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.axes.expert.dispatch import routed_mlp
from shoal.axes.expert.grouped import grouped_mlp
from shoal.axes.expert.route import DROPPED, Router, auxiliary_loss, within_capacity
from shoal.axes.tensor.run import SEQUENCE, enter, leave
from shoal.comm import collectives, conjugate
from shoal.comm.world import Group, World
from shoal.kernels.linear import PutOff
from shoal.spec.moe import MoESpec
from shoal.transfer import pieces


@dataclass(frozen=True)
class ExpertRanks:
    """Who takes part in a layer, and what the tokens look like that come in.

    ep: the experts are cut over it. etp: every expert, shared ones too, is cut over it along its width.
    same_scope: ranks whose routers see other tokens of the same sequences (with balance "micro_batch": of the same
    micro-batch). same_tokens: ranks that bring the same tokens although no expert is cut over them: each does its share.
    sequence: tokens come cut along the sequence over etp, as sequence parallelism leaves them; else whole.

    With tp tensor ranks, cp context ranks, balance by sequence:
        etp = tp, sp      etp = tp group, sequence, same_scope = cp x tp     same_tokens of one rank
        etp = tp          etp = tp group,           same_scope = cp          same_tokens of one rank
        etp = 1, sp       etp of one rank,          same_scope = cp x tp     same_tokens of one rank
        etp = 1           etp of one rank,          same_scope = cp x tp     same_tokens = tp group
    """

    ep: Group
    etp: Group
    same_scope: Group
    same_tokens: Group
    sequence: bool = False

    @classmethod
    def single(cls) -> "ExpertRanks":
        """One process."""
        alone = World.single().group("ep")
        return cls(alone, alone, alone, alone)


class Experts(nn.Module):
    """Routed experts of this rank: gate_up (E / ep, 2f / etp, h), down (E / ep, h, f / etp); gate before up."""

    put_off: PutOff | None = None

    def __init__(self, number: int, ffn: int, hidden: int):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(number, 2 * ffn, hidden))
        self.down = nn.Parameter(torch.empty(number, hidden, ffn))


class SharedExperts(nn.Module):
    """The experts that every token uses, as one SwiGLU MLP: gate_up (2f / etp, h), down (h, f / etp); x (T, h) -> (T, h).

    weights (T,): by how much each token's counts; None: by 1.
    """

    put_off: PutOff | None = None

    def __init__(self, ffn: int, hidden: int):
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, weights: Tensor | None) -> Tensor:
        gate_up, down = self.gate_up.weight[None], self.down.weight[None]  # of the one expert
        return grouped_mlp(x, None, weights, gate_up, down, self.put_off)


class MixtureOfExperts(nn.Module):
    """x (b, s, h) -> (y (b, s, h), auxiliary loss), s tokens of each sequence on this rank, or s / t where cut.

    The auxiliary loss is a scalar in float32 at least, 0 when the model asks for none; add it to the sum of
    cross-entropies of the rank (see `auxiliary_loss`). It is this rank's share: over ranks that route other tokens the
    shares add up. Where those are tensor ranks, which otherwise all have the whole loss, all_reduce_identity over them
    makes it whole.

    duplicate_free: send a token once to a rank that has several of its experts. Raises RequestError when the experts
    do not divide among the ranks.
    """

    def __init__(self, hidden: int, spec: MoESpec, ranks: ExpertRanks | None = None, duplicate_free: bool = False):
        super().__init__()
        self.spec, self.ranks, self.duplicate_free = spec, ranks or ExpertRanks.single(), duplicate_free
        ep, etp = self.ranks.ep.size, self.ranks.etp.size
        spec.check_ranks(ep)
        self.router = Router(hidden, spec)
        self.experts = Experts(spec.experts // ep, -(-spec.expert_ffn // etp), hidden)
        self.shared = SharedExperts(-(-spec.shared_width // etp), hidden) if spec.shared_width else None
        self.shared_gate = nn.Linear(hidden, 1, bias=False) if spec.shared_gate else None
        self.chosen: Tensor | None = None  # (E + 1,) int64: see _count
        self.auxiliary: Tensor | None = None  # sum of the auxiliary losses in this step
        self.sent: dict[tuple[str, int], Tensor] = {}  # see _note

    @torch.compiler.disable
    def forward(self, x: Tensor, counted: Tensor | None = None, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """counted (b, s) bool: tokens whose targets count; None: all. order (b, s) int64: grows with a token's global
        place in its sequence (in the batch, for balance "micro_batch"); needed where capacity is limited and a scope's
        tokens lie on several ranks.
        """
        spec, ranks = self.spec, self.ranks
        sizes = pieces(x.shape[SEQUENCE], ranks.same_tokens.size)
        x = conjugate.split_all_gather(x, ranks.same_tokens, SEQUENCE, sizes)
        counted, order = (own_part(given, ranks.same_tokens, sizes) for given in (counted, order))
        b, s, h = x.shape

        tokens = x.reshape(-1, h)
        routing = self.router(tokens)
        auxiliary = routing.logits.new_zeros(())
        if spec.losses:
            auxiliary = auxiliary_loss(routing, spec, b, counted, ranks.same_scope)
        experts = routing.experts
        if spec.capacity:
            experts = within_capacity(experts, spec, b, order, ranks.same_scope)
        if torch.is_grad_enabled():  # once, also where backward computes a block again: then the first time has none
            self._count(routing.experts, experts, auxiliary)

        whole = self._enter(x)
        weights = self._enter(routing.weights.view(b, s, spec.top_k))  # no -1: s may be 0
        if ranks.sequence:
            experts = collectives.all_gather(experts.to(torch.int32).view(b, s, spec.top_k), ranks.etp, SEQUENCE)
        self._note(experts.reshape(-1, spec.top_k))
        y = routed_mlp(
            whole.reshape(-1, h),
            experts.reshape(-1, spec.top_k).long(),
            weights.reshape(-1, spec.top_k),
            self.experts.gate_up,
            self.experts.down,
            ranks.ep,
            self.duplicate_free,
            self.experts.put_off,
        )
        if self.shared is not None:
            gate = None if self.shared_gate is None else self._enter(self.shared_gate(x).sigmoid()).flatten()
            y = y + self.shared(whole.reshape(-1, h), gate)
        y = leave(y.view(whole.shape), ranks.etp, ranks.sequence)
        return conjugate.all_gather_split(y, ranks.same_tokens, SEQUENCE, sizes), auxiliary

    def _enter(self, x: Tensor) -> Tensor:
        """x (b, s, ...) for experts of which this rank computes a part: also the weights get a part of their gradient."""
        return enter(x, self.ranks.etp, self.ranks.sequence)

    @torch.no_grad()
    def _count(self, chosen: Tensor, used: Tensor, auxiliary: Tensor) -> None:
        """Adds to `chosen` (E + 1,): how often each expert was chosen in this step, and last how often in vain; and to
        `auxiliary`.
        """
        counts = F.pad(torch.bincount(chosen.flatten(), minlength=self.spec.experts), (0, 1))
        counts[-1] = (used == DROPPED).sum()
        self.chosen = counts if self.chosen is None else self.chosen + counts
        share = auxiliary.detach().double()
        self.auxiliary = share if self.auxiliary is None else self.auxiliary + share

    def _note(self, experts: Tensor) -> None:
        """Adds to `sent`, by what the forward is for ("step" or "evaluate") and by micro-batch, what the router (T, k) sends
        each expert rank: int64 (2, N), choices and rows, which are fewer where a token goes to a rank once.

        The plan turns it into bytes, which are then held against those that collectives moved and those that are kept.
        """
        ep = self.ranks.ep
        looking = ep.ledger.place.phase == "evaluate"
        told = ep.size > 1 or self.spec.capacity  # else the plan knows
        if not told or not ep.ledger.enabled or not (looking or torch.is_grad_enabled()):
            return
        token, place = torch.nonzero(experts >= 0, as_tuple=True)
        to = experts[token, place].long() // (self.spec.experts // ep.size)
        choices = rows = torch.bincount(to, minlength=ep.size)
        if self.duplicate_free:
            goes = torch.zeros(len(experts), ep.size, dtype=torch.bool, device=experts.device)
            goes[token, to] = True
            rows = goes.sum(0)
        key = "evaluate" if looking else "step", ep.ledger.place.micro_batch or 0
        self.sent[key] = self.sent.get(key, 0) + torch.stack([choices, rows])


@dataclass(frozen=True)
class Load:
    """How a layer's experts were used in a step, over all ranks. chosen: tokens that chose each expert; dropped: choices
    for which there was no capacity.
    """

    chosen: tuple[int, ...]
    dropped: int

    @property
    def max_over_mean(self) -> float:
        """Tokens of the most used expert over the mean; 1 is even, E the worst. 1 when nothing was routed."""
        return max(self.chosen) * len(self.chosen) / sum(self.chosen) if any(self.chosen) else 1.0

    @property
    def entropy(self) -> float:
        """Of the distribution of choices over experts, in nats: ln E is even, 0 the worst."""
        total = sum(self.chosen)
        return -sum(count / total * math.log(count / total) for count in self.chosen if count)

    def rank_max_over_mean(self, ranks: int) -> float:
        """The same over `ranks` ranks of equally many experts: the step waits for the most loaded (spec EP-5)."""
        size = len(self.chosen) // ranks
        return Load(tuple(sum(self.chosen[r * size : (r + 1) * size]) for r in range(ranks)), 0).max_over_mean


def collect_loads(layers: Sequence[MixtureOfExperts | None], experts: int, group: Group) -> list[Load]:
    """The loads of layers with equally many experts since this was last called, which then start from zero.

    None stands for a layer that lies on other ranks. group: all ranks whose routers saw different tokens of the step, or
    have other layers. One all-reduce of int64 for all layers.
    """
    nothing = torch.zeros(experts + 1, dtype=torch.int64, device=group.device)
    counts = torch.stack([nothing if layer is None or layer.chosen is None else layer.chosen for layer in layers])
    for layer in layers:
        if layer is not None:
            layer.chosen = None
    return [Load(tuple(row[:-1]), row[-1]) for row in collectives.all_reduce(counts, group).tolist()]


def take_auxiliary(layers: Sequence[MixtureOfExperts | None]) -> Tensor:
    """The sum of this rank's shares of the layers' auxiliary losses since this was last called, a float64 scalar."""
    total = torch.zeros((), dtype=torch.float64)
    for layer in layers:
        if layer is not None and layer.auxiliary is not None:
            total = total.to(layer.auxiliary.device) + layer.auxiliary
            layer.auxiliary = None
    return total


@torch.no_grad()
def update_bias(layers: Sequence[MixtureOfExperts | None], loads: Sequence[Load]) -> None:
    """Once a step, after `collect_loads`: bias += rate sign(mean load - load), in layers that have one (DeepSeek-V3)."""
    for layer, load in zip(layers, loads, strict=True):
        bias = None if layer is None else layer.router.bias
        if layer is not None and bias is not None:
            chosen = torch.tensor(load.chosen, dtype=torch.float64)
            bias += (layer.spec.bias_rate * torch.sign(chosen.mean() - chosen)).to(bias)


def own_part(x: Tensor | None, group: Group, sizes: Sequence[int]) -> Tensor | None:
    """This rank's part of (b, s) along the sequence, as (T,)."""
    return None if x is None else x.split(list(sizes), dim=SEQUENCE)[group.index].flatten()
