"""Norms over the last dim: RMSNorm (Zhang & Sennrich 2019) and LayerNorm (Ba et al. 2016)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.spec.model import ModelSpec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, of `size`; computed in float32 at least."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # torch has fused kernels for GPUs and its compiler makes one. For CPUs it differentiates the parts one by one,
        # which takes about three times as long as the formula below.
        if x.is_cuda or torch.compiler.is_compiling():
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """With y = x r, r = 1 / sqrt(mean(x^2) + eps), c = g weight: d_weight = sum(g y), d_x = r (c - y mean(c y))."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        accurate = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=accurate)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        y = x * scale
        products = gradient * y
        d_weight = products.flatten(0, -2).sum(dim=0)
        mean = (products @ weight.to(scale.dtype)).unsqueeze(-1).div_(-x.shape[-1])
        d_x = products.copy_(gradient).mul_(weight).addcmul_(y, mean).mul_(scale)  # in place: fresh memory costs more
        return d_x.to(x.dtype), d_weight.to(weight.dtype), None


def norm(spec: ModelSpec) -> nn.Module:
    """The norm over hidden that the model asks for."""
    kind = RMSNorm if spec.norm == "rmsnorm" else nn.LayerNorm
    return kind(spec.hidden, eps=spec.norm_eps)
