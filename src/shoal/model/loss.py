"""Sum of token cross-entropies straight from hidden states, a chunk of tokens at a time.

Logits (tokens x vocabulary) are the largest activation of a small model. Here a chunk's logits turn into its loss and
into the gradients of hidden and head weight at once, in forward, and are gone before the next chunk.
"""

import torch
from torch import Tensor

from shoal.kernels.linear import input_gradient, linear, weight_gradient

IGNORED = -100  # target of a token that does not count
_LOGITS = 2**22  # of one chunk: 16 MB in float32
_LEAST_ROWS = 512  # tokens of one chunk: fewer make the three matrix products slow


@torch.compiler.disable
def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum over counted targets of -log softmax(hidden weight^T)[target], in nats; 0 when none counts.

    hidden (..., h), weight (V, h), targets (...) int64 with IGNORED where a token does not count, which costs nothing.
    The softmax, the sum and the weight's gradient accumulate in float32, in float64 for float64 models; the result is
    such a scalar. Differentiable once.
    """
    return _HeadLoss.apply(hidden.flatten(0, -2), weight, targets.flatten(), torch.is_grad_enabled())


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, graded: bool) -> Tensor:
        d_hidden_wanted, d_weight_wanted = (graded and needed for needed in ctx.needs_input_grad[:2])
        accurate = torch.promote_types(hidden.dtype, torch.float32)
        rows = (targets != IGNORED).nonzero().squeeze(1)
        tokens = len(targets)
        if len(rows) < tokens:
            hidden, targets = hidden[rows], targets[rows]
        loss = torch.zeros((), dtype=accurate, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if d_hidden_wanted else None
        d_weight = torch.zeros_like(weight, dtype=accurate) if d_weight_wanted else None

        chunk = max(_LEAST_ROWS, _LOGITS // len(weight))
        for start in range(0, len(targets), chunk):
            here = slice(start, start + chunk)
            target = targets[here, None]
            log_p = torch.log_softmax(linear(hidden[here], weight), dim=-1, dtype=accurate)
            loss -= log_p.gather(1, target).sum()
            if d_hidden is None and d_weight is None:
                continue
            d_logits = log_p.exp_().scatter_add_(1, target, log_p.new_full((1, 1), -1.0).expand_as(target))
            d_logits = d_logits.to(weight.dtype)
            if d_hidden is not None:
                d_hidden[here] = input_gradient(d_logits, weight)
            if d_weight is not None:
                d_weight += weight_gradient(d_logits, hidden[here])

        ctx.gradients = d_hidden, d_weight
        ctx.rows, ctx.tokens, ctx.dtype = rows, tokens, weight.dtype
        return loss

    @staticmethod
    def backward(ctx, gradient: Tensor):
        assert ctx.gradients is not None, "the loss was differentiated before"
        (d_hidden, d_weight), ctx.gradients = ctx.gradients, None  # scaled in place: they are large and ours alone
        if d_hidden is not None:
            d_hidden.mul_(gradient)
            if len(ctx.rows) < ctx.tokens:
                d_hidden = d_hidden.new_zeros(ctx.tokens, d_hidden.shape[1]).index_copy_(0, ctx.rows, d_hidden)
        if d_weight is not None:
            d_weight = d_weight.mul_(gradient).to(ctx.dtype)
        return d_hidden, d_weight, None, None
