"""Floating-point operations of what torch is told to compute, from the shapes of tensors that need not have values.

Two per multiplication of a matrix product or of attention's products, causal ones only for the pairs that count. Backward of
attention counts four products, as the mathematics has them, though fused kernels form the scores a second time.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

import shoal.kernels.linear  # noqa: F401  (registers torch.ops.shoal)

aten, ours = torch.ops.aten, torch.ops.shoal


def count(func: Any, args: Sequence[Any], into: Counter[str]) -> None:
    """Adds the operations of one call of a torch operator to `into`, as "products" or "attention"."""
    if func in _FLOPS:
        kind, flops = _FLOPS[func]
        into[kind] += flops(*args)


def _mm(a: Tensor, b: Tensor, *_: Any) -> int:
    """a (..., n, k), b (..., k, m)."""
    return 2 * a.numel() * b.shape[-1]


def _addmm(_bias: Tensor, a: Tensor, b: Tensor, *_: Any) -> int:
    return _mm(a, b)


def _linear(x: Tensor, weight: Tensor, *_: Any) -> int:
    """x (..., in), weight (out, in)."""
    return 2 * x.numel() * len(weight)


def _input_gradient(gradient: Tensor, weight: Tensor) -> int:
    """gradient (..., out), weight (out, in)."""
    return 2 * gradient.numel() * weight.shape[1]


def _weight_gradient(gradient: Tensor, x: Tensor) -> int:
    """gradient (..., out), x (..., in)."""
    return 2 * gradient.numel() * x.shape[-1]


def _attention(products: int, query: int, causal: int) -> Callable[..., int]:
    """query, causal: places of these arguments; keys follow the query, both with heads first, (b, a, s, d)."""

    def flops(*args: Any) -> int:
        q, k = args[query : query + 2]
        rows, keys = q.shape[2], k.shape[2]
        pairs = rows * (rows + 1) // 2 if len(args) > causal and args[causal] else rows * keys
        return products * 2 * prod(q.shape[:2]) * pairs * q.shape[3]

    return flops


_FLOPS: dict[Any, tuple[str, Callable[..., int]]] = {
    aten.mm.default: ("products", _mm),
    aten.bmm.default: ("products", _mm),
    aten.addmm.default: ("products", _addmm),
    aten.baddbmm.default: ("products", _addmm),
    ours.linear.default: ("products", _linear),
    ours.linear_input_gradient.default: ("products", _input_gradient),
    ours.linear_weight_gradient.default: ("products", _weight_gradient),
    aten._scaled_dot_product_flash_attention_for_cpu.default: ("attention", _attention(2, 0, 4)),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: ("attention", _attention(4, 1, 7)),
}
