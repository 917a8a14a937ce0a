"""Rotary embedding: frequencies as Hugging Face computes them, and the property that it exists for."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shoal.model.rope import frequencies, rotated, rotation
from shoal.spec.model import RopeSpec


@pytest.mark.parametrize("head_size", [8, 64, 128])
@pytest.mark.parametrize(
    ("scaling", "factor", "original", "theta"),
    [
        ("llama3", 8.0, 8192, 500000.0),
        ("llama3", 32.0, 8192, 500000.0),
        ("yarn", 4.0, 4096, 10000.0),
        ("yarn", 40.0, 4096, 10000.0),
        ("yarn", 4.0, 32768, 1000000.0),
    ],
)
def test_scaled_frequencies_equal_hugging_face(scaling, factor, original, theta, head_size):
    config = transformers.LlamaConfig(
        hidden_size=4 * head_size,
        num_attention_heads=4,
        max_position_embeddings=int(factor * original),
        rope_parameters={
            "rope_type": scaling,
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
            **({"low_freq_factor": 1.0, "high_freq_factor": 4.0} if scaling == "llama3" else {}),
        },
    )
    theirs, their_factor = ROPE_INIT_FUNCTIONS[scaling](config, device="cpu")
    rope = RopeSpec(theta=theta, scaling=scaling, factor=factor, original_positions=original)
    torch.testing.assert_close(frequencies(rope, head_size).float(), theirs, rtol=2e-6, atol=0)
    assert rope.attention_factor == pytest.approx(their_factor, rel=1e-12)


def test_scores_depend_on_distance_only():
    rope, size = RopeSpec(), 16
    q, k = torch.randn(2, 1, 1, 1, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(query_at: int, key_at: int) -> float:
        at = [rotation(rope, size, torch.tensor([[place]]), torch.float64) for place in (query_at, key_at)]
        return float((rotated(q, at[0]) * rotated(k, at[1])).sum())

    assert score(7, 3) == pytest.approx(score(1007, 1003), rel=1e-9)
    assert score(7, 3) != pytest.approx(score(8, 3), rel=1e-3)


def test_turns_as_complex_numbers():
    """Feature i and feature i + d/2 are real and imaginary part of a number times e^(i angle)."""
    rope, size = RopeSpec(theta=50.0), 12
    x = torch.randn(2, 9, 3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([range(9), range(100, 109)])
    angles = positions[..., None, None] * 50.0 ** (-torch.arange(6, dtype=torch.float64) / 6)
    turned = torch.complex(x[..., :6], x[..., 6:]) * torch.polar(torch.ones_like(angles), angles)
    ours = rotated(x, rotation(rope, size, positions, torch.float64))
    torch.testing.assert_close(ours, torch.cat((turned.real, turned.imag), dim=-1), rtol=1e-12, atol=1e-12)


def test_angles_stay_exact_far_out():
    cos, _ = rotation(RopeSpec(), 4, torch.tensor([[131071]]), torch.float32)
    assert float(cos[0, 0, 0, 0]) == pytest.approx(float(torch.tensor(131071.0, dtype=torch.float64).cos()), abs=1e-7)
