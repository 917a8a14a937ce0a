"""Linear layers on the kernels that are faster for large float32 products: the same numbers, gradients and compilation."""

import pytest
import torch
import torch.nn.functional as F

from shoal.kernels import linear as linear_module
from shoal.kernels.linear import Linear, input_gradient, linear, weight_gradient

SMALL, LARGE = (3, 5, 8, 6), (4, 130, 96, 250)  # b, s, in, out: below and above the size where kernels change


def given(sizes, dtype=torch.float32, bias=True):
    b, s, i, o = sizes
    random = torch.Generator().manual_seed(0)
    x, weight, shift = (torch.randn(*shape, generator=random).to(dtype) for shape in ((b, s, i), (o, i), (o,)))
    return x.requires_grad_(), weight.requires_grad_(), shift.requires_grad_() if bias else None


def exact(*tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def assert_close(ours, theirs):
    assert (ours.double() - theirs).norm() < 1e-6 * theirs.norm()


def test_the_two_sizes_lie_on_both_sides():
    for sizes, expected in ((SMALL, False), (LARGE, torch.backends.mkldnn.is_available())):
        x, weight, _ = given(sizes)
        assert linear_module._for_onednn(x, len(weight)) == expected
        assert not linear_module._for_onednn(x.double(), len(weight))


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("strided", [False, True])
def test_values_and_gradients_equal_float64(sizes, bias, strided):
    inputs = given(sizes, bias=bias)
    doubles = exact(*inputs)
    gradient = torch.randn(*sizes[:2], sizes[3], generator=torch.Generator().manual_seed(1))
    if strided:  # as a slice of a fused projection arrives
        gradient = torch.cat((gradient, gradient), dim=-1)[..., : sizes[3]]
        wide = torch.cat((inputs[0], inputs[0]), dim=-1).detach()[..., : sizes[2]]
        inputs = (wide.requires_grad_(), *inputs[1:])
    ours, theirs = linear(*inputs), F.linear(*doubles)
    assert_close(ours, theirs)
    wanted = 3 if bias else 2
    for a, b in zip(
        torch.autograd.grad(ours, inputs[:wanted], gradient),
        torch.autograd.grad(theirs, doubles[:wanted], gradient.double()),
        strict=True,
    ):
        assert_close(a, b)


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_gradient_is_an_operation_of_its_own(sizes, dtype):
    x, weight, _ = given(sizes, dtype)
    gradient = torch.randn(*sizes[:2], sizes[3], generator=torch.Generator().manual_seed(1)).to(dtype)
    tolerance = 0.01 if dtype == torch.bfloat16 else 1e-6
    for ours, theirs in (
        (input_gradient(gradient, weight), gradient.double() @ weight.double()),
        (weight_gradient(gradient, x), torch.einsum("bso,bsi->oi", gradient.double(), x.double())),
    ):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() < tolerance * theirs.norm()


def test_what_needs_no_gradient_gets_none():
    x, weight, bias = given(LARGE)
    linear(x.detach(), weight, bias).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    assert bias.grad is not None


def test_gradients_accumulate_into_the_view_that_is_there():
    x, weight, _ = given(LARGE, bias=False)
    flat = torch.ones(weight.numel())
    view = weight.grad = flat.view(weight.shape)
    linear(x, weight).sum().backward()
    assert weight.grad is view
    assert_close(flat.view(weight.shape) - 1, x.detach().double().sum(dim=(0, 1)).expand(weight.shape))


def test_large_products_compile_without_a_break():
    torch._dynamo.reset()
    layer = Linear(LARGE[2], LARGE[3])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = given(LARGE)[0]
    gradients = [torch.autograd.grad(f(x).square().sum(), [x, *layer.parameters()]) for f in (layer, compiled)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
