"""y = x W^T + b and its two gradients, each an operation of its own.

For float32 on CPUs torch calls MKL, which uses half of what processors not made by Intel can do. torch also ships oneDNN,
where float32 is as exact and all are served alike; here large float32 products on CPUs go there, eager or compiled.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ONEDNN = torch.backends.mkldnn.is_available()  # asked once: torch's compiler cannot follow the question
_WORTH_IT = 2**23  # multiplications; below, handing tensors over takes longer than it saves


class PutOff:
    """Weight gradients that backward left for later, in the order in which it met them (spec BG-4, PP-10).

    What a put-off gradient needs stays alive until `run`. torch calls hooks on the parameters in backward too, while there
    is no gradient; they should let that pass.
    """

    def __init__(self) -> None:
        self._waiting: dict[Tensor, list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]]] = {}

    def __len__(self) -> int:
        """How many parameters wait."""
        return len(self._waiting)

    def add(self, parameter: Tensor, compute: Callable[..., Tensor], *inputs: Tensor) -> None:
        """Leaves `parameter`'s gradient, compute(*inputs), for later."""
        # Hooks on saved tensors give a function another tensor in place of its parameter: gradients put there are lost.
        own = isinstance(parameter, nn.Parameter) or parameter.grad_fn is not None
        assert own, "put off the parameter itself or a view of it, not what ctx.saved_tensors has for it"
        self._waiting.setdefault(parameter, []).append((compute, inputs))

    def inputs(self) -> Iterator[Tensor]:
        """The tensors that are kept for the gradients left."""
        for computes in self._waiting.values():
            for _, inputs in computes:
                yield from inputs

    def take(self) -> "PutOff":
        """Everything left so far, as a queue of its own; this one is empty then."""
        taken = PutOff()
        taken._waiting, self._waiting = self._waiting, {}
        return taken

    def run(self) -> None:
        """Computes everything left and adds it to the parameters' gradients as backward would, hooks included.

        A parameter used several times gets one sum, so that its hooks run once.
        """
        while self._waiting:
            parameter = next(iter(self._waiting))
            computes = self._waiting.pop(parameter)
            with torch.no_grad():
                gradient = _next(computes)
                while computes:
                    gradient = gradient + _next(computes)
            torch.autograd.backward([parameter], [gradient])


def _next(computes: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]]) -> Tensor:
    """The first of some gradients left, which is taken out and its inputs with it."""
    compute, inputs = computes.pop(0)
    return compute(*inputs)


class Linear(nn.Linear):
    """torch's linear layer on the faster kernels: x (..., in) -> (..., out), weight (out, in).

    put_off: where backward leaves the weight gradient, when it is not to compute it at once.
    """

    put_off: PutOff | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.put_off is None:
            return linear(x, self.weight, self.bias)
        return _PuttingOff.apply(x, self.weight, self.bias, self.put_off)


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


class _PuttingOff(torch.autograd.Function):
    """Backward computes the input's gradient alone."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, queue: PutOff) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.queue = (weight, bias), queue
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        parameter, bias = ctx.parameters
        put_off_weight(ctx.queue, parameter, bias, gradient, x)
        return input_gradient(gradient, weight) if ctx.needs_input_grad[0] else None, None, None, None


def put_off_weight(queue: PutOff, weight: Tensor, bias: Tensor | None, gradient: Tensor, x: Tensor) -> None:
    """Leaves the gradients of a linear layer's weight and bias in the queue, where they are wanted.

    weight, bias: the parameters themselves, which is not what autograd gives back for them where hooks on saved tensors
    are at work.
    """
    x = x.detach()  # else it would keep the graph behind it alive, and the micro-batch's input
    if weight.requires_grad:
        queue.add(weight, weight_gradient, gradient, x)
    if bias is not None and bias.requires_grad:
        queue.add(bias, bias_gradient, gradient)


def bias_gradient(gradient: Tensor) -> Tensor:
    """gradient (..., out) -> the sum over tokens (out,)."""
    return gradient.flatten(0, -2).sum(dim=0)


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
