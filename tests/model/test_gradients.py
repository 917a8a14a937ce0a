"""BG-4: input and weight gradients of every kind of layer against central differences, in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shoal.axes.tensor.loss import head_loss
from shoal.axes.tensor.run import TensorLayers
from shoal.comm.world import World
from shoal.kernels.dropout import DropoutKey
from shoal.kernels.norm import norm
from shoal.model.attention import Attention, visible
from shoal.model.block import Block
from shoal.model.decoder import Decoder
from shoal.model.mlp import GatedMLP, GeluMLP
from shoal.model.rope import rotation
from shoal.spec.model import ModelSpec

B, S = 2, 5
SIZES = {"layers": 1, "hidden": 6, "heads": 2, "ffn": 5, "vocab": 7, "positions_max": S, "head_size": 4}
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
STEP = 1e-6


def alone(spec: ModelSpec) -> TensorLayers:
    return TensorLayers(spec, World.single().group("tp"))


def filled(module: nn.Module) -> nn.Module:
    random = torch.Generator().manual_seed(1)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=random, dtype=torch.float64) + 0.1)
    return module


def given(spec: ModelSpec) -> Tensor:
    x = torch.randn(B, S, spec.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return x.requires_grad_()


def assert_gradients(function: Callable[[], Tensor], tensors: list[Tensor]) -> None:
    """Every element's derivative of the function, weighted by fixed random numbers where it is no scalar."""
    weights = torch.randn(function().shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    analytic = torch.autograd.grad((function() * weights).sum(), tensors)
    with torch.no_grad():
        for tensor, gradient in zip(tensors, analytic, strict=True):
            numeric = torch.zeros_like(tensor)
            for place in range(tensor.numel()):
                flat, kept = tensor.view(-1), tensor.view(-1)[place].item()
                flat[place] = kept + STEP
                above = (function() * weights).sum()
                flat[place] = kept - STEP
                numeric.view(-1)[place] = (above - (function() * weights).sum()) / (2 * STEP)
                flat[place] = kept
            torch.testing.assert_close(gradient, numeric, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [GatedMLP, GeluMLP])
def test_mlp(kind):
    spec = ModelSpec(**SIZES, **BIASES)
    layer, x = filled(kind(spec, alone(spec))), given(spec)
    assert_gradients(lambda: layer(x), [x, *layer.parameters()])


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norm(kind):
    spec = ModelSpec(**SIZES, norm=kind)
    layer, x = filled(norm(spec)), given(spec)
    assert_gradients(lambda: layer(x), [x, *layer.parameters()])


@pytest.mark.parametrize("extra", [{}, {"kv_heads": 1}, {"qk_norm": True, **BIASES}, {"window": 2}], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_attention(extra, packed):
    spec = ModelSpec(**SIZES, **extra)
    layer, x = filled(Attention(spec, alone(spec))), given(spec)
    turn = rotation(spec.rope, spec.head_size, torch.arange(S)[None], torch.float64)
    documents = torch.tensor([[0, 0, 1, 1, 1], [2, 3, 3, 3, 4]]) if packed else None
    mask = visible(S, spec.window, documents, x.device)
    assert_gradients(lambda: layer(x, turn, mask), [x, *layer.parameters()])


def test_block_with_dropout():
    spec = ModelSpec(**SIZES, dropout=0.3)
    layer, x = filled(Block(spec, alone(spec))), given(spec)
    rows, features = DropoutKey(0, 1, torch.tensor([4, 9]), torch.arange(S)).noise(2, spec.hidden)
    assert_gradients(lambda: layer(x, None, None, (rows, features)), [x, *layer.parameters()])


@pytest.mark.parametrize("tied", [False, True])
def test_whole_model(tied):
    spec = ModelSpec(**SIZES, tied=tied, positions="learned", dropout=0.2)
    model = filled(Decoder(spec))
    text = torch.randint(spec.vocab, (B, S + 1), generator=torch.Generator().manual_seed(5))
    targets = text[:, 1:].clone()
    targets[0, 2:4] = -100
    key = DropoutKey(0, 1, torch.tensor([4, 9]), torch.arange(S))
    assert_gradients(lambda: model.loss(text[:, :-1], targets, dropout=key), list(model.parameters()))


def test_head():
    hidden = given(ModelSpec(**SIZES))
    weight = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(6)).requires_grad_()
    targets = torch.tensor([[0, 6, -100, 3, 3], [1, -100, -100, 5, 2]])
    assert_gradients(lambda: head_loss(hidden, weight, targets, World.single().group("tp")), [hidden, weight])
