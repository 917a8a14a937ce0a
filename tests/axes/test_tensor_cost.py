"""What tensor and sequence parallelism send: closed forms against the spec's goldens and against layers that run."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.axes.card import Card
from shoal.axes.sequence.card import CARD as SEQUENCE_CARD
from shoal.axes.tensor import cost
from shoal.axes.tensor.card import CARD as TENSOR_CARD
from shoal.axes.tensor.cost import Axis, Shape
from shoal.axes.tensor.loss import head_loss
from shoal.axes.tensor.run import ColumnLinear, RowLinear, TensorLayers
from shoal.comm import conjugate
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.mesh import Mesh
from shoal.model.block import Block
from shoal.spec.layout import Layout
from shoal.spec.model import ModelSpec
from shoal.verify.compare import relative

RANKS = [1, 2, 3, 4, 8]
GOLDEN = Shape(b=2, s=128, h=64, width=2)  # spec TP-6 and SP-2, on 4 ranks: 32768 bytes
MODEL = ModelSpec(layers=1, hidden=64, heads=8, kv_heads=2, ffn=96, vocab=61)


def world_of(rank, ranks):
    return World(Mesh.of(Layout(tp=ranks)), rank, Ledger()) if ranks > 1 else World.single()


def summed(transfers):
    """(bytes sent, received, calls) by (phase, primitive)."""
    table: dict[tuple[str, str], tuple[int, ...]] = {}
    for t in transfers:
        row = table.get((t.phase, t.op), (0, 0, 0))
        table[t.phase, t.op] = tuple(map(sum, zip(row, (t.sent, t.received, t.calls), strict=True)))
    return table


# One linear layer, five ways (spec TP-1, TP-3, TP-4)

B, S, IN, OUT = 2, 3, 24, 48  # every number of ranks cuts what it must
ARRANGEMENTS = {  # the dims of the weights (out, in) that are cut, and the weights' shapes
    "column": ([0], [(OUT, IN)]),
    "column, gathered": ([0], [(OUT, IN)]),
    "row": ([1], [(OUT, IN)]),
    "row, split": ([1], [(OUT, IN)]),
    "pair": ([0, 1], [(OUT, IN), (IN, OUT)]),
}


@pytest.mark.parametrize("t", RANKS)
def test_a_linear_layer_sends_what_tp_4_says(t):
    """(forward, backward) bytes per rank, one direction, for X and Y of |X| and |Y| bytes; row's is no all-gather (E15)."""
    x, y, share = B * S * IN * 8, B * S * OUT * 8, (t - 1) / t
    table = {
        "column": (0, 2 * share * x),
        "column, gathered": (share * y, 2 * share * x),
        "row": (2 * share * y, 0),
        "row, split": (2 * share * y, share * x),
        "pair": (2 * share * y, 2 * share * x),
    }
    for kind, wanted in table.items():
        for rank in range(t):
            transfers = list(cost.linear_transfers(kind, B * S * IN, B * S * OUT, t, rank, width=8))
            for column in ("sent", "received"):
                by_phase = Counter(forward=0, backward=0)
                for transfer in transfers:
                    by_phase[transfer.phase] += getattr(transfer, column)
                assert (by_phase["forward"], by_phase["backward"]) == wanted


@pytest.mark.parametrize("t", RANKS)
def test_linear_layers_compute_what_one_process_computes_and_send_as_planned(pool, t):
    """Y, and the gradients of X, of every shard and of the bias, which counts once; equal ledgers in all arrangements."""
    by_rank = pool.run(all_arranged, t)
    for kind, (dims, shapes) in ARRANGEMENTS.items():
        x, weights, bias, seed = given(shapes)
        y = F.linear(x, weights[0], bias if len(weights) == 1 else None)
        if kind == "pair":
            y = F.linear(F.gelu(y), weights[1], bias)
        y.backward(seed)
        whole = [y, x.grad, bias.grad, *(weight.grad for weight in weights)]
        cuts = [
            -1 if kind == "column" else None,
            -1 if kind == "row" else None,
            0 if kind.startswith("column") else None,
            *dims,
        ]
        for rank, found in enumerate(by_rank):
            *tensors, transfers = found[kind]
            for tensor, wanted, dim in zip(tensors, whole, cuts, strict=True):
                wanted = wanted if dim is None else wanted.chunk(t, dim)[rank]
                assert relative(tensor, wanted.detach().numpy()) < 1e-14
            outputs = B * S * shapes[-1][0]
            assert summed(transfers) == summed(cost.linear_transfers(kind, B * S * IN, outputs, t, rank, width=8))


def given(shapes):
    """X, whole weights, the last one's bias, and the gradient of Y; float64."""
    random = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(size, generator=random, dtype=torch.float64)
        for size in ((B, S, IN), *shapes, shapes[-1][:1], (B, S, shapes[-1][0]))
    ]
    x, *weights, bias, seed = tensors
    for tensor in (x, *weights, bias):
        tensor.requires_grad_()
    return x, weights, bias, seed


def all_arranged(rank, world):
    here = world_of(rank, world)
    found = {kind: arranged(kind, here.group("tp")) for kind in ARRANGEMENTS}
    here.close()
    return found


def arranged(kind, group):
    """Y, the gradients of X, of bias and weights on this rank, and what it sent."""
    rank, world, ledger = group.index, group.size, group.ledger
    ledger.clear()
    dims, shapes = ARRANGEMENTS[kind]
    x, weights, bias, seed = given(shapes)
    layers = []
    for dim, weight in zip(dims, weights, strict=True):
        part = nn.Parameter(weight.detach().chunk(world, dim)[rank])
        outputs, inputs = part.shape
        layer = (RowLinear if dim else ColumnLinear)(inputs, outputs, weight is weights[-1], group)
        layer.weight = part
        if layer.bias is not None:
            layer.bias = nn.Parameter(bias.detach() if dim else bias.detach().chunk(world)[rank])
        layers.append(layer)
    with torch.no_grad():
        x = x.chunk(world, -1)[rank].clone() if kind == "row" else x
        seed = seed.chunk(world, -1)[rank] if kind == "column" else seed
    x.requires_grad_()
    with ledger.at(phase="forward"):
        y = conjugate.split_all_gather(x, group, dim=-1) if kind == "row, split" else x
        for layer in layers:
            y = layer(y if layer is layers[0] else F.gelu(y))
        y = conjugate.all_gather_split(y, group, dim=-1) if kind == "column, gathered" else y
    y.backward(seed)
    return y.detach(), x.grad, layers[-1].bias.grad, *(layer.weight.grad for layer in layers), ledger.transfers()


# One block (spec TP-6, SP-2)


@pytest.mark.parametrize(
    ("axis", "forward", "backward"),
    [
        ({}, {"all_reduce": (98304, 2)}, {"all_reduce": (98304, 2)}),
        (
            {"sequence": True},
            {"all_gather": (49152, 2), "reduce_scatter": (49152, 2)},
            {"all_gather": (49152, 2), "reduce_scatter": (49152, 2)},
        ),
        (
            {"sequence": True, "regather": True},
            {"all_gather": (49152, 2), "reduce_scatter": (49152, 2)},
            {"all_gather": (98304, 4), "reduce_scatter": (49152, 2)},
        ),
    ],
    ids=["tp", "sp", "sp, regather"],
)
@pytest.mark.parametrize("ffn", [96, 192])
def test_a_block_sends_the_goldens_whatever_its_mlp(pool, axis, forward, backward, ffn):
    """|X| = 32768: an all-reduce sends 49152, its halves 24576 each; 98304 forward, 196608 with backward, 49152 regather.

    Attention and MLP alike have an all-gather before and a reduce-scatter after them, not the MLP's output alone (E39).
    """
    golden = {
        (phase, op): row for phase, rows in (("forward", forward), ("backward", backward)) for op, row in rows.items()
    }
    found = pool.run(block_transfers, 4, replace(MODEL, ffn=ffn), GOLDEN, axis)
    for rank, transfers in enumerate(found):
        planned = list(cost.block_transfers(GOLDEN, Axis(4, rank, **axis), layer=0, micro_batch=0))
        for side in (planned, transfers):
            assert {key: (sent, calls) for key, (sent, _, calls) in summed(side).items()} == golden
            assert {key: received for key, (_, received, _) in summed(side).items()} == {
                key: sent for key, (sent, _) in golden.items()
            }


def block_transfers(rank, world, model, shape, axis):
    """What the ledger saw of a block in bfloat16, forward and backward."""
    here = world_of(rank, world)
    layers = TensorLayers(model, here.group("tp"), **axis)
    block = Block(model, layers).bfloat16()
    x = torch.zeros(shape.b, shape.s // (world if layers.sequence else 1), shape.h, dtype=torch.bfloat16)
    with here.ledger.at(phase="forward", layer=0, micro_batch=0):
        y = block(x.requires_grad_(), None, None, None)
    y.sum().backward()
    transfers = here.ledger.transfers()
    here.close()
    assert {(transfer.layer, transfer.micro_batch) for transfer in transfers} == {(0, 0)}
    return transfers


@pytest.mark.parametrize("t", [2, 3, 5, 8])
@pytest.mark.parametrize("b, s, h", [(1, 40, 6), (3, 7, 11)])
def test_bytes_of_all_ranks_of_a_block(t, b, s, h):
    """Also where nothing divides: 8 (t - 1) b s h over all ranks, the same in halves, and 2 (t - 1) b s h to regather."""
    bytes_of_x = b * s * h * 4

    def sent(**axis):
        return sum(
            transfer.sent
            for rank in range(t)
            for transfer in cost.block_transfers(Shape(b, s, h, 4), Axis(t, rank, **axis), 0, 0)
        )

    assert sent() == 8 * (t - 1) * bytes_of_x
    assert sent(sequence=True) == sent()
    assert sent(sequence=True, regather=True) == 10 * (t - 1) * bytes_of_x


def test_a_group_of_one_is_silent():
    assert list(cost.micro_batch_transfers(GOLDEN, Axis(1, 0, sequence=True), MODEL, 0)) == []
    assert list(cost.norm_transfers(1, 0)) == []
    assert [list(cost.linear_transfers(kind, 8, 8, 1, 0, 8)) for kind in ARRANGEMENTS] == [[]] * 5


# The vocabulary (spec TP-7)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("t", [3, 8])
def test_the_loss_sends_three_numbers_per_token_whatever_the_vocabulary(sequence, t):
    """Over all ranks exactly; what a rank sends differs by an element per call, as chunks of tokens divide or not."""
    b, s = 2, 4096
    ring, calls = 2 * (t - 1), Counter()
    for vocabulary in (300, 50_257, 128_256, 10_000_000):
        scalars, hidden = Counter(), Counter()
        for rank in range(t):
            for transfer in cost.head_transfers(Shape(b, s, h=48, width=2), Axis(t, rank, sequence), vocabulary, 0):
                of_loss = (transfer.phase, transfer.op) == ("forward", "all_reduce")
                (scalars if of_loss else hidden)[transfer.phase] += transfer.sent
                calls[vocabulary] += transfer.calls
        assert scalars == {"forward": ring * 3 * b * s * 4}
        moved = ring * b * s * 48 * 2
        assert hidden == ({"forward": moved // 2, "backward": moved // 2} if sequence else {"backward": moved})
    assert calls[300] < calls[128_256], "a larger vocabulary goes in more chunks"


def test_the_loss_that_runs_sends_the_same_for_every_vocabulary(pool, t=4):
    """1200 tokens in one, two or three chunks; no logits travel: 1000 of each token would be 9.6 MB."""
    shape = Shape(b=2, s=600, h=8, width=8)
    tables = {vocabulary: pool.run(loss_transfers, t, vocabulary, shape) for vocabulary in (61, 16_000, 33_000)}
    for vocabulary, by_rank in tables.items():
        for rank, transfers in enumerate(by_rank):
            planned = summed(cost.head_transfers(shape, Axis(t, rank), vocabulary, 0))
            assert summed(transfers)["forward", "all_reduce"] == planned["forward", "all_reduce"]
    found = {vocabulary: summed(by_rank[0])["forward", "all_reduce"] for vocabulary, by_rank in tables.items()}
    assert {row[:2] for row in found.values()} == {(2 * 3 * 1200 * 8 * 3 // 4,) * 2}
    assert [row[2] for row in found.values()] == [2, 4, 6]


def loss_transfers(rank, world, vocabulary, shape):
    here = world_of(rank, world)
    rows = -(-vocabulary // world)
    hidden = torch.zeros(shape.b, shape.s, shape.h, dtype=torch.float64)
    weight = torch.zeros(rows, shape.h, dtype=torch.float64)
    first = rank * rows
    with here.ledger.at(phase="forward"), torch.no_grad():
        targets = torch.zeros(shape.b, shape.s, dtype=torch.int64)
        head_loss(hidden, weight, targets, here.group("tp"), first, min(rows, vocabulary - first))
    transfers = here.ledger.transfers()
    here.close()
    return transfers


@pytest.mark.parametrize(("sequence", "forward", "backward"), [(False, 2, 0), (True, 1, 1)])
def test_the_embedding_sends_one_sum(sequence, forward, backward):
    """(t - 1)/t |X| once or twice; its all-reduce has nothing to do in backward."""
    transfers = list(cost.embedding_transfers(GOLDEN, Axis(4, 2, sequence), 0))
    sent = Counter({transfer.phase: transfer.sent for transfer in transfers})
    assert (sent["forward"], sent["backward"]) == (forward * 24576, backward * 24576)


@pytest.mark.parametrize("card", [TENSOR_CARD, SEQUENCE_CARD])
def test_cards_fill_in_every_fact(card):
    assert isinstance(card, Card) and all(vars(card).values())
    assert set(card.cures) <= {"compute", "memory"}
    assert hasattr(Layout(), card.key)
