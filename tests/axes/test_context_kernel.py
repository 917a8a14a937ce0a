"""Local kernels and merging against a plain softmax over dense scores."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.axes.context import kernel
from shoal.axes.context.kernel import FlashOnCPU, Plain
from shoal.axes.context.merge import Merged


def random(*key, shape, dtype=torch.float64):
    return torch.from_numpy(np.random.default_rng(key).normal(size=shape)).to(dtype)


def dense(q, k, v, hidden, scale):
    """(out, lse) by softmax; rows without keys are 0 and -inf."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), scores.logsumexp(-1).transpose(1, 2)


def hidden_of(seen, batch, rows, keys):
    """(what the kernel is told, the same as a dense mask)."""
    if seen == "all":
        return seen, torch.zeros(1, 1, rows, keys, dtype=torch.bool)
    if seen == "causal":
        return seen, torch.ones(rows, keys, dtype=torch.bool).triu(1)[None, None]
    mask = random(7, shape=(batch if seen == "of samples" else 1, 1, rows, keys)) < 0.3
    mask[:, :, 3] = True  # a row that sees nothing
    return mask, mask


@pytest.fixture(params=[FlashOnCPU, Plain])
def implementation(request, monkeypatch):
    monkeypatch.setattr(kernel, "_kernel", lambda q, seen: request.param())
    monkeypatch.setattr(kernel, "_BAND", 5)  # so that the plain one has several bands
    return request.param


@pytest.mark.parametrize("seen", ["all", "causal", "of samples", "of all"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_both_kernels_are_a_softmax(implementation, seen, heads, kv_heads):
    rows, keys = 13, 13 if seen == "causal" else 17
    told, mask = hidden_of(seen, 2, rows, keys)
    q, k, v = (
        random(i, shape=(2, length, n, 8)).requires_grad_()
        for i, (length, n) in enumerate(((rows, heads), (keys, kv_heads), (keys, kv_heads)))
    )
    out, lse = dense(q, k, v, mask, 0.3)
    gradient = random(4, shape=out.shape)
    truth = torch.autograd.grad(out, (q, k, v), gradient)
    with torch.no_grad():
        found = kernel.forward(q, k, v, told, 0.3)
        torch.testing.assert_close(found, (out, lse), rtol=1e-12, atol=1e-12)
        gradients = kernel.backward(gradient, q, k, v, *found, told, 0.3)
    torch.testing.assert_close(gradients, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_and_stretches_without_keys_leave_no_nan(implementation, dtype):
    """Flash kernels go over the keys in stretches of some hundred: here whole ones are hidden, and whole rows."""
    q, k, v = (random(i, shape=(1, n, 2, 8), dtype=dtype) for i, n in enumerate((7, 1400, 1400)))
    mask = torch.zeros(1, 1, 7, 1400, dtype=torch.bool)
    mask[..., 0, :1100] = mask[..., 1, 200:] = mask[..., 2, :] = True
    mask[..., 3, :] = True
    mask[..., 3, 700] = False
    truth, lse = dense(q.double(), k.double(), v.double(), mask, 0.3)
    found = kernel.forward(q, k, v, mask, 0.3)
    accuracy = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(found[0].double(), truth, rtol=accuracy, atol=accuracy)
    torch.testing.assert_close(found[1].double(), lse, rtol=accuracy, atol=accuracy)
    assert found[1][0, 2].eq(-math.inf).all() and found[0][0, 2].eq(0).all()
    assert found[1].dtype == torch.promote_types(dtype, torch.float32)
    for gradient in kernel.backward(torch.ones_like(q), q, k, v, *found, mask, 0.3):
        assert gradient.isfinite().all()
        assert gradient.dtype == dtype


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_blocks_in_any_order_and_size_make_the_whole(data):
    keys, rows = 12, 4
    cuts = sorted(data.draw(st.sets(st.integers(1, keys - 1))))
    blocks = data.draw(st.permutations(list(zip([0, *cuts], [*cuts, keys], strict=True))))
    mask = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=keys, max_size=keys), min_size=rows, max_size=rows))
    )
    size = data.draw(st.sampled_from([1.0, 100.0, 1e4]))  # scores far apart: shares that underflow
    q, k, v = (random(i, shape=(1, n, 2, 4)) for i, n in enumerate((rows, keys, keys)))
    merged = Merged(q)
    for start, stop in blocks:
        merged.add(*dense(q, k[:, start:stop], v[:, start:stop], mask[None, None, :, start:stop], size))
    truth = dense(q, k, v, mask[None, None], size)
    torch.testing.assert_close(merged.result(), truth, rtol=1e-12, atol=1e-12)


def test_blocks_for_some_rows_and_samples_only():
    q, k, v = (random(i, shape=(2, 6, 2, 4)) for i in range(3))
    merged, none = Merged(q), torch.zeros(1, 1, 6, 6, dtype=torch.bool)
    for sample in (slice(0, 1), slice(1, 2)):
        for rows in (slice(4, 6), slice(0, 4)):
            for keys in (slice(0, 2), slice(2, 6)):
                part = q[sample, rows], k[sample, keys], v[sample, keys]
                merged.add(*dense(*part, none[..., rows, keys], 0.5), sample, rows)
    torch.testing.assert_close(merged.result(), dense(q, k, v, none, 0.5), rtol=1e-12, atol=1e-12)


def test_half_precision_is_merged_in_float32():
    q = torch.zeros(1, 2, 2, 4, dtype=torch.bfloat16)
    for parts in ([], [slice(None)], [slice(0, 1), slice(1, 2)]):
        merged = Merged(q)
        for rows in parts:
            merged.add(q[:, rows], torch.zeros(q[:, rows].shape[:3]), rows=rows)
        assert [x.dtype for x in merged.result()] == [torch.float32] * 2


def test_nothing_added_is_nothing_seen():
    out, lse = Merged(torch.ones(1, 2, 3, 4)).result()
    assert out.eq(0).all() and lse.eq(-math.inf).all()


def test_tensors_may_lie_in_memory_as_they_like(implementation):
    """Flash kernels read the features of a head as neighbours, whatever the strides say."""
    q, k, v = (random(i, shape=(2, 6, 8, 3)).mT for i in range(3))  # 3 heads of 8
    gradient = random(9, shape=(1,)).expand(q.shape)
    tidy = [x.contiguous() for x in (q, k, v)]
    found, truth = (kernel.forward(*x, "causal", 0.3) for x in ((q, k, v), tidy))
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
    found = kernel.backward(gradient, q, k, v, *found, "causal", 0.3)
    truth = kernel.backward(gradient.contiguous(), *tidy, *truth, "causal", 0.3)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


def exactly(q, k, v, gradient, hidden, scale):
    """Output and gradients in 80-bit floats, each with the sum of the absolute values of what it is a sum of; and the largest
    score there is.
    """
    q, k, v, gradient = (x.numpy().astype(np.longdouble) for x in (q, k, v, gradient))
    share = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, share, 2) for x in (k, v))
    scores = np.where(hidden, -np.inf, np.einsum("bsad,btad->bast", q, k) * scale)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    weights /= np.maximum(weights.sum(-1, keepdims=True), np.finfo(np.longdouble).tiny)

    def own(x):
        return x.reshape(*x.shape[:2], -1, share, x.shape[-1]).sum(3)

    def sums(q, k, v, gradient, sign):
        out = np.einsum("bast,btad->bsad", weights, v)
        products = np.einsum("bsad,btad->bast", gradient, v)
        change = weights * (products + sign * np.einsum("bsad,bsad->bas", gradient, out)[..., None]) * scale
        dq, dk = np.einsum("bast,btad->bsad", change, k), own(np.einsum("bast,bsad->btad", change, q))
        return out, dq, dk, own(np.einsum("bast,bsad->btad", weights, gradient))

    sizes = np.where(hidden, 0, np.einsum("bsad,btad->bast", abs(q), abs(k)) * scale)
    return sums(q, k, v, gradient, -1), sums(abs(q), abs(k), abs(v), abs(gradient), 1), sizes.max()


@pytest.mark.parametrize("case", range(80))
def test_errors_are_a_few_roundings_of_what_is_summed(implementation, case):
    """Scores from tiny to saturated, where gradients are differences of nearly equal numbers: no relative error says much."""
    random = np.random.default_rng(case)
    b, s, t, kv_heads, d = (int(random.integers(1, most)) for most in (4, 40, 40, 4, 34))
    told = ["all", "causal", "mask"][case % 3]
    t = s if told == "causal" else t
    heads, factor = kv_heads * int(random.integers(1, 4)), 10 ** random.uniform(-3, 2)
    shapes = (b, s, heads, d), (b, t, kv_heads, d), (b, t, kv_heads, d), (b, s, heads, d)
    q, k, v, gradient = (torch.from_numpy(random.normal(size=shape)) for shape in shapes)
    q, hidden = q * factor, np.zeros((b, 1, s, t), dtype=bool)
    if told == "causal":
        hidden = (np.arange(t) > np.arange(s)[:, None])[None, None]
    elif told == "mask":
        hidden = random.uniform(size=(b, 1, s, t)) < random.uniform()
        told = torch.from_numpy(hidden)
    out, lse = kernel.forward(q, k, v, told, d**-0.5)
    found = (out, *kernel.backward(gradient, q, k, v, out, lse, told, d**-0.5))
    truth, absolute, size = exactly(q, k, v, gradient, hidden, d**-0.5)
    for x, wanted, bound in zip(found, truth, absolute, strict=True):  # 6.4 was the most in 700 cases
        assert (abs(x.numpy() - wanted) <= 12 * 2.0**-53 * (1 + size) * bound).all()
