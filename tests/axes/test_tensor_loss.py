"""The chunked loss against F.cross_entropy over whole logits: values, gradients, and what never comes to be."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.axes.tensor import cost
from shoal.axes.tensor.loss import head_loss as head_loss_over
from shoal.comm.world import World


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return head_loss_over(hidden, weight, targets, World.single().group("tp"))


def given(tokens=(3, 50), h=12, vocab=37, dtype=torch.float64, scale=1.0):
    random = torch.Generator().manual_seed(0)
    hidden = (scale * torch.randn(*tokens, h, generator=random, dtype=torch.float64)).to(dtype).requires_grad_()
    weight = torch.randn(vocab, h, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(vocab, tokens, generator=random)
    return hidden, weight, targets


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.t()).flatten(0, -2), targets.flatten(), reduction="sum")


def gradients(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, tensors))


@pytest.mark.parametrize("rows", [1, 7, 64, 150, 1000])
@pytest.mark.parametrize("invalid", [0.0, 0.4])
def test_equals_cross_entropy_of_whole_logits(monkeypatch, rows, invalid):
    monkeypatch.setattr(cost, "LOGITS", 0)
    monkeypatch.setattr(cost, "LEAST_ROWS", rows)
    hidden, weight, targets = given()
    targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(1)) < invalid] = -100
    ours, theirs = head_loss(hidden, weight, targets), whole(hidden, weight, targets)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)
    for a, b in zip(gradients(ours, hidden, weight), gradients(theirs, hidden, weight), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_what_comes_after_scales_the_gradients():
    hidden, weight, targets = given()
    ours, theirs = (f(hidden, weight, targets) for f in (head_loss, whole))
    for a, b in zip(
        gradients((ours / 13) ** 2, hidden, weight), gradients((theirs / 13) ** 2, hidden, weight), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_no_valid_target_is_zero_even_where_hidden_is_not_finite():
    hidden, weight, targets = given()
    with torch.no_grad():
        hidden[0] = torch.nan
    loss = head_loss(hidden, weight, torch.full_like(targets, -100))
    assert float(loss) == 0
    assert all(not gradient.any() for gradient in gradients(loss, hidden, weight))


def test_an_uncounted_token_leaves_no_trace():
    hidden, weight, targets = given()
    targets[1] = -100
    clean = gradients(head_loss(hidden, weight, targets), hidden, weight)
    with torch.no_grad():
        hidden[1] = torch.inf
    dirty = gradients(head_loss(hidden, weight, targets), hidden, weight)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


def test_large_scores_do_not_overflow():
    hidden, weight, targets = given(dtype=torch.float32, scale=1e3)
    loss = head_loss(hidden, weight, targets)
    assert loss.isfinite()
    torch.testing.assert_close(loss, whole(hidden.double(), weight.double(), targets).float(), rtol=1e-5, atol=0)
    assert all(gradient.isfinite().all() for gradient in gradients(loss, hidden, weight))


def test_bfloat16_accumulates_in_float32():
    """2048 losses near ln V: a bfloat16 sum, or weight gradient over many chunks, would be off by percents."""
    hidden, weight, targets = given((2048,), dtype=torch.bfloat16, scale=0.3)
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    ours, exact = head_loss(hidden, weight, targets), whole(exact_hidden, exact_weight, targets)
    assert ours.dtype == torch.float32
    assert float(ours) == pytest.approx(float(exact), rel=1e-4)
    for a, b in zip(gradients(ours, hidden, weight), gradients(exact, exact_hidden, exact_weight), strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).norm() < 0.01 * b.norm()


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_gets_no_gradient(frozen):
    pair, targets = list(given()[:2]), given()[2]
    pair[frozen].requires_grad_(False)
    loss = head_loss(*pair, targets)
    other = pair[1 - frozen]
    torch.testing.assert_close(gradients(loss, other), gradients(whole(*pair, targets), other), rtol=1e-11, atol=1e-13)


class Largest(TorchDispatchMode):
    """Records the most elements that any operation's result had."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_logits_never_exist_whole():
    tokens, vocab = 2000, 20000
    hidden, weight, targets = given((tokens,), h=4, vocab=vocab, dtype=torch.float32)
    with Largest() as seen:
        head_loss(hidden, weight, targets).backward()
    assert vocab <= seen.elements <= tokens * vocab / 3


def test_evaluation_computes_no_gradients():
    hidden, weight, targets = given()
    with torch.no_grad(), Largest() as seen:
        loss = head_loss(hidden, weight, targets)
    assert not loss.requires_grad
    assert float(loss) == pytest.approx(float(whole(hidden, weight, targets)), rel=1e-13)
    assert seen.elements == targets.numel() * len(weight)
