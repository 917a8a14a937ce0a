"""Dropout masks: right on average, independent where they should be, and the same however the tensor is cut."""

import math

import pytest
import torch
from torch import Tensor

from shoal.kernels.dropout import DropoutKey, dropped
from shoal.model.decoder import Decoder
from shoal.model.init import initialise
from shoal.spec.model import ModelSpec

B, S, H = 16, 64, 128


def kept(
    rate=0.25, seed=0, step=0, site=0, first_sample=0, first_position=0, first_feature=0, sizes=(B, S, H)
) -> Tensor:
    """The mask as booleans (b, s, h)."""
    b, s, h = sizes
    key = DropoutKey(
        seed, step, torch.arange(first_sample, first_sample + b), torch.arange(s) + first_position, first_feature
    )
    rows, features = key.noise(site + 1, h)
    return dropped(torch.ones(b, s, h), rate, rows[site], features) > 0


def within(share: float, expected: float, count: int) -> bool:
    """Whether a share of `count` draws is within five standard deviations."""
    return abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / count)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_holds_everywhere(rate):
    mask = kept(rate)
    assert within(float(mask.double().mean()), 1 - rate, mask.numel())
    for dim in range(3):  # per sample, position and feature: no line of the tensor is treated apart
        shares = mask.double().transpose(0, dim).flatten(1).mean(dim=1)
        assert all(within(float(share), 1 - rate, mask.numel() // len(shares)) for share in shares)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"seed": -1},
        {"seed": 2**63 + 5},
        {"step": 1},
        {"step": 1000},
        {"site": 1},
        {"site": 2},
        {"first_sample": B},
        {"first_sample": 1},
        {"first_position": 1},
        {"first_feature": 1},
        {"first_feature": H},
    ],
    ids=str,
)
def test_other_numbers_give_independent_masks(other):
    same = kept() == kept(**other)
    assert within(float(same.double().mean()), 0.75**2 + 0.25**2, same.numel())


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_neighbours_are_independent(dim):
    mask = kept(0.5).transpose(0, dim)
    same = mask[1:] == mask[:-1]
    assert within(float(same.double().mean()), 0.5, same.numel())


def test_rectangles_are_independent():
    """Rows and features have keys of their own, so the corners of a rectangle are where a weak hash would show."""
    mask = kept(0.5).flatten(0, 1)
    odd = mask[:-1, :-1] ^ mask[1:, :-1] ^ mask[:-1, 1:] ^ mask[1:, 1:]
    assert within(float(odd.double().mean()), 0.5, odd.numel())


def test_a_part_of_the_tensor_has_its_part_of_the_mask():
    whole = kept(site=2)
    assert torch.equal(kept(site=2, first_sample=4, sizes=(3, S, H)), whole[4:7])
    assert torch.equal(kept(site=2, first_position=16, sizes=(B, 32, H)), whole[:, 16:48])
    assert torch.equal(kept(site=2, first_feature=96, sizes=(B, S, 32)), whole[..., 96:])
    scattered = DropoutKey(0, 0, torch.tensor([9, 2]), torch.tensor([5, 60, 1]))  # samples and zigzag positions
    rows, features = scattered.noise(3, H)
    assert torch.equal(dropped(torch.ones(2, 3, H), 0.25, rows[2], features) > 0, whole[[9, 2]][:, [5, 60, 1]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_kept_values_are_scaled_and_so_are_their_gradients(dtype):
    x = torch.randn(B, S, H, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    rows, features = DropoutKey(0, 0, torch.arange(B), torch.arange(S)).noise(1, H)
    y = dropped(x, 0.25, rows[0], features)
    mask = kept()
    assert y.dtype == dtype
    assert torch.equal(y, torch.where(mask, x / 0.75, 0))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.where(mask, torch.ones_like(x) / 0.75, 0))


def test_micro_batches_together_train_what_the_batch_trains():
    spec = ModelSpec(layers=2, hidden=16, heads=2, vocab=31, dropout=0.3)
    gradients = []
    for parts in (1, 2, 4):
        model = Decoder(spec, torch.float64)
        initialise(model, spec, seed=0)
        text = torch.randint(31, (4, 11), generator=torch.Generator().manual_seed(2))
        for samples in torch.arange(4).chunk(parts):
            key = DropoutKey(3, 7, samples + 100, torch.arange(10))
            model.loss(text[samples, :-1], text[samples, 1:], dropout=key).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-10, atol=1e-13)


def test_evaluation_drops_nothing():
    spec = ModelSpec(layers=1, hidden=16, heads=2, vocab=31, dropout=0.3)
    without = ModelSpec(layers=1, hidden=16, heads=2, vocab=31)
    models = [Decoder(s) for s in (spec, without)]
    for model in models:
        initialise(model, without, seed=0)
    text = torch.arange(20).view(2, 10)
    assert torch.equal(models[0](text), models[1](text))
    key = DropoutKey(0, 0, torch.arange(2), torch.arange(10))
    assert not torch.equal(models[0](text, dropout=key), models[1](text))
    assert torch.equal(models[1](text, dropout=key), models[1](text))
