"""Sum of token cross-entropies straight from hidden states, a chunk of tokens at a time, over a cut vocabulary.

Logits (tokens x vocabulary) are the largest activation of a small model. Here a chunk's logits turn into its loss and
into the gradients of hidden and head weight at once, in forward, and are gone before the next chunk. Ranks that keep
parts of the vocabulary exchange three numbers per token and no logits (spec TP-7).
"""

import math

import torch
from torch import Tensor

from shoal.axes.tensor.cost import chunk_rows
from shoal.comm.collectives import all_reduce
from shoal.comm.world import Group
from shoal.kernels.linear import input_gradient, linear, weight_gradient

IGNORED = -100  # target of a token that does not count


@torch.compiler.disable
def head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, group: Group, first: int = 0, real: int | None = None
) -> Tensor:
    """Sum over counted targets of -log softmax(hidden W^T)[target], in nats; 0 when none counts; equal on all ranks.

    hidden (..., h), whole on every rank of `group`; weight (V_i, h): the first `real` rows (None: all) are those of ids
    from `first` on, the rest is padding; targets (...) int64 with IGNORED where a token does not count. The gradient of
    hidden is this rank's part of a sum over the group. Softmax, sum and the weight's gradient accumulate in float32, in
    float64 for float64 models; the result is such a scalar. Differentiable once.
    """
    real = len(weight) if real is None else real
    graded = torch.is_grad_enabled()
    return _HeadLoss.apply(hidden.flatten(0, -2), weight, targets.flatten(), group, first, real, graded)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, group: Group, first: int, real: int, graded: bool
    ) -> Tensor:
        d_hidden_wanted, d_weight_wanted = (graded and needed for needed in ctx.needs_input_grad[:2])
        accurate = torch.promote_types(hidden.dtype, torch.float32)
        tokens = len(targets)
        rows = (targets != IGNORED).nonzero().squeeze(1)
        # Alone, what does not count costs nothing. Over ranks it takes part, so that messages have planned sizes.
        selected = group.size == 1 and len(rows) < tokens
        if selected:
            hidden, targets = hidden[rows], targets[rows]
        kept = weight[:real]
        loss = torch.zeros((), dtype=accurate, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if d_hidden_wanted else None
        d_weight = torch.zeros_like(weight, dtype=accurate) if d_weight_wanted else None

        chunk = chunk_rows(len(weight))
        for start in range(0, len(targets), chunk):
            here = slice(start, start + chunk)
            log_p, picked, mine = _log_softmax(hidden[here], kept, targets[here], group, first, accurate)
            counts = targets[here] != IGNORED
            loss -= torch.where(counts, picked, 0).sum()
            if d_hidden is None and d_weight is None:
                continue
            d_logits = log_p.exp_()
            if real:
                target = (targets[here, None] - first).clamp(0, real - 1)
                d_logits.scatter_add_(1, target, -mine[:, None].to(accurate))
            if not selected:
                d_logits.mul_(counts[:, None])
            d_logits = d_logits.to(weight.dtype)
            if d_hidden is not None:
                d_hidden[here] = input_gradient(d_logits, kept)
            if d_weight is not None:
                d_weight[:real] += weight_gradient(d_logits, hidden[here])

        ctx.save_for_backward(d_hidden, d_weight)
        ctx.rows, ctx.tokens, ctx.dtype = rows if selected else None, tokens, weight.dtype
        return loss

    @staticmethod
    def backward(ctx, gradient: Tensor):
        d_hidden, d_weight = ctx.saved_tensors  # scaled in place: they are large and ours alone
        if d_hidden is not None:
            d_hidden.mul_(gradient)
            if ctx.rows is not None:
                d_hidden = d_hidden.new_zeros(ctx.tokens, d_hidden.shape[1]).index_copy_(0, ctx.rows, d_hidden)
        if d_weight is not None:
            d_weight = d_weight.mul_(gradient).to(ctx.dtype)
        return d_hidden, d_weight, None, None, None, None, None


def _log_softmax(
    hidden: Tensor, weight: Tensor, targets: Tensor, group: Group, first: int, accurate: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a chunk of n tokens: (log p of this rank's ids (n, V_i), log p of the targets (n,), whether they are this rank's).

    The logarithm of the sum of exponentials joins over ranks: first the largest, then the sum relative to it; the
    target's logit, known to one rank, travels with the sum.
    """
    logits = linear(hidden, weight)
    real = len(weight)
    places = targets - first
    mine = (places >= 0) & (places < real)
    if not real:
        log_p = logits.to(accurate)
        picked = logits.new_zeros(len(targets), dtype=accurate)
        total = torch.full_like(picked, -math.inf)
    else:
        log_p = torch.log_softmax(logits, dim=-1, dtype=accurate)
        picked = torch.where(mine, log_p.gather(1, places.clamp(0, real - 1)[:, None]).squeeze(1), 0)
        total = logits[:, 0].to(accurate) - log_p[:, 0]
    if group.size == 1:
        return log_p, picked, mine
    largest = all_reduce(total.clone(), group, "max")
    parts = torch.stack((torch.exp(total - largest), torch.where(mine, picked + total, 0)))
    exponentials, logit = all_reduce(parts, group)
    whole = largest + exponentials.log()
    return log_p.add_((total - whole)[:, None]) if real else log_p, logit - whole, mine
