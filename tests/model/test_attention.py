"""Attention against one written out as a sum over visible keys, for every mask and grouping."""

import math

import pytest
import torch
from torch import Tensor

from shoal.model import attention
from shoal.model.attention import attend, visible

CPU = torch.device("cpu")


def written_out(q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Tensor | None) -> Tensor:
    """softmax(q k / sqrt(d)) v, query by query; head i reads KV head i // (heads / kv heads)."""
    b, s, a, d = q.shape
    share = a // k.shape[2]
    out = torch.zeros_like(q)
    for row in range(b):
        for i in range(s):
            first = 0 if window is None else max(0, i - window + 1)
            keys = [j for j in range(first, i + 1) if documents is None or documents[row, j] == documents[row, i]]
            for head in range(a):
                scores = k[row, keys, head // share] @ q[row, i, head] / math.sqrt(d)
                weights = scores.exp() / scores.exp().sum()
                out[row, i, head] = weights @ v[row, keys, head // share]
    return out


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 10, 19, 20, 50])
@pytest.mark.parametrize("least_band", [1, 6, 128])
def test_equals_the_sum_over_visible_keys(monkeypatch, least_band, window, packed, kv_heads):
    monkeypatch.setattr(attention, "LEAST_BAND", least_band)
    b, s, a, d = 2, 20, 4, 6
    q, k, v = random(b, s, a, d), random(b, s, kv_heads, d), random(b, s + 1, kv_heads, d)[:, 1:]
    documents = torch.tensor([[0] * 5 + [1] + [2] * 14, [7] * 11 + [3] * 9]) if packed else None
    ours = attend(q, k, v, visible(s, window, documents, CPU), window)
    torch.testing.assert_close(ours, written_out(q, k, v, window, documents), rtol=1e-12, atol=1e-12)


def test_weights_average_values_and_do_not_choose_one():
    """BG-3: q = [1, 0], K = I, V = [10, 20] gives a point between the values, 13.302, not the best key's 10."""
    q = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64).view(1, 2, 1, 2)
    k = torch.eye(2, dtype=torch.float64).view(1, 2, 1, 2)
    v = torch.tensor([[10.0, 10.0], [20.0, 20.0]], dtype=torch.float64).view(1, 2, 1, 2)
    out = attend(q, k, v, None, None)[0, 1, 0]
    assert out.tolist() == pytest.approx([13.302, 13.302], abs=5e-4)


def test_no_mask_where_causality_is_all():
    assert visible(8, None, None, CPU) is None
    assert visible(8, 8, None, CPU) is None
    assert visible(8, 7, None, CPU) is not None
