"""Attention of a block of queries over a block of keys, with its log-sum-exp, forward and backward.

q is (b, s, a, d), k and v (b, t, g, d), each KV head serving a / g consecutive query heads; out is as q, lse (b, s, a).
`seen` says which pairs count: "all", "causal" (s = t, on and below the diagonal), or a bool mask (1 or b, 1, s, t) of
those that do *not*. Torch's flash kernels compute what they can, plain torch the rest.
"""

from typing import Protocol

import torch
from torch import Tensor

Seen = str | Tensor

_BAND = 512  # queries that the plain kernel holds scores of at once
_HALF = (torch.bfloat16, torch.float16)
_ops = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse): out = sum over keys of exp(S - lse) V with scores S = scale Q K^T, lse = log sum exp S.

    lse is float32 at least. A query that sees no key has out 0 and lse -inf.
    """
    q, k, v = _heads_first(q, k, v)
    out, lse = _kernel(q, seen).forward(q, k, v, seen, scale)
    if isinstance(seen, Tensor):
        lse = lse.masked_fill(seen.all(-1), -torch.inf)  # whatever a kernel makes of a row without keys
    return out.transpose(1, 2), lse.transpose(1, 2)


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of the gradients of q, k and v.

    gradient, out and lse are those of whole rows, merged over all blocks: exp(S - lse) are then this block's weights in
    the row, and the parts of all blocks add up. lse of a row that sees nothing anywhere may be -inf.
    """
    gradient, q, k, v, out = _heads_first(gradient, q, k, v, out)
    lse = lse.transpose(1, 2)
    if isinstance(seen, Tensor):
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # exp(-inf - 0) is 0, exp(-inf - -inf) no number
    dq, dk, dv = _kernel(q, seen).backward(gradient, q, k, v, out, lse, seen, scale)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class Kernel(Protocol):
    """The same with heads before tokens: q (b, a, s, d), k and v (b, g, t, d), lse (b, a, s)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class FlashOnCPU:
    """Torch's flash kernel on CPUs: float64 to float16, grouped heads, any mask."""

    def forward(self, q, k, v, seen, scale):
        return _ops._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, _is(seen, "causal"), attn_mask=_added(seen, q), scale=scale
        )

    def backward(self, gradient, q, k, v, out, lse, seen, scale):
        return _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, _is(seen, "causal"), attn_mask=_added(seen, q), scale=scale
        )


class FlashOnCUDA:
    """Torch's flash kernel on GPUs: bfloat16 and float16, head sizes that are multiples of 8 up to 256, no mask."""

    def forward(self, q, k, v, seen, scale):
        out, lse, *_ = _ops._scaled_dot_product_flash_attention(q, k, v, 0.0, _is(seen, "causal"), False, scale=scale)
        return out, lse

    def backward(self, gradient, q, k, v, out, lse, seen, scale):
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random numbers of dropout
        return _ops._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2],
            0.0, _is(seen, "causal"), unused, unused, scale=scale,
        )  # fmt: skip


class Plain:
    """Plain torch, in float32 at least, some hundred queries at a time; what the others are compared with."""

    def forward(self, q, k, v, seen, scale):
        parts = [self._band(q, k, v, seen, scale, start) for start in range(0, q.shape[2], _BAND)]
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)

    def _band(self, q, k, v, seen, scale, start):
        scores, _ = _scores(q, k, seen, scale, start)
        lse = scores.logsumexp(-1, keepdim=True)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp_()
        out = weights @ v.to(weights.dtype)[:, :, None]
        return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2).squeeze(-1)

    def backward(self, gradient, q, k, v, out, lse, seen, scale):
        dq = torch.empty_like(q)
        dk = torch.zeros_like(k, dtype=lse.dtype)
        dv = torch.zeros_like(v, dtype=lse.dtype)
        for start in range(0, q.shape[2], _BAND):
            rows = slice(start, start + _BAND)
            scores, queries = _scores(q, k, seen, scale, start)
            weights = (scores - _grouped(lse[:, :, rows], k)[..., None]).exp_()
            grad, result = (_grouped(x[:, :, rows], k).to(weights.dtype) for x in (gradient, out))
            change = grad @ v.to(weights.dtype)[:, :, None].mT - (grad * result).sum(-1, keepdim=True)
            change.mul_(weights).mul_(scale)
            dq[:, :, rows] = (change @ k.to(weights.dtype)[:, :, None]).flatten(1, 2)
            dk += (change.mT @ queries).sum(2)
            dv += (weights.mT @ grad).sum(2)
        return dq, dk.to(k.dtype), dv.to(v.dtype)


def _kernel(q: Tensor, seen: Seen) -> Kernel:
    """The kernel for these queries (b, a, s, d)."""
    if q.device.type == "cpu":
        return FlashOnCPU()
    size = q.shape[-1]
    if q.device.type == "cuda" and q.dtype in _HALF and size % 8 == 0 and size <= 256 and isinstance(seen, str):
        return FlashOnCUDA()
    return Plain()


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """(b, s, a, d) as (b, a, s, d), the features of a head side by side: flash kernels believe it without looking."""
    return [(x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2) for x in tensors]


def _scores(q: Tensor, k: Tensor, seen: Seen, scale: float, start: int) -> tuple[Tensor, Tensor]:
    """(scores, queries) of the band from `start` on: (b, g, a / g, rows, t or d), -inf where a pair does not count."""
    accurate = torch.promote_types(q.dtype, torch.float32)
    queries = _grouped(q[:, :, start : start + _BAND], k).to(accurate)
    scores = (queries @ k.to(accurate)[:, :, None].mT).mul_(scale)
    rows, keys = scores.shape[-2:]
    if isinstance(seen, Tensor):
        scores.masked_fill_(seen[:, :, None, start : start + _BAND], -torch.inf)
    elif seen == "causal":
        above = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(start + 1)
        scores.masked_fill_(above, -torch.inf)
    return scores, queries


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """(b, a, ...) as (b, g, a / g, ...)."""
    return x.unflatten(1, (k.shape[1], -1))


def _is(seen: Seen, word: str) -> bool:
    return isinstance(seen, str) and seen == word


def _added(seen: Seen, q: Tensor) -> Tensor | None:
    """A mask as what is added to the scores."""
    if isinstance(seen, str):
        return None
    return torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(seen, -torch.inf)
