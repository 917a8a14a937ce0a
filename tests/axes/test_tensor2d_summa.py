"""SUMMA against one process: results, both gradients, bytes, and how little is ever there at once."""

import time
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.axes.tensor2d import cost
from shoal.axes.tensor2d.summa import SummaLinear
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.kernels.linear import PutOff
from shoal.mesh import Mesh
from shoal.transfer import Transfer

SIZES = [  # side, sequences, tokens, inputs, outputs
    (1, 3, 2, 5, 4),
    (2, 4, 3, 6, 10),
    (2, 2, 5, 8, 2),
    (3, 3, 4, 6, 9),
    (3, 6, 1, 12, 3),
]


def grid(rank, world):
    """This rank's row, column and side of a square of `world` ranks."""
    side = round(world**0.5)
    here = World(Mesh({"tp": world, "grid": side}, ("tp",)), rank, Ledger())
    return here.group("row"), here.group("column"), side


def given(b, s, inputs, outputs):
    random = np.random.default_rng(0)
    shapes = {"x": (b, s, inputs), "weight": (outputs, inputs), "bias": (outputs,), "dy": (b, s, outputs)}
    return {name: torch.from_numpy(random.normal(size=shape)) for name, shape in shapes.items()}


def block(tensor, row, column, side):
    """Block (row, column) of a tensor along its first and its last dim."""
    return tensor.chunk(side, 0)[row].chunk(side, -1)[column].clone()


def own_layer(whole, row, column, side, bias=True):
    i, j = column.index, row.index
    weight = block(whole["weight"], j, i, side)
    layer = SummaLinear(weight.shape[1], weight.shape[0], bias, row, column).double()
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias:
            layer.bias.copy_(whole["bias"].chunk(side)[j])
    return layer, block(whole["x"], i, j, side).requires_grad_(), block(whole["dy"], i, j, side)


def one_layer(rank, world, sizes, put_off):
    """This rank's output, the gradients of its x, weight and bias, and its ledger."""
    row, column, side = grid(rank, world)
    layer, x, dy = own_layer(given(*sizes), row, column, side)
    queue = PutOff() if put_off else None
    layer.put_off = queue
    ledger = row.ledger
    with ledger.at(phase="forward", layer=3, micro_batch=1):
        y = layer(x)
    with ledger.at(phase="backward", layer=8, micro_batch=7):  # where the engine is, not where forward was
        y.backward(dy)
    if queue is not None:
        assert layer.weight.grad is None and layer.bias.grad is None and len(queue) == 2
        assert ledger.total(phase="backward", axis="row").calls == side * (side > 1), "only dX has moved"
        queue.run()
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad, ledger.transfers()


@pytest.mark.parametrize("put_off", [False, True])
@pytest.mark.parametrize(("side", "b", "s", "inputs", "outputs"), SIZES)
def test_result_gradients_and_bytes(pool, side, b, s, inputs, outputs, put_off):
    """Of every rank, in float64, against torch's own linear layer; transfers as cost.py says, at their places."""
    whole = given(b, s, inputs, outputs)
    x, weight, bias = (whole[name].requires_grad_() for name in ("x", "weight", "bias"))
    y = F.linear(x, weight, bias)
    y.backward(whole["dy"])
    ranks = pool.run(one_layer, side**2, (b, s, inputs, outputs), put_off)
    total_bias = [torch.zeros(outputs // side, dtype=torch.float64) for _ in range(side)]
    for rank, (y_ij, d_x, d_weight, d_bias, transfers) in enumerate(ranks):
        i, j = divmod(rank, side)
        np.testing.assert_allclose(y_ij, block(y.detach(), i, j, side), rtol=0, atol=1e-13)
        np.testing.assert_allclose(d_x, block(x.grad, i, j, side), rtol=0, atol=1e-13)
        np.testing.assert_allclose(d_weight, block(weight.grad, j, i, side), rtol=0, atol=1e-13)
        total_bias[j] += torch.from_numpy(d_bias)
        here = cost.Grid(side, i, j, b, s, width=8)
        planned = cost.linear_transfers(here, inputs // side, outputs // side, layer=3, micro_batch=1)
        assert summed(transfers) == summed(planned)
    np.testing.assert_allclose(torch.cat(total_bias), bias.grad, rtol=0, atol=1e-12)


def summed(transfers):
    """Bytes sent, received and calls by place, axis and primitive; only those that moved something."""
    totals: dict[tuple, list[int]] = {}
    for t in transfers:
        row = totals.setdefault((t.phase, t.layer, t.micro_batch, t.axis, t.op), [0, 0, 0])
        row[:] = [row[0] + t.sent, row[1] + t.received, row[2] + t.calls]
    return totals


def test_bytes_of_the_spec(pool):
    """q = 2, 8 x 8 times 8 x 8: 32 elements per rank and direction forward, 96 with backward (2D-2)."""
    for *_, transfers in pool.run(one_layer, 4, (8, 1, 8, 8), False):
        for phase, elements in (("forward", 32), ("backward", 64)):
            rows = [t for t in transfers if t.phase == phase]
            assert sum(t.sent for t in rows) == sum(t.received for t in rows) == elements * 8


@pytest.mark.parametrize("side", [2, 3, 4, 7])
def test_the_closed_form(side):
    """(q - 1) / q^2 (|X| + |W|) forward, twice that backward, sent and received alike, on every rank."""
    b, s, inputs, outputs, width = 2 * side, 5, 3 * side, 4 * side, 2
    x, weight = b * s * inputs * width, inputs * outputs * width
    for rank in range(side**2):
        here = cost.Grid(side, *divmod(rank, side), b, s, width)
        rows = list(cost.linear_transfers(here, inputs // side, outputs // side))
        for phase, times in (("forward", 1), ("backward", 2)):
            moved = times * (side - 1) * (x + weight) // side**2
            assert sum(t.sent for t in rows if t.phase == phase) == moved
            assert sum(t.received for t in rows if t.phase == phase) == moved
    assert list(cost.linear_transfers(cost.Grid(1, 0, 0, b, s, width), inputs, outputs)) == []


def test_the_ledger_sees_a_block_that_travels_in_vain(pool):
    """A rank that broadcasts its weight once more than it must is found out by the plan."""
    ranks = pool.run(one_layer, 4, (4, 3, 6, 10), False)
    for rank, (*_, transfers) in enumerate(ranks):
        here = cost.Grid(2, *divmod(rank, 2), 4, 3, width=8)
        planned = [*cost.linear_transfers(here, 3, 5, layer=3, micro_batch=1)]
        extra = Transfer("forward", "column", "broadcast", 3 * 5 * 8, 0, 1, 3, 1)
        assert summed([*transfers, extra]) != summed(planned) == summed(transfers)


class Alive(TorchDispatchMode):
    """The most storages, by size in bytes, that operations made and that were there at once; `given` ones do not count.

    gloo's own threads let go of a message's tensor a moment after it has arrived, so a new high is looked at again.
    """

    def __init__(self, *given):
        super().__init__()
        self.most: dict[int, int] = {}
        self._given = {tensor.untyped_storage()._cdata for tensor in given}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._given:
                self._made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        for _ in range(100):
            counts = Counter(size for storage, size in self._made.values() if not storage.expired())
            if all(count <= self.most.get(size, 1) for size, count in counts.items()):
                break
            time.sleep(0.005)
        for size, count in counts.items():
            self.most[size] = max(self.most.get(size, 0), count)
        return result


def blocks_alive(rank, world, hoard):
    """Most storages of the sizes of an X, W and Y block that forward and backward have at once."""
    row, column, side = grid(rank, world)
    layer, x, dy = own_layer(given(3 * side, 7, 5 * side, 11 * side), row, column, side, bias=False)
    sizes = [tensor.nbytes for tensor in (x, layer.weight, dy)]
    assert len(set(sizes)) == 3
    held = []
    if hoard:  # a layer that keeps what arrives
        layer.register_forward_hook(lambda layer, args, y: held.extend(torch.zeros_like(x) for _ in range(side)))
    answers = []
    with Alive(x, layer.weight, dy) as forward:
        y = layer(x)
    answers.append([forward.most.get(size, 0) for size in sizes])
    with Alive(x, layer.weight, dy, y) as backward:
        y.backward(dy)
    answers.append([backward.most.get(size, 0) for size in sizes])
    return answers


@pytest.mark.parametrize("side", [2, 3])
def test_never_more_than_one_extra_block_of_each(pool, side):
    """Forward: one X, one W, and Y with the product that is added to it. Backward: results, and one more of each."""
    for forward, backward in pool.run(blocks_alive, side**2, False):
        assert forward == [1, 1, 2]
        assert backward[0] == 2 and backward[1] <= 2 and backward[2] == 0
    assert any(forward[0] > 1 for forward, _ in pool.run(blocks_alive, side**2, True)), "the counting would show it"
