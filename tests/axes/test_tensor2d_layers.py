"""Norms, embedding and head on a grid against plain torch on one process: results, gradients, bytes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shoal.axes.tensor import cost as tensor_cost
from shoal.axes.tensor2d import cost
from shoal.axes.tensor2d.cut import piece
from shoal.axes.tensor2d.loss import grid_head_loss
from shoal.axes.tensor2d.norm import row_norm
from shoal.axes.tensor2d.run import Tensor2DLayers
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.mesh import Mesh
from shoal.spec.inventory import inventory
from shoal.spec.model import ModelSpec

SPEC = ModelSpec(layers=1, hidden=12, heads=6, vocab=61, positions_max=9)
LAYERNORM = replace(SPEC, norm="layernorm", positions="learned", tied=True)
BATCH, SEQUENCE = 6, 4


def layers_of(rank, world, spec):
    here = World(Mesh({"tp": world, "grid": round(world**0.5)}, ("tp",)), rank, Ledger())
    return Tensor2DLayers(spec, here.group("row"), here.group("column"), here.group("tp"))


def whole_parameters(spec, prefix):
    """Made-up values of the parameters that a module `prefix` of the decoder has, by the names it gives them."""
    random = np.random.default_rng(1)
    values = {p: torch.from_numpy(random.normal(size=p.shape)) for p in inventory(spec)}
    return {p: value for p, value in values.items() if p.name.startswith(prefix)}


def take(module, prefix, spec, layers):
    """Fills the module with this rank's pieces."""
    for parameter, value in whole_parameters(spec, prefix).items():
        (kept,) = layers.pieces([parameter])
        with torch.no_grad():
            own = module.get_parameter(parameter.name.removeprefix(prefix + ".")).zero_()
            assert own.shape == kept.shape
            kept.take(value, own)


def assembled(gradients, spec, prefix):
    """The whole gradients of what every rank found: blocks in their place, partial ones added up over the column."""
    side, whole = round(len(gradients) ** 0.5), {}
    for rank, of_rank in enumerate(gradients):
        for parameter in whole_parameters(spec, prefix):
            kept = piece(parameter, side, *divmod(rank, side))
            part = np.zeros(parameter.shape)
            kept.put(of_rank[parameter.name], part)
            assert not of_rank[parameter.name].sum() - part.sum() > 1e-12, "padding has no gradient"
            whole[parameter.name] = whole.get(parameter.name, 0) + part
    return whole


def own_gradients(module, prefix):
    return {f"{prefix}.{name}": p.grad for name, p in module.named_parameters()}


def block(x, layers):
    """This rank's block of x (b, s, h)."""
    side = layers.row_group.size
    return x.chunk(side, 0)[layers.column_group.index].chunk(side, -1)[layers.row_group.index].clone()


def here(rank, side, width=8):
    return cost.Grid(side, *divmod(rank, side), BATCH, SEQUENCE, width)


def summed(transfers):
    """Bytes sent, received and calls by phase, axis and primitive; only those that moved something."""
    totals: dict[tuple, list[int]] = {}
    for t in transfers:
        row = totals.setdefault((t.phase, t.axis, t.op), [0, 0, 0])
        row[:] = [row[0] + t.sent, row[1] + t.received, row[2] + t.calls]
    return totals


def tensors(*shape, count=2, seed=2):
    random = np.random.default_rng(seed)
    return [torch.from_numpy(random.normal(size=shape)) for _ in range(count)]


def plain_norm(x, spec, weight, bias=None):
    if spec.norm == "rmsnorm":
        return F.rms_norm(x, weight.shape, weight, spec.norm_eps)
    return F.layer_norm(x, weight.shape, weight, bias, spec.norm_eps)


def one_norm(rank, world, spec, alone):
    layers = layers_of(rank, world, spec)
    norm = layers.norm().double()
    take(norm, "head.norm", spec, layers)
    if alone:  # statistics of this rank's features only
        norm.row = norm.row.alone()
    x, dy = (block(tensor, layers) for tensor in tensors(BATCH, SEQUENCE, spec.hidden))
    x.requires_grad_()
    with layers.ledger.at(phase="forward"):
        y = norm(x)
    y.backward(dy)
    return y, x.grad, own_gradients(norm, "head.norm"), layers.ledger.transfers()


@pytest.mark.parametrize("side", [1, 2, 3])
@pytest.mark.parametrize("spec", [SPEC, LAYERNORM], ids=["rmsnorm", "layernorm"])
def test_norms_see_all_features(pool, spec, side):
    x, dy = tensors(BATCH, SEQUENCE, spec.hidden)
    weights = [value.requires_grad_() for value in whole_parameters(spec, "head.norm").values()]
    y = plain_norm(x.requires_grad_(), spec, *weights)
    y.backward(dy)
    ranks = pool.run(one_norm, side**2, spec, False)
    for truth, found in ((y.detach(), 0), (x.grad, 1)):
        rows = [np.concatenate([ranks[i * side + j][found] for j in range(side)], -1) for i in range(side)]
        np.testing.assert_allclose(np.concatenate(rows), truth, rtol=0, atol=1e-12)
    gradients = assembled([rank[2] for rank in ranks], spec, "head.norm")
    for parameter, weight in zip(whole_parameters(spec, "head.norm"), weights, strict=True):
        np.testing.assert_allclose(gradients[parameter.name], weight.grad, rtol=0, atol=1e-12)
    for rank, (*_, transfers) in enumerate(ranks):
        assert summed(transfers) == summed(cost.norm_transfers(here(rank, side), spec.norm))
    if side > 1:
        local = pool.run(one_norm, side**2, spec, True)
        assert abs(local[0][0] - ranks[0][0]).max() > 0.01, "a norm over its own features only would be seen"


def far_from_zero(rank, world):
    layers = layers_of(rank, world, replace(LAYERNORM, hidden=600))
    norm = row_norm(layers.spec, layers.row_group)
    (x,) = tensors(BATCH, SEQUENCE, 600, count=1)
    return norm((1000 + block(x, layers)).float())


def test_layernorm_keeps_a_small_variance_far_from_zero(pool):
    """Values of 1000 +- 1 in float32: from sums of squares, near 1e6, hardly a digit of the variance would remain."""
    (x,) = tensors(BATCH, SEQUENCE, 600, count=1)
    truth = F.layer_norm((1000 + x).float().double(), (600,))
    ranks = pool.run(far_from_zero, 4)
    found = np.concatenate([np.concatenate(ranks[2 * i : 2 * i + 2], -1) for i in range(2)])
    assert abs(found - truth.numpy()).max() < 1e-3


def one_embedding(rank, world, spec):
    layers = layers_of(rank, world, spec)
    embedding = layers.embedding().double()
    take(embedding, "embedding", spec, layers)
    tokens, positions = ids(spec)
    (dy,) = tensors(BATCH, SEQUENCE, spec.hidden, count=1)
    with layers.ledger.at(phase="forward"):
        x = embedding(tokens, positions)
    x.backward(block(dy, layers))
    return x, own_gradients(embedding, "embedding"), layers.ledger.transfers()


def ids(spec):
    random = torch.Generator().manual_seed(4)
    tokens = torch.randint(spec.vocab, (BATCH, SEQUENCE), generator=random)
    return tokens, torch.randint(spec.positions_max, (BATCH, SEQUENCE), generator=random)


@pytest.mark.parametrize("side", [1, 2, 3])
@pytest.mark.parametrize("vocab", [61, 12, 4, 2])
def test_embedding(pool, side, vocab):
    """Vocabularies that the grid cuts with padding, and one so small that a column keeps padding alone."""
    spec = replace(LAYERNORM, vocab=vocab)
    tokens, positions = ids(spec)
    weight, places = (value.requires_grad_() for value in whole_parameters(spec, "embedding").values())
    x = F.embedding(tokens, weight) + F.embedding(positions, places)
    (dy,) = tensors(BATCH, SEQUENCE, spec.hidden, count=1)
    x.backward(dy)
    ranks = pool.run(one_embedding, side**2, spec)
    rows = [np.concatenate([ranks[i * side + j][0] for j in range(side)], -1) for i in range(side)]
    np.testing.assert_array_equal(np.concatenate(rows), x.detach())
    gradients = assembled([rank[1] for rank in ranks], spec, "embedding")
    np.testing.assert_allclose(gradients["embedding.weight"], weight.grad, rtol=0, atol=1e-13)
    np.testing.assert_allclose(gradients["embedding.positions"], places.grad, rtol=0, atol=1e-13)
    for rank, (*_, transfers) in enumerate(ranks):
        assert summed(transfers) == summed(cost.embedding_transfers(here(rank, side), spec, 0))


def one_head(rank, world, spec, targets, least, dtype="float64"):
    """This rank's loss, gradients and ledger; `least`: ids whose logits are formed at once."""
    layers = layers_of(rank, world, spec)
    head = layers.head().to(getattr(torch, dtype))
    take(head, "head", spec, layers)
    tied = None
    if spec.tied:
        ((parameter, value),) = whole_parameters(spec, "embedding.weight").items()
        (kept,) = layers.pieces([parameter])
        tied = torch.zeros(kept.shape, dtype=head.norm.weight.dtype)
        kept.take(value, tied)
        tied.requires_grad_()
    x = block(tensors(BATCH, SEQUENCE, spec.hidden)[0], layers).to(head.norm.weight.dtype).requires_grad_()
    before = tensor_cost.LOGITS, tensor_cost.LEAST_ROWS
    tensor_cost.LOGITS, tensor_cost.LEAST_ROWS = 0, least
    try:
        with layers.ledger.at(phase="forward"):
            loss = head(x, tied, targets)
        (loss / 7).backward()
        planned = list(cost.head_transfers(here(rank, round(world**0.5), x.element_size()), spec, 0))
    finally:
        tensor_cost.LOGITS, tensor_cost.LEAST_ROWS = before
    gradients = own_gradients(head, "head")
    if tied is not None:
        gradients["embedding.weight"] = tied.grad
    if dtype != "float64":
        return loss, x.grad.double()
    return loss, x.grad, gradients, summed(layers.ledger.transfers()) == summed(planned)


def plain_head(spec, targets):
    """Loss over 7, and the gradients of x and of every parameter by name."""
    named = {p.name: value.requires_grad_() for p, value in whole_parameters(spec, "").items()}
    x = tensors(BATCH, SEQUENCE, spec.hidden)[0].requires_grad_()
    normed = plain_norm(x, spec, *(value for name, value in named.items() if name.startswith("head.norm")))
    weight = named["embedding.weight" if spec.tied else "head.weight"]
    loss = F.cross_entropy((normed @ weight.t()).flatten(0, 1), targets.flatten(), reduction="sum")
    (loss / 7).backward()
    return float(loss.detach()), x.grad, {name: value.grad for name, value in named.items() if value.grad is not None}


def targets_of(spec, uncounted):
    random = torch.Generator().manual_seed(5)
    targets = torch.randint(spec.vocab, (BATCH, SEQUENCE), generator=random)
    targets[torch.rand(targets.shape, generator=random) < uncounted] = -100
    return targets


@pytest.mark.parametrize("side", [1, 2, 3])
@pytest.mark.parametrize(
    ("vocab", "uncounted", "least"), [(61, 0, 512), (61, 0.4, 3), (4, 0.4, 512), (2, 0, 1), (61, 1, 512)]
)
@pytest.mark.parametrize("spec", [SPEC, LAYERNORM], ids=["untied", "tied"])
def test_head_and_loss(pool, spec, vocab, uncounted, least, side):
    spec = replace(spec, vocab=vocab)
    targets = targets_of(spec, uncounted)
    loss, d_x, truth = plain_head(spec, targets)
    ranks = pool.run(one_head, side**2, spec, targets, least)
    assert [rank[0] for rank in ranks] == [pytest.approx(loss, rel=1e-13)] * side**2
    rows = [np.concatenate([ranks[i * side + j][1] for j in range(side)], -1) for i in range(side)]
    np.testing.assert_allclose(np.concatenate(rows), d_x, rtol=0, atol=1e-13)
    prefixes = ["head", "embedding.weight"] if spec.tied else ["head"]
    for prefix in prefixes:
        for name, gradient in assembled([rank[2] for rank in ranks], spec, prefix).items():
            np.testing.assert_allclose(gradient, truth[name], rtol=0, atol=1e-13, err_msg=name)
    assert all(rank[3] for rank in ranks), "transfers are not as planned"


def test_bfloat16_sums_in_float32(pool):
    spec = replace(SPEC, vocab=61)
    targets = targets_of(spec, 0)
    loss, d_x, _ = plain_head(spec, targets)
    ranks = pool.run(one_head, 4, spec, targets, 7, "bfloat16")
    assert ranks[0][0].dtype == np.float32 and ranks[0][0] == pytest.approx(loss, rel=1e-2)
    assert np.linalg.norm(ranks[0][1] - d_x[:3, :, :6].numpy()) < 0.03 * np.linalg.norm(d_x[:3, :, :6])


def broken_hidden(rank, world, targets, value):
    """Loss and the head weight's gradient where the hidden states of sample 0, which does not count, are `value`."""
    layers = layers_of(rank, world, SPEC)
    (_, weight), *_ = whole_parameters(SPEC, "head.weight").items()
    i, j, side = layers.column_group.index, layers.row_group.index, layers.row_group.size
    weight = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % side)).chunk(side)[j].chunk(side, 1)[i]
    weight = weight.clone().requires_grad_()
    x = tensors(BATCH, SEQUENCE, SPEC.hidden)[0]
    x[0] = value
    head = layers.head()
    loss = grid_head_loss(
        block(x, layers), weight, layers.own_samples(targets), head.row, head.column, head.first, head.real
    )
    loss.backward()
    return loss, weight.grad


def test_an_uncounted_token_leaves_no_trace(pool):
    targets = targets_of(SPEC, 0)
    targets[0] = -100
    ranks = [pool.run(broken_hidden, 4, targets, value) for value in (0.5, float("inf"))]
    for (clean, of_clean), (dirty, of_dirty) in zip(*ranks, strict=True):
        assert clean == dirty and np.isfinite(clean)
        np.testing.assert_array_equal(of_clean, of_dirty)


def logits_of(rank, world, spec):
    """Whole logits, the gradients of x and of the parameters, and the logits of the last tokens alone."""
    layers = layers_of(rank, world, spec)
    head = layers.head().double()
    take(head, "head", spec, layers)
    x = block(tensors(BATCH, SEQUENCE, spec.hidden)[0], layers).requires_grad_()
    logits = head(x, None)
    (logits * tensors(*logits.shape, seed=6, count=1)[0]).sum().backward()
    last = head(x.detach()[:, -1], None)
    return logits, x.grad, own_gradients(head, "head"), last


@pytest.mark.parametrize("side", [1, 2, 3])
def test_logits_are_whole_on_every_rank(pool, side):
    named = {p.name: value.requires_grad_() for p, value in whole_parameters(SPEC, "head").items()}
    x = tensors(BATCH, SEQUENCE, SPEC.hidden)[0].requires_grad_()
    logits = plain_norm(x, SPEC, named["head.norm.weight"]) @ named["head.weight"].t()
    (logits * tensors(*logits.shape, seed=6, count=1)[0]).sum().backward()
    ranks = pool.run(logits_of, side**2, SPEC)
    for found, *_, last in ranks:
        np.testing.assert_allclose(found, logits.detach(), rtol=0, atol=1e-12)
        np.testing.assert_allclose(last, logits.detach()[:, -1], rtol=0, atol=1e-12)
    for name, gradient in assembled([rank[2] for rank in ranks], SPEC, "head").items():
        np.testing.assert_allclose(gradient, named[name].grad, rtol=0, atol=1e-12, err_msg=name)
    rows = [np.concatenate([ranks[i * side + j][1] for j in range(side)], -1) for i in range(side)]
    np.testing.assert_allclose(np.concatenate(rows), x.grad, rtol=0, atol=1e-12)


def an_odd_batch(rank, world):
    layers = layers_of(rank, world, SPEC)
    try:
        layers.own_samples(torch.zeros(5, 3))
    except AssertionError as error:
        return str(error), layers.own_samples(torch.zeros(1, 3)).shape
    return None


def test_a_batch_that_the_grid_does_not_cut_is_refused(pool):
    (said, shape), *_ = pool.run(an_odd_batch, 4)
    assert said == "5 sequences do not divide among the 2 rows of a tensor grid" and shape == (1, 3)
