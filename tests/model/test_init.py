"""Fresh weights are a function of seed, name and row: slices equal the whole, in every dtype."""

import pytest
import torch

from shoal.model.decoder import Decoder
from shoal.model.init import initialise, rows
from shoal.spec.inventory import inventory
from shoal.spec.model import ModelSpec

SHAPE = (300, 17)
PINNED = [-1.0924986600875854, 0.2700648605823517, 0.7091781497001648]


@pytest.mark.parametrize(("start", "stop"), [(0, 300), (0, 1), (63, 65), (64, 128), (100, 299), (256, 300), (70, 70)])
def test_slices_equal_the_whole(start, stop):
    whole = rows("blocks.3.mlp.down.weight", SHAPE, 0.02, 5, 0, 300)
    assert whole.shape == SHAPE
    assert whole.dtype == torch.float32
    assert torch.equal(rows("blocks.3.mlp.down.weight", SHAPE, 0.02, 5, start, stop), whole[start:stop])


def test_empty_at_the_border_of_a_block():
    assert rows("w", SHAPE, 1.0, 0, 64, 64).shape == (0, 17)


def test_the_numbers_stay_what_they_are():
    """A checkpointless rerun of an old seed must start as it did: these values may never change."""
    first = rows("embedding.weight", (4, 3), 1.0, 0, 0, 1)[0]
    torch.testing.assert_close(first, torch.tensor(PINNED), rtol=0, atol=0)


def test_names_seeds_and_blocks_draw_their_own():
    drawn = [rows(name, (128, 64), 1.0, seed, 0, 128) for name, seed in (("a", 0), ("b", 0), ("a", 1))]
    blocks = [part for whole in drawn for part in whole.split(64)]
    for i, one in enumerate(blocks):
        for other in blocks[:i]:
            assert abs(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]) < 5 / 64


def test_the_distribution_is_normal():
    x = rows("w", (512, 512), 0.02, 0, 0, 512).double() / 0.02
    n = x.numel()
    assert abs(x.mean()) < 5 / n**0.5
    assert abs(x.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 5 * (96 / n) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_is_filled_as_the_inventory_says(dtype):
    spec = ModelSpec(layers=2, hidden=32, heads=4, vocab=99, norm="layernorm", qkv_bias=True, init_std=0.1)
    model = Decoder(spec, dtype)
    initialise(model, spec, seed=9)
    for entry, (name, parameter) in zip(inventory(spec), model.named_parameters(), strict=True):
        if entry.init == "normal":
            expected = rows(name, entry.shape, entry.std, 9, 0, entry.shape[0]).to(dtype)
        else:
            expected = torch.full(entry.shape, {"ones": 1.0, "zeros": 0.0}[entry.init], dtype=dtype)
        assert torch.equal(parameter.detach(), expected), name
