"""Conjugate operators against autograd in one process, in float64, and the places of their transfers in the ledger."""

import numpy as np
import pytest
import torch

from shoal.comm import conjugate as pair
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.mesh import Mesh
from shoal.transfer import Transfer

SIZES = (3, 1, 0, 2, 4, 1, 2, 3)  # each rank's length along the cut dim
WORLDS = (1, 2, 3, 5)
NAMES = {  # the operator: primitives of forward and backward in the ledger
    "identity_all_reduce": (None, "all_reduce"),
    "all_reduce_identity": ("all_reduce", None),
    "all_gather_reduce_scatter": ("all_gather", "reduce_scatter"),
    "reduce_scatter_all_gather": ("reduce_scatter", "all_gather"),
    "all_gather_split": ("all_gather", None),
    "split_all_gather": (None, "all_gather"),
    "all_to_all": ("all_to_all", "all_to_all"),
    "broadcast_reduce": ("broadcast", "reduce"),
    "reduce_broadcast": ("reduce", "broadcast"),
    "scatter_gather": ("scatter", "gather"),
    "gather_scatter": ("gather", "scatter"),
}


def random(*key, shape):
    return torch.from_numpy(np.random.default_rng(key).normal(size=shape))


def matrix(world):
    """Rows that rank i sends to rank j in the all-to-all."""
    return [[SIZES[(i + 2 * j) % len(SIZES)] for j in range(world)] for i in range(world)]


def inputs(name, world, dim):
    """Every rank's input; the same tensor object where the operator's input is the same on all ranks."""
    sizes, total = SIZES[:world], sum(SIZES[:world])

    def shape(length):
        return (length, 2) if dim == 0 else (2, length)

    if name in ("identity_all_reduce", "split_all_gather"):
        return [random(1, shape=shape(total)).requires_grad_()] * world
    lengths = [total] * world
    if name.startswith(("all_gather", "gather")):
        lengths = list(sizes)
    elif name == "all_to_all":
        lengths = [sum(row) for row in matrix(world)]
    elif name == "scatter_gather":
        lengths = [total if rank == world - 1 else 0 for rank in range(world)]
    return [random(2, rank, shape=shape(length)).requires_grad_() for rank, length in enumerate(lengths)]


def by_one_process(name, xs, dim):
    """Every rank's output from every rank's input; one tensor object where the output is the same on all ranks."""
    world, root = len(xs), len(xs) - 1
    sizes = list(SIZES[:world])
    if name == "identity_all_reduce":
        return list(xs)
    if name in ("all_reduce_identity", "reduce_broadcast"):
        total = sum(xs)
        if name == "all_reduce_identity":
            return [total] * world
        return [total if rank == root else torch.zeros_like(total) for rank in range(world)]
    if name.startswith("all_gather"):
        return [torch.cat(xs, dim)] * world
    if name == "reduce_scatter_all_gather":
        return list(sum(xs).split(sizes, dim))
    if name == "split_all_gather":
        return list(xs[0].split(sizes, dim))
    if name == "all_to_all":
        rows = matrix(world)
        parts = [x.split(row) for x, row in zip(xs, rows, strict=True)]
        return [torch.cat([parts[source][rank] for source in range(world)]) for rank in range(world)]
    if name == "broadcast_reduce":
        return [xs[root]] * world
    if name == "scatter_gather":
        return list(xs[root].split(sizes, dim))
    joined = torch.cat(xs, dim)
    return [joined if rank == root else joined.narrow(dim, 0, 0) for rank in range(world)]


def apply(name, x, group, dim):
    world, root = group.size, group.size - 1
    sizes, operator = list(SIZES[:world]), getattr(pair, name)
    if name in ("identity_all_reduce", "all_reduce_identity"):
        return operator(x, group)
    if name in ("broadcast_reduce", "reduce_broadcast"):
        return operator(x, group, root)
    if name == "all_to_all":
        rows = matrix(world)
        return operator(x, group, rows[group.index], [row[group.index] for row in rows])
    if name == "scatter_gather":
        return operator(x, group, root, sizes, dim)
    return operator(x, group, root, dim, sizes) if name == "gather_scatter" else operator(x, group, dim, sizes)


def same_afterwards(name):
    """Whether what follows the operator is the same on every rank, so that the loss is counted once."""
    return name in ("all_reduce_identity", "all_gather_split")


def weights(name, outputs):
    """The loss is the sum over the ranks of <output, weights>."""
    return [random(3, 0 if same_afterwards(name) else rank, shape=y.shape) for rank, y in enumerate(outputs)]


def dims(name):
    return (0, 1) if "gather" in name or "split" in name else (0,)


def every_operator(rank, world):
    """Per operator and dim: this rank's output, its input's gradient, and its ledger."""
    answers = {}
    for name in NAMES:
        for dim in dims(name):
            ledger = Ledger()
            group = World(Mesh({"tp": world}, ("tp",)), rank, ledger).group("tp")
            xs = inputs(name, world, dim)
            c = weights(name, by_one_process(name, xs, dim))[rank]
            x = xs[rank].detach().requires_grad_()
            before = x.detach().clone()
            with ledger.at(phase="forward", layer=4, micro_batch=1):
                y = apply(name, x, group, dim)
            with ledger.at(phase="backward", layer=9, micro_batch=8):  # where the engine is, not where forward was
                (y * c).sum().backward()
            assert torch.equal(x.detach(), before), "an operator must not change its input"
            answers[name, dim] = (y, x.grad, ledger.transfers())
    return answers


@pytest.mark.parametrize("world", WORLDS)
def test_outputs_and_gradients_are_those_of_one_process(pool, world):
    ranks = pool.run(every_operator, world)
    for name in NAMES:
        for dim in dims(name):
            xs = inputs(name, world, dim)
            ys = by_one_process(name, xs, dim)
            terms = [(y * c).sum() for y, c in zip(ys, weights(name, ys), strict=True)]
            (terms[0] if same_afterwards(name) else sum(terms)).backward()
            for rank in range(world):
                y, gradient, _ = ranks[rank][name, dim]
                np.testing.assert_allclose(y, ys[rank].detach(), rtol=0, atol=1e-13, err_msg=f"{name} output")
                truth = torch.zeros_like(xs[rank]) if xs[rank].grad is None else xs[rank].grad
                np.testing.assert_allclose(gradient, truth, rtol=0, atol=1e-13, err_msg=f"{name} gradient")


def test_backward_is_recorded_where_forward_ran(pool):
    ranks = pool.run(every_operator, 3)
    for name, dim in ranks[0]:
        forward, backward = NAMES[name]
        places = {("forward", forward, 4, 1), ("backward", backward, 4, 1)}
        rows = [row for answers in ranks for row in answers[name, dim][2]]
        assert sum(row.sent for row in rows) == sum(row.received for row in rows) > 0, name
        for answers in ranks:
            found = {(row.phase, row.op, row.layer, row.micro_batch) for row in answers[name, dim][2]}
            assert found == {place for place in places if place[1]}, name
        assert all(row.calls == 1 and row.axis == "tp" for row in rows)
    # by hand: 3 ranks, rows of 2 float64, pieces of 3, 1 and 0 rows; all 4 rows are 64 bytes
    by_rank = [answers["all_gather_reduce_scatter", 0][2] for answers in ranks]
    assert by_rank[0] == [
        Transfer("forward", "tp", "all_gather", 64 - 16, 64 - 48, 1, 4, 1),
        Transfer("backward", "tp", "reduce_scatter", 64 - 48, 64 - 0, 1, 4, 1),
    ]


def test_a_group_of_one_returns_its_input():
    group = World.single().group("tp")
    x = torch.ones(3, 2, requires_grad=True)
    for name in NAMES:
        if name == "all_to_all":
            assert pair.all_to_all(x, group) is x
        elif name == "scatter_gather":
            assert pair.scatter_gather(x, group, 0, [3]) is x
        elif name in ("broadcast_reduce", "reduce_broadcast", "gather_scatter"):
            assert getattr(pair, name)(x, group, 0) is x
        else:
            assert getattr(pair, name)(x, group) is x
    assert group.ledger.transfers() == []


def mlp(rank, world, sequence):
    """Column then row: tanh(x A) B with A and B cut over the ranks; with `sequence` x and the result are cut too."""
    group = World(Mesh({"tp": world}, ("tp",)), rank, Ledger()).group("tp")
    x, a, b, c = mlp_tensors(world)
    mine = slice(4 * rank, 4 * rank + 4)
    a, b = a[:, mine].clone().requires_grad_(), b[mine].clone().requires_grad_()
    if sequence:
        x = x[2 * rank : 2 * rank + 2].clone().requires_grad_()
        c = c[2 * rank : 2 * rank + 2]
        enter, leave = pair.all_gather_reduce_scatter, pair.reduce_scatter_all_gather
    else:
        x.requires_grad_()
        enter, leave = pair.identity_all_reduce, pair.all_reduce_identity
    y = leave(torch.tanh(enter(x, group) @ a) @ b, group)
    (y * c).sum().backward()
    return y, x.grad, a.grad, b.grad


def mlp_tensors(world):
    return (
        random(5, shape=(2 * world, 6)),
        random(6, shape=(6, 4 * world)),
        random(7, shape=(4 * world, 6)),
        random(8, shape=(2 * world, 6)),
    )


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_cut_mlp_has_the_whole_one_s_gradients(pool, world, sequence):
    x, a, b, c = (tensor.requires_grad_() for tensor in mlp_tensors(world))
    y = torch.tanh(x @ a) @ b
    (y * c).sum().backward()
    for rank, (y_rank, dx, da, db) in enumerate(pool.run(mlp, world, sequence)):
        rows = slice(2 * rank, 2 * rank + 2) if sequence else slice(None)
        mine = slice(4 * rank, 4 * rank + 4)
        np.testing.assert_allclose(y_rank, y.detach()[rows], atol=1e-12)
        np.testing.assert_allclose(dx, x.grad[rows], atol=1e-12)
        np.testing.assert_allclose(da, a.grad[:, mine], atol=1e-12)
        np.testing.assert_allclose(db, b.grad[mine], atol=1e-12)


def relay(rank, world):
    """y = 3 (2 x): x on rank 0, doubled there, sent to rank 1, trebled there; gradients come back the same way."""
    ledger = Ledger()
    group = World(Mesh({"pp": world}, ("pp",)), rank, ledger).group("pp")
    with ledger.at(phase="forward", micro_batch=2):
        if rank == 0:
            x = torch.arange(3.0, dtype=torch.float64, requires_grad=True)
            pair.send(2 * x, group, 1).backward()
            return x.grad, ledger.transfers()
        arrived = pair.receive((3,), torch.float64, group, 0)
        arrived.retain_grad()
        (3 * arrived).sum().backward()
        return arrived, ledger.transfers()


def test_send_and_receive_carry_activations_and_gradients(pool):
    (gradient, first), (arrived, second) = pool.run(relay, 2)
    np.testing.assert_array_equal(arrived, [0, 2, 4])
    np.testing.assert_array_equal(gradient, [6, 6, 6])
    assert first == [
        Transfer("forward", "pp", "send", 24, 0, 1, None, 2),
        Transfer("backward", "pp", "receive", 0, 24, 1, None, 2),
    ]
    assert second == [
        Transfer("forward", "pp", "receive", 0, 24, 1, None, 2),
        Transfer("backward", "pp", "send", 24, 0, 1, None, 2),
    ]
