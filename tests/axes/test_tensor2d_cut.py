"""What each rank of a grid keeps, and what that and the messages cost: against the pieces and by hand. No ranks run."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from shoal.axes.card import Card
from shoal.axes.piece import Share
from shoal.axes.tensor import cost as tensor_cost
from shoal.axes.tensor2d import cost
from shoal.axes.tensor2d.card import CARD
from shoal.axes.tensor2d.cut import piece
from shoal.spec.inventory import elements, inventory
from shoal.spec.model import ModelSpec

LLAMA = ModelSpec(layers=2, hidden=36, heads=6, kv_heads=2, ffn=49, vocab=61, positions_max=16)
GPT = ModelSpec(
    layers=2, hidden=36, heads=6, ffn=49, vocab=61, positions_max=16, norm="layernorm", positions="learned",
    mlp="gelu", qkv_bias=True, output_bias=True, mlp_bias=True, tied=True,
)  # fmt: skip
MODELS = {
    "gqa": LLAMA,
    "mqa, q and k norms, biases": replace(LLAMA, kv_heads=1, qk_norm=True, qkv_bias=True),
    "kv heads for all": replace(LLAMA, kv_heads=6),
    "gpt, tied": GPT,
}


def fitting(model, side):
    """The model, or its KV heads as a grid of this side can share them."""
    return replace(model, kv_heads=3) if model.kv_heads == 2 and side == 3 else model


@pytest.mark.parametrize("side", [1, 2, 3])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_pieces_cover_every_parameter_and_overlap_only_where_shared(model, side):
    """Each element on as many ranks as its shares multiply to; all that lies beyond it is padding of matrices."""
    model = fitting(model, side)
    kv = max(1, side // model.kv_heads)
    ranks_of = {"column": side, "kv": kv, "tp": side**2}
    for parameter in inventory(model):
        kept = np.zeros(parameter.shape, int)
        wanted = np.zeros(parameter.shape, int)
        for rank in range(side**2):
            mine = piece(parameter, side, *divmod(rank, side))
            own = np.ones(mine.shape, int)
            part = np.zeros(parameter.shape, int)
            mine.put(own, part)
            kept += part
            for share in mine.shares:
                assert share.partial and share.axis in ranks_of
                own[share.start : share.stop] *= ranks_of[share.axis]
            mine.put(own, wanted)
            if parameter.cut is None:
                assert prod(mine.shape) == part.sum(), "no padding"
        assert kept.min() >= 1, f"{parameter.name} is not covered"
        np.testing.assert_array_equal(kept, wanted, err_msg=parameter.name)


def test_the_pieces_by_hand():
    """q = 3, rank (1, 2): outputs 2, inputs 1; heads of 6, 49 columns of the MLP in 17s, 61 ids in 21s."""
    model = MODELS["mqa, q and k norms, biases"]
    pieces = {p.name: piece(p, 3, 1, 2) for p in inventory(model)}
    qkv = pieces["blocks.0.attention.qkv.weight"]
    assert qkv.shape == (2 * 6 + 6 + 6, 12)
    assert qkv.runs == (((24, 36, 0), (36, 42, 12), (42, 48, 18)), ((12, 24, 0),))
    assert qkv.shares == (Share("kv", 12, 18, True), Share("kv", 18, 24, True))
    assert pieces["blocks.0.attention.qkv.bias"].shares == (*qkv.shares, Share("column", 0, 24, True))
    out = pieces["blocks.0.attention.out.weight"]
    assert out.runs == (((24, 36, 0),), ((12, 24, 0),)) and out.shares == ()
    assert pieces["blocks.0.mlp.gate_up.weight"].runs == (((34, 49, 0), (83, 98, 17)), ((12, 24, 0),))
    assert pieces["blocks.0.mlp.down.weight"].runs == (((24, 36, 0),), ((17, 34, 0),))
    assert pieces["embedding.weight"].runs == (((42, 61, 0),), ((12, 24, 0),))
    assert pieces["embedding.weight"].shape == (21, 12)
    norm = pieces["blocks.1.mlp_norm.weight"]
    assert norm.runs == (((24, 36, 0),),) and norm.shares == (Share("column", 0, 12, True),)
    assert pieces["blocks.0.attention.q_norm.weight"].shares == (Share("tp", 0, 6, True),)


@pytest.mark.parametrize("side", [1, 2, 3])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_weight_memory_is_that_of_the_pieces(model, side):
    model = fitting(model, side)
    for rank in range(side**2):
        pieces = [piece(p, side, *divmod(rank, side)) for p in inventory(model)]
        assert cost.weight_elements(model, side) == sum(prod(mine.shape) for mine in pieces)


def test_a_large_model_is_cut_to_a_square_of_the_side():
    """Matrices of sizes that divide: 1 / q^2 of them, and 1 / q of the norms, which each row keeps."""
    model = ModelSpec(layers=3, hidden=64, heads=8, kv_heads=4, ffn=160, vocab=128)
    matrices = sum(elements(p) for p in inventory(model) if p.decay)
    norms = sum(elements(p) for p in inventory(model) if not p.decay)
    for side in (1, 2, 4):
        assert cost.weight_elements(model, side) == matrices // side**2 + norms // side
        sizes = [cost.activation_bytes(cost.Grid(n, 0, 0, 16, 8, 2), model) for n in (1, side)]
        statistics = 4 * 16 * 8 * (2 + model.heads)
        own = 4 * 16 * 8 // side * (2 + model.heads // side)
        assert (sizes[0] - statistics) == side**2 * (sizes[1] - own)


@pytest.mark.parametrize("tokens", [1, 600, 100_000])
@pytest.mark.parametrize("rows", [1, 2, 129, 64_000])
@pytest.mark.parametrize("side", [1, 2, 3])
def test_slices_of_the_head_stay_within_one_block_of_weights(rows, tokens, side):
    """What a slice gathers, of `side` times as many columns, is no more than a block, rounded up to whole ids."""
    parts = cost.slices(rows, tokens, side)
    assert sum(parts) == rows and min(parts) > 0
    assert side * max(parts) < rows + side
    assert max(parts) * tokens <= max(tensor_cost.LOGITS, tokens * tensor_cost.LEAST_ROWS)


def test_one_block_by_hand():
    """q = 2, 4 x 8 tokens, hidden 8, 2 heads, ffn 16, gelu, 2 bytes: X of 64, W of 48, 16, 32 and 32 elements."""
    model = ModelSpec(layers=1, hidden=8, heads=2, ffn=16, mlp="gelu")
    for rank in range(4):
        here = cost.Grid(2, *divmod(rank, 2), 4, 8, 2)
        rows = list(cost.block_transfers(here, model, 5, 1))
        assert {(t.layer, t.micro_batch) for t in rows} == {(5, 1)}
        products = [t for t in rows if t.op in ("broadcast", "reduce")]
        x, w = 64 + 64 + 64 + 128, 48 + 16 + 32 + 32
        for phase, times in (("forward", 1), ("backward", 2)):
            assert sum(t.sent for t in products if t.phase == phase) == times * 2 * (x + w)
            assert sum(t.calls for t in products if t.phase == phase) == times * 2 * 4 * 2
        assert sum(t.sent for t in rows if t.op == "all_reduce") == 4 * 16 * 4, "4 sums of 16 tokens, halves sent twice"
    assert cost.passing_bytes(cost.Grid(2, 0, 0, 4, 8, 2), model) == 2 * (128 + 32)


def test_many_tokens_speak_for_two_dimensions():
    """1D sends 8 (P-1)/P bsh whatever the weights; 2D's weights weigh less the more tokens there are."""
    model = ModelSpec(layers=1, hidden=4096, heads=32, ffn=11008)
    few, many = (cost.block_bytes(cost.Grid(8, 0, 0, 8, tokens, 2), model) for tokens in (64, 8192))
    assert few[0] > few[1] and many[0] < many[1]
    assert few[1] == 8 * 63 * 8 * 64 * 4096 * 2 // 64
    assert cost.block_bytes(cost.Grid(1, 0, 0, 8, 64, 2), model) == (0, 0)


def test_the_card_is_whole():
    assert isinstance(CARD, Card) and CARD.key == "tp=2x2" and set(CARD.cures) == {"compute", "memory"}
    assert all(vars(CARD).values())
