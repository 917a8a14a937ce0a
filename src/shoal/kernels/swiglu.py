"""silu(gate) * up (Shazeer 2020) and its gradient, with gate and up in one tensor (..., gate | up)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(both: Tensor) -> Tensor:
    """silu(gate) * up of both (..., gate | up), inside autograd; kept for backward is `both` alone."""
    if torch.compiler.is_compiling():  # the compiler fuses the plain expression, and cannot follow `out=`
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up
    return _SwiGLU.apply(both)


def swiglu_forward(both: Tensor) -> Tensor:
    """The same outside autograd."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_gradient(gradient: Tensor, both: Tensor) -> Tensor:
    """The gradient of gate | up (..., 2f) from that of silu(gate) * up (..., f), each half written where it belongs."""
    gate, up = both.chunk(2, dim=-1)
    d_both = torch.empty_like(both)
    d_gate, d_up = d_both.chunk(2, dim=-1)
    torch.ops.aten.silu_backward.grad_input(torch.mul(gradient, up, out=d_gate), gate, grad_input=d_gate)
    torch.ops.aten.silu.out(gate, out=d_up).mul_(gradient)
    return d_both


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        return swiglu_forward(both)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return swiglu_gradient(gradient, *ctx.saved_tensors)
