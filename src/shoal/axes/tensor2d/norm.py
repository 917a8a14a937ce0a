"""Norms over a hidden dim that is cut over the ranks of a row: their statistics, a number or two per token, are joined."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.comm.collectives import all_gather, all_reduce
from shoal.comm.world import Group
from shoal.spec.model import ModelSpec


class RowRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, the mean over all ranks' features; x (..., h / q) -> (..., h / q)."""

    def __init__(self, size: int, eps: float, row: Group):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.row = eps, row

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(x, self)


class RowLayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over all ranks' features; x (..., h / q) -> (..., h / q)."""

    def __init__(self, size: int, eps: float, row: Group):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps, self.row = eps, row

    def forward(self, x: Tensor) -> Tensor:
        return _layer_norm(x, self)


def row_norm(spec: ModelSpec, row: Group) -> nn.Module:
    """The norm over hidden that the model asks for; weights are this rank's h / q."""
    kind = RowRMSNorm if spec.norm == "rmsnorm" else RowLayerNorm
    return kind(spec.hidden // row.size, spec.norm_eps, row)


@torch.compiler.disable
def _rms_norm(x: Tensor, layer: RowRMSNorm) -> Tensor:
    return _RMSNorm.apply(x, layer.weight, layer)


@torch.compiler.disable
def _layer_norm(x: Tensor, layer: RowLayerNorm) -> Tensor:
    return _LayerNorm.apply(x, layer.weight, layer.bias, layer)


class _RMSNorm(torch.autograd.Function):
    """As kernels/norm.py, in float32 at least; the sum of squares, and in backward that of c y, go over the row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: RowRMSNorm) -> Tensor:
        accurate = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=accurate)
        squares = all_reduce(norm.square_(), layer.row)
        scale = squares.div_(x.shape[-1] * layer.row.size).add_(layer.eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.row, ctx.place = layer.row, layer.row.ledger.place
        return (x * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        y = x * scale
        products = gradient * y
        d_weight = products.flatten(0, -2).sum(dim=0)
        sums = _joined((products @ weight.to(scale.dtype)).unsqueeze(-1), ctx)
        mean = sums.div_(-x.shape[-1] * ctx.row.size)
        d_x = products.copy_(gradient).mul_(weight).addcmul_(y, mean).mul_(scale)
        return d_x.to(x.dtype), d_weight.to(weight.dtype), None


class _LayerNorm(torch.autograd.Function):
    """With y = (x - mean) r, c = g weight: d_x = r (c - mean(c) - y mean(c y)), in float32 at least.

    Each rank's sum and its squares around its own mean are joined as by Chan et al. 1979: a difference of large sums of
    squares would lose the variance of features that lie far from zero.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: RowLayerNorm) -> Tensor:
        accurate = torch.promote_types(x.dtype, torch.float32)
        x_accurate = x.to(accurate)
        variance, mean = torch.var_mean(x_accurate, dim=-1, correction=0)
        variances, means = all_gather(torch.stack((variance, mean))[None], layer.row).unbind(1)  # each (q, ...)
        variance = variances.mean(0) + means.var(0, correction=0)  # the ranks have equally many features
        mean, scale = means.mean(0)[..., None], (variance + layer.eps).rsqrt_()[..., None]
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.row, ctx.place = layer.row, layer.row.ledger.place
        return torch.addcmul(bias.to(accurate), (x_accurate - mean).mul_(scale), weight.to(accurate)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, scale = ctx.saved_tensors
        y = (x - mean).mul_(scale)
        d_weight, d_bias = (gradient * y).flatten(0, -2).sum(dim=0), gradient.flatten(0, -2).sum(dim=0)
        c = gradient * weight.to(scale.dtype)
        sums = _joined(torch.stack((c.sum(dim=-1), (c * y).sum(dim=-1))), ctx)
        of_c, of_cy = sums.div_(-x.shape[-1] * ctx.row.size)[..., None].unbind(0)
        d_x = c.add_(of_c).addcmul_(y, of_cy).mul_(scale)
        return d_x.to(x.dtype), d_weight.to(weight.dtype), d_bias.to(weight.dtype), None


def _joined(sums: Tensor, ctx: Any) -> Tensor:
    """The row's sums of what each rank has, moved as part of the backward of where ctx was."""
    with ctx.row.ledger.at(phase="backward", layer=ctx.place.layer, micro_batch=ctx.place.micro_batch):
        return all_reduce(sums, ctx.row)
