"""Which experts a token uses and how much each counts; the losses and limits that keep the experts' load even.

T tokens of this rank are b sequences, or parts of them, one after the other; E experts, k of them per token. Statistics
are over a *scope*: a sequence, or the micro-batch of all ranks, wherever its tokens lie; never over what one rank holds.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.axes.expert.cost import capacity
from shoal.comm import collectives
from shoal.comm.world import Group
from shoal.kernels.linear import PutOff, input_gradient, linear, weight_gradient
from shoal.spec.moe import MoESpec

Choose = Callable[[Tensor, MoESpec], Tensor]
DROPPED = -1  # stands for an expert that was chosen and had no capacity left


class Routing(NamedTuple):
    """experts (T, k) int64 and weights (T, k): what each token uses. scores (T, E), softmax or sigmoid of the logits
    (T, E), and these: for the losses. In float32 at least.
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor
    logits: Tensor


class Router(nn.Module):
    """tokens (T, h) -> Routing. weight: (E, h); bias: (E,), a buffer in float32 at least, if the model asks for one."""

    put_off: PutOff | None = None
    bias: Tensor | None
    choose: Choose

    def __init__(self, hidden: int, spec: MoESpec):
        super().__init__()
        self.spec, self.choose = spec, best
        self.weight = nn.Parameter(torch.empty(spec.experts, hidden))
        self.register_buffer("bias", torch.zeros(spec.experts) if spec.bias else None)

    def forward(self, tokens: Tensor) -> Routing:
        return route(_Logits.apply(tokens, self.weight, self.put_off), self.bias, self.spec, self.choose)

    def _apply(self, fn: Any, recurse: bool = True) -> "Router":
        """Moves the module; a cast to 16 bit leaves the bias alone, whose steps would vanish there."""
        before = self.bias
        super()._apply(fn, recurse)
        if before is not None and self.bias is not None and self.bias.dtype.itemsize < before.dtype.itemsize:
            self.bias = before.to(self.bias.device)
        return self


def best(values: Tensor, spec: MoESpec) -> Tensor:
    """The top_k experts of each token by `values` (T, E): (T, k) int64.

    With groups (DeepSeek-V2, -V3) only experts of the groups_kept best groups can be chosen.
    """
    if spec.limited:
        values = values.masked_fill(~_allowed(values, spec), -math.inf)
    return values.topk(spec.top_k, dim=-1).indices


def route(logits: Tensor, bias: Tensor | None, spec: MoESpec, choose: Choose = best) -> Routing:
    """The choice of each token (T, E) and its weights.

    The bias takes part in choosing and not in the weights (Wang et al. 2024).
    """
    scores = logits.softmax(-1) if spec.router == "softmax" else logits.sigmoid()
    with torch.no_grad():
        experts = choose(scores if bias is None else scores + bias, spec)
    weights = scores.gather(1, experts)
    if spec.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # as DeepSeek's: sigmoids can all be 0
    return Routing(experts, weights * spec.scaling, scores, logits)


def _allowed(choice: Tensor, spec: MoESpec) -> Tensor:
    """Experts of the best groups, (T, E) bool."""
    by_group = choice.unflatten(1, (spec.groups, -1))
    scores = by_group.topk(2, dim=-1).values.sum(-1) if spec.group_score == "top2" else by_group.amax(-1)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept.scatter_(1, scores.topk(spec.groups_kept, dim=-1).indices, True)
    return kept.repeat_interleave(choice.shape[1] // spec.groups, dim=1)


def auxiliary_loss(
    routing: Routing, spec: MoESpec, sequences: int, counted: Tensor | None, same_scope: Group
) -> Tensor:
    """This rank's share of a layer's auxiliary losses, a scalar; the shares of all ranks that route tokens add up.

    For a scope of n tokens, c_i of which chose expert i,
        balance = E / (k n) sum_i c_i P_i, P_i the mean share of expert i (Switch, GShard; 1 at uniform load), a token's
            scores divided by their sum,
        z = mean of logsumexp(logits)^2 (ST-MoE),
    and the sum over scopes of W (aux_loss balance + z_loss z), W the tokens of the scope whose targets count, is added
    to the sum of cross-entropies. Divided by all targets that count, the loss is the mean cross-entropy plus the mean
    over those tokens of their scope's auxiliary losses.

    sequences: b. counted: (T,) bool, None for all. same_scope: ranks with other tokens of the same sequences or, for
    balance "micro_batch", of the same micro-batch. c_i has no gradient, so with c, n and W summed over them (one
    all-reduce) each rank's part of the sum over tokens is its own.
    """
    scopes = sequences if spec.balance == "sequence" else 1
    shares = routing.scores  # of a softmax
    if spec.router == "sigmoid":
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    tokens, experts = shares.shape
    with torch.no_grad():
        scope = torch.arange(scopes, device=routing.experts.device).repeat_interleave(tokens // scopes)
        cells = (scope[:, None] * experts + routing.experts).flatten()
        sums = torch.zeros(scopes, experts + 2, dtype=torch.int64, device=cells.device)
        sums[:, :experts] = torch.bincount(cells, minlength=scopes * experts).view(scopes, experts)
        sums[:, experts] = tokens // scopes
        sums[:, experts + 1] = tokens // scopes if counted is None else counted.view(scopes, -1).sum(1)
        chosen, total, weight = collectives.all_reduce(sums, same_scope).to(shares.dtype).split([experts, 1, 1], dim=1)
        slopes = spec.aux_loss * experts / (spec.top_k * total) * chosen
    terms = torch.bmm(shares.view(scopes, -1, experts), slopes[..., None]).squeeze(-1)
    if spec.z_loss:
        terms = terms + spec.z_loss * routing.logits.logsumexp(-1).square().view(scopes, -1)
    return (terms * (weight / total)).sum()


@torch.no_grad()
def within_capacity(experts: Tensor, spec: MoESpec, sequences: int, order: Tensor | None, same_scope: Group) -> Tensor:
    """experts (T, k) with DROPPED for those that were full.

    In a scope of n tokens each expert takes the first ceil(capacity n k / E) that chose it, in the tokens' global order;
    a token's weights stay as they are, so what is dropped adds nothing. order: (T,) int64, grows with a token's global
    place in its scope; None: as they stand, which a scope on one rank allows. The ranks of the scope hold equally many.
    """
    assert order is not None or same_scope.size == 1, "tokens of other ranks are in between: pass their global order"
    scopes = sequences if spec.balance == "sequence" else 1
    own, k = len(experts) // scopes, experts.shape[1]
    places = torch.arange(len(experts), device=experts.device) if order is None else order
    places = collectives.all_gather(places.view(scopes, own), same_scope, dim=1)
    chosen = collectives.all_gather(experts.to(torch.int32).view(scopes, own, k), same_scope, dim=1)
    total = places.shape[1]
    limit = capacity(spec.capacity, total, k, spec.experts)

    by_place = places.argsort(dim=1)
    scope = torch.arange(scopes, device=experts.device)[:, None, None]
    cells = (scope * spec.experts + chosen.gather(1, by_place[..., None].expand(-1, -1, k))).flatten()
    earlier = _earlier(cells, scopes * spec.experts).view(scopes, total, k)
    full = torch.empty_like(earlier, dtype=torch.bool)
    full.scatter_(1, by_place[..., None].expand(-1, -1, k), earlier >= limit)
    mine = full.narrow(1, same_scope.index * own, own).reshape(-1, k)
    return experts.masked_fill(mine, DROPPED)


def _earlier(cells: Tensor, number: int) -> Tensor:
    """For each of cells (n,) how many equal ones stand before it."""
    order = cells.argsort(stable=True)
    counts = torch.bincount(cells, minlength=number)
    starts = counts.cumsum(0) - counts
    earlier = torch.empty_like(order)
    earlier[order] = torch.arange(len(cells), device=cells.device) - starts[cells[order]]
    return earlier


class _Logits(torch.autograd.Function):
    """tokens W^T in float32 at least; keeps the tokens as they came."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, put_off: PutOff | None) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.put_off, ctx.parameter = put_off, weight
        return linear(accurate(tokens), accurate(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        tokens, weight = ctx.saved_tensors
        d_tokens = input_gradient(gradient, accurate(weight)).to(tokens.dtype)

        def d_weight(gradient: Tensor, tokens: Tensor) -> Tensor:
            return weight_gradient(gradient, accurate(tokens)).to(weight.dtype)

        if ctx.put_off is None or not ctx.needs_input_grad[1]:
            return d_tokens, d_weight(gradient, tokens) if ctx.needs_input_grad[1] else None, None
        ctx.put_off.add(ctx.parameter, d_weight, gradient, tokens.detach())  # else the graph behind them stays
        return d_tokens, None, None


def accurate(x: Tensor) -> Tensor:
    """x in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
