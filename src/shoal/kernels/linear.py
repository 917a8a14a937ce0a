"""y = x W^T + b and its two gradients, each an operation of its own.

For float32 on CPUs torch calls MKL, which uses half of what processors not made by Intel can do. torch also ships oneDNN,
where float32 is as exact and all are served alike; here large float32 products on CPUs go there, eager or compiled.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ONEDNN = torch.backends.mkldnn.is_available()  # asked once: torch's compiler cannot follow the question
_WORTH_IT = 2**23  # multiplications; below, handing tensors over takes longer than it saves


class Linear(nn.Linear):
    """torch's linear layer on the faster kernels: x (..., in) -> (..., out), weight (out, in)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in), weight (out, in), bias (out,) -> (..., out)."""
    return _linear(x, weight, bias) if _for_onednn(x, len(weight)) else F.linear(x, weight, bias)


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """gradient (..., out), weight (out, in) -> gradient W (..., in)."""
    return _input_gradient(gradient, weight) if _for_onednn(gradient, weight.shape[1]) else gradient @ weight


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """gradient (..., out), x (..., in) -> the sum over tokens of gradient^T x (out, in)."""
    if _for_onednn(gradient, x.shape[-1]):
        return _weight_gradient(gradient, x)
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def _for_onednn(x: Tensor, columns: int) -> bool:
    return _ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() * columns >= _WORTH_IT


@torch.library.custom_op("shoal::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.aten.mkldnn_linear(x.to_mkldnn(), weight, bias).to_dense()


@_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


@torch.library.custom_op("shoal::linear_input_gradient", mutates_args=())
def _input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    shape = (*gradient.shape[:-1], weight.shape[1])
    return torch.ops.aten.mkldnn_linear_backward_input(shape, gradient.to_mkldnn(), weight).to_dense()


@_input_gradient.register_fake
def _(gradient: Tensor, weight: Tensor) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], weight.shape[1])


@torch.library.custom_op("shoal::linear_weight_gradient", mutates_args=())
def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    shape = gradient.new_empty(gradient.shape[-1], x.shape[-1])  # only its sizes are read
    return torch.ops.aten.mkldnn_linear_backward_weights(gradient.to_mkldnn(), x.to_mkldnn(), shape, False)[0]


@_weight_gradient.register_fake
def _(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.new_empty(gradient.shape[-1], x.shape[-1])


def _keep(ctx, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    x_needs, weight_needs, bias_needs = ctx.needs_input_grad
    return (
        input_gradient(gradient, weight) if x_needs else None,
        weight_gradient(gradient, x) if weight_needs else None,
        gradient.flatten(0, -2).sum(dim=0) if bias_needs else None,
    )


_linear.register_autograd(_backward, setup_context=_keep)
