"""Weight gradients put off: input and weight gradients as two operations, the same numbers, nothing kept too long."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.axes.tensor.run import ColumnLinear, RowLinear
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.kernels.linear import Linear, PutOff
from shoal.mesh import Mesh
from shoal.spec.layout import Layout

SMALL, LARGE = (3, 5, 8, 6), (4, 130, 96, 250)  # b, s, in, out: below and above the size where kernels change


class Two(nn.Module):
    """y = W2 tanh(W1 x + b1): spec BG-4."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def two(sizes, dtype=torch.float64, bias=True):
    torch.manual_seed(0)
    b, s, i, o = sizes
    model = Two(Linear(i, o, bias=bias), Linear(o, i, bias=False)).to(dtype)
    return model, torch.randn(b, s, i, dtype=dtype)


def put_off(model, queue):
    for module in model.modules():
        if hasattr(module, "put_off"):
            module.put_off = queue


def at_once(model, *inputs):
    """(gradients of the inputs, of the parameters) by one backward per input."""
    put_off(model, None)
    model.zero_grad()
    found = [backward(model, x) for x in inputs]
    return found, gradients(model)


def backward(model, x):
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    return x.grad


def gradients(model):
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
def test_the_two_halves_are_the_whole(sizes, dtype, bias):
    """Backward alone makes the inputs' gradients, the queue the parameters', both to the bit; a second run adds nothing."""
    model, x = two(sizes, dtype, bias)
    whole = at_once(model, x)
    queue = PutOff()
    put_off(model, queue)
    model.zero_grad()
    d_x = backward(model, x)
    assert equal([d_x], whole[0]) and gradients(model) == [None] * len(whole[1])
    assert len(queue) == len(whole[1])
    queue.run()
    assert equal(gradients(model), whole[1]) and len(queue) == 0
    queue.run()
    assert equal(gradients(model), whole[1])


def test_finite_differences_of_both_halves():
    """Spec BG-4 (c): d loss / d W and d loss / d x of every layer, by central differences."""
    model, x = two((2, 3, 4, 5))
    queue = PutOff()
    put_off(model, queue)
    d_x = backward(model, x)
    queue.run()
    found = [*zip(model.parameters(), gradients(model), strict=True), (x, d_x)]
    for tensor, gradient in found:
        flat = tensor.data.view(-1)
        for place in range(len(flat)):
            kept, losses = flat[place].item(), []
            for step in (1e-6, -1e-6):
                flat[place] = kept + step
                losses.append(model(x).square().sum().item())
            flat[place] = kept
            assert abs((losses[0] - losses[1]) / 2e-6 - gradient.view(-1)[place].item()) < 1e-6


def test_micro_batches_are_told_apart_and_add_up():
    """A queue taken after each backward has that micro-batch's gradients; their order does not matter to the sum."""
    model, x = two(SMALL)
    whole = at_once(model, x, -2 * x)
    queue = PutOff()
    put_off(model, queue)
    model.zero_grad()
    taken = []
    for part in (x, -2 * x):
        backward(model, part)
        taken.append(queue.take())
        assert len(queue) == 0
    taken[1].run()
    assert equal(gradients(model), at_once_of(model, -2 * x))
    taken[0].run()
    for mine, wanted in zip(gradients(model), whole[1], strict=True):
        assert (mine - wanted).norm() < 1e-12 * wanted.norm()


def at_once_of(model, x):
    """Gradients of the parameters for x alone, leaving those of the model as they are."""
    other = Two(Linear(*SMALL[2:]), Linear(*SMALL[:1:-1], bias=False)).double()
    other.load_state_dict(model.state_dict())
    return at_once(other, x)[1]


def test_hooks_see_each_gradient_once():
    """Also where a layer is used twice: data parallelism counts arrivals."""
    layer = Linear(4, 4).double()
    queue, seen = PutOff(), []
    layer.put_off = queue

    def arrived(parameter):
        if parameter.grad is not None:
            seen.append(parameter.grad.clone())

    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(arrived)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    layer(torch.tanh(layer(x))).square().sum().backward()
    assert seen == []
    queue.run()
    put_off(layer, None)
    layer.zero_grad()
    early = list(seen)
    layer(torch.tanh(layer(x))).square().sum().backward()
    for mine, parameter in zip(early, layer.parameters(), strict=True):
        assert torch.allclose(mine, parameter.grad, rtol=1e-12)


def test_what_is_frozen_is_not_put_off():
    model, x = two(SMALL)
    queue = PutOff()
    put_off(model, queue)
    model.first.weight.requires_grad_(False)
    backward(model, x)
    assert len(queue) == 2  # the first bias, the second weight
    queue.run()
    assert model.first.weight.grad is None and model.first.bias.grad is not None


def test_the_graph_is_not_kept():
    """After the input half, only what the weight gradients need is alive: the layers' inputs and output gradients."""
    layer, norm = Linear(64, 64, bias=False), nn.LayerNorm(64)
    queue = PutOff()
    layer.put_off = queue
    x = torch.randn(8, 64).requires_grad_()
    normed = norm(x * 1)
    before, own = StorageWeakRef(x.untyped_storage()), StorageWeakRef(normed.untyped_storage())
    layer(normed).sum().backward()
    del x, normed
    assert before.expired() and not own.expired()
    queue.run()
    assert own.expired()


def test_hooks_on_saved_tensors_lose_no_gradient():
    """Such hooks hand backward other tensors than the parameters, here in a graph that is gone when the queue runs."""
    model, x = two(SMALL)
    whole = at_once(model, x)
    queue = PutOff()
    put_off(model, queue)
    model.zero_grad()
    with saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        y = model(x)
    y.square().sum().backward()
    del y
    queue.run()
    assert equal(gradients(model), whole[1])


def test_a_copy_of_a_parameter_is_refused():
    with pytest.raises(AssertionError, match="parameter itself"):
        PutOff().add(nn.Parameter(torch.zeros(2)).detach(), lambda: torch.zeros(2))


def over_ranks(rank, world, sequence, regather):
    """Gradients of a column and a row layer at once and put off, and the ledger's rows of both."""
    here = World(Mesh.of(Layout(tp=world)), rank, Ledger())
    group = here.group("tp")
    torch.manual_seed(rank)
    model = Two(ColumnLinear(6, 4, True, group, sequence, regather), RowLinear(4, 6, True, group, sequence)).double()
    torch.manual_seed(world + rank if sequence else world)
    x = torch.randn(2, 4 // world if sequence else 4, 6, dtype=torch.float64)
    whole = at_once(model, x)
    rows = here.ledger.transfers()
    here.ledger.clear()
    queue = PutOff()
    put_off(model, queue)
    model.zero_grad()
    d_x = backward(model, x)
    waiting = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    queue.run()
    same = equal([d_x], whole[0]) and equal(gradients(model), whole[1]) and rows == here.ledger.transfers()
    here.close()
    return same, waiting


@pytest.mark.parametrize(("sequence", "regather"), [(False, False), (True, False), (True, True)])
def test_column_and_row_layers_put_off_too(pool, sequence, regather):
    """With the same collectives; the row layer's bias, which is added after the sum, does not wait."""
    for same, waiting in pool.run(over_ranks, 2, sequence, regather):
        assert same and waiting == ["first.weight", "first.bias", "second.weight"]
