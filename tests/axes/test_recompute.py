"""Recomputation: bit-equal gradients, what is kept to the byte, and the transfers that a second forward makes."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.axes.recompute.cost import extra_forwards, kept_bytes, mode_of, repeated_transfers
from shoal.axes.recompute.run import recomputed
from shoal.axes.tensor.cost import Axis, Shape, block_transfers
from shoal.axes.tensor.run import TensorLayers
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.kernels.dropout import DropoutKey
from shoal.kernels.linear import PutOff
from shoal.mesh import Mesh
from shoal.model.attention import visible
from shoal.model.block import Block
from shoal.model.rope import rotation
from shoal.spec.layout import Layout
from shoal.spec.model import ModelSpec
from shoal.transfer import Transfer

LLAMA = ModelSpec(layers=1, hidden=32, heads=8, kv_heads=2, ffn=50, vocab=61)
MODELS = {
    "llama": LLAMA,
    "llama, qk_norm, dropout": replace(LLAMA, kv_heads=8, qk_norm=True, dropout=0.2),
    "llama, window": replace(LLAMA, window=5),
    "gpt": ModelSpec(
        layers=1, hidden=32, heads=8, ffn=128, vocab=61, norm="layernorm", positions="learned", mlp="gelu",
        qkv_bias=True, output_bias=True, mlp_bias=True, dropout=0.1,
    ),
}  # fmt: skip
B, S = 3, 16
MODES = ("none", "selective", "full")


def build(spec, layers, mode, dtype=torch.float64):
    """(block, its inputs, the rest it is called with); the same numbers for every mode and layout."""
    torch.manual_seed(0)
    block = Block(spec, layers, recompute=mode).to(dtype)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(B, S // layers.group.size if layers.sequence else S, spec.hidden, dtype=dtype).requires_grad_()
    accurate = torch.promote_types(dtype, torch.float32)
    turn = rotation(spec.rope, spec.head_size, torch.arange(S)[None], accurate) if spec.positions == "rope" else None
    mask = visible(S, spec.window, None, x.device)
    key = layers.noise_key(DropoutKey(1, 0, torch.arange(B), torch.arange(S)))
    return block, x, (turn, mask, key.noise(2, spec.hidden) if spec.dropout else None)


def layers_of(spec, group, **axis):
    return TensorLayers(spec, group, **axis)


def alone(spec, mode, dtype=torch.float64):
    return build(spec, layers_of(spec, World.single().group("tp")), mode, dtype)


def backward(block, x, rest, queue=None):
    """(output, gradients of input and parameters)."""
    for module in block.modules():
        if hasattr(module, "put_off"):
            module.put_off = queue
    y = block(x, *rest)
    y.square().sum().backward()
    if queue is not None:
        assert len(queue)
        queue.run()
    return [y.detach().clone()] + [tensor.grad.clone() for tensor in (x, *block.parameters())]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("put_off", [False, True])
def test_gradients_are_bit_equal(model, dtype, put_off):
    """With dropout, under every norm and MLP; also where weight gradients are put off."""
    found = {}
    for mode in MODES:
        found[mode] = backward(*alone(MODELS[model], mode, dtype), PutOff() if put_off else None)
        assert all(gradient.abs().sum() > 0 for gradient in found[mode])
        assert all(torch.equal(a, b) for a, b in zip(found["none"], found[mode], strict=True)), mode


def test_parameters_learn_where_the_input_needs_no_gradient():
    for mode in MODES:
        block, x, rest = alone(LLAMA, mode)
        x = x.detach()
        block(x, *rest).sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in block.parameters()), mode
        assert x.grad is None


def test_a_mask_that_changes_is_caught():
    """The check above can fail: dropout that is not a function of keys gives other gradients the second time."""
    block, x, rest = alone(LLAMA, "none")

    def careless(mode):
        x.grad = None
        torch.manual_seed(1)
        y = x * 1
        inside = lambda x: F.dropout(block(x, *rest), 0.5)  # noqa: E731
        y = recomputed(inside, y, Ledger()) if mode == "full" else inside(y)
        y.square().sum().backward()
        return x.grad

    assert not torch.equal(careless("none"), careless("full"))


class Storages(TorchDispatchMode):
    """Every storage that an operation returned, weakly, with its bytes."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            self.seen.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return result


def living_bytes(block, x, rest, expected):
    """Bytes that live while nothing but the block's output is held, the input's among them, the output's not.

    Threads of gloo let go of what they moved a moment after it arrived, so a larger number than expected gets a second.
    """
    others = {
        tensor.untyped_storage()._cdata
        for tensor in tree_leaves((list(block.parameters()), rest))
        if tensor is not None
    }
    with Storages() as storages:
        y = block(x, *rest)
    outside = {*others, y.untyped_storage()._cdata, x.untyped_storage()._cdata}
    made = [kept for place, kept in storages.seen.items() if place not in outside]
    for _ in range(100):
        living = x.untyped_storage().nbytes() + sum(size for reference, size in made if not reference.expired())
        if living <= expected:
            break
        time.sleep(0.01)
    return living


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_kept_is_what_the_closed_form_says(model, dtype):
    spec = MODELS[model]
    shape = Shape(B, S, spec.hidden, dtype.itemsize)
    planned = {mode: kept_bytes(mode, spec, shape, Axis(1, 0)) for mode in MODES}
    found = {mode: living_bytes(*alone(spec, mode, dtype), planned[mode]) for mode in MODES}
    assert found == planned
    assert found["full"] < found["selective"] < found["none"]
    assert found["full"] == B * S * spec.hidden * shape.width  # 2 s b h at 16 bits (spec BG-5)


# ---- over a tensor axis

AXES = {"tp": {}, "sp": {"sequence": True}, "regather": {"sequence": True, "regather": True}}


def over_ranks(rank, t, model, axis, put_off):
    """By mode: (gradients, transfers, bytes kept) of a block at layer 3 of micro-batch 2."""
    here = World(Mesh.of(Layout(tp=t)), rank, Ledger())
    spec, found = MODELS[model], {}
    layers = layers_of(spec, here.group("tp"), **AXES[axis])
    for mode in MODES:
        block, x, rest = build(spec, layers, mode)
        queue = PutOff() if put_off else None
        for module in block.modules():
            if hasattr(module, "put_off"):
                module.put_off = queue
        here.ledger.clear()
        with here.ledger.at(phase="backward", micro_batch=2):
            with here.ledger.at(phase="forward", layer=3):
                y = block(x, *rest)
            y.square().sum().backward()
            if queue is not None:
                queue.run()
        gradients = [tensor.grad.clone() for tensor in (x, *block.parameters())]
        transfers = here.ledger.transfers()
        planned = kept_bytes(mode, spec, Shape(B, S, spec.hidden, 8), Axis(t, rank, **AXES[axis]))
        found[mode] = gradients, transfers, living_bytes(block, x, rest, planned), planned
    here.close()
    return found


@pytest.mark.parametrize("put_off", [False, True])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_over_a_tensor_axis(pool, model, axis, put_off):
    """Full recomputation repeats the forward's collectives in backward, at the forward's layer; selective none."""
    t, spec = 2, MODELS[model]
    for rank, found in enumerate(pool.run(over_ranks, t, model, axis, put_off, timeout=60)):
        shape, cut = Shape(B, S, spec.hidden, 8), Axis(t, rank, **AXES[axis])
        plain = list(block_transfers(shape, cut, layer=3, micro_batch=2))
        assert total(found["none"][1]) == total(found["selective"][1]) == total(plain)
        again = list(repeated_transfers(plain, {3}))
        assert again and total(found["full"][1]) == total(plain + again)
        assert not list(repeated_transfers(plain, {0, 1, 2, 4}))
        for mode in MODES:
            gradients, _, kept, planned = found[mode]
            assert all(np.array_equal(a, b) for a, b in zip(found["none"][0], gradients, strict=True)), mode
            assert kept == planned, mode


def total(transfers):
    """Sums by everything but bytes and calls."""
    sums = {}
    for x in transfers:
        row = sums.setdefault((x.phase, x.axis, x.op, x.layer, x.micro_batch), [0, 0, 0])
        for place, value in enumerate((x.sent, x.received, x.calls)):
            row[place] += value
    return sums


def test_the_spec_of_full_recomputation_over_a_tensor_axis():
    """TP-6: 8 (t-1)/t b s h become 12; b=2, s=128, h=64, t=4, fp16: 196608 bytes become 294912."""
    plain = list(block_transfers(Shape(2, 128, 64, 2), Axis(4, 0), layer=0, micro_batch=0))
    assert sum(x.sent for x in plain) == 196608
    assert sum(x.sent for x in [*plain, *repeated_transfers(plain, [0])]) == 294912


def test_modes_by_block():
    assert [mode_of("selective", 5), mode_of("none", 0), mode_of("full", 9)] == ["selective", "none", "full"]
    assert [mode_of(2, block) for block in range(4)] == [mode_of("2", block) for block in range(4)]
    assert [mode_of(2, block) for block in range(4)] == ["full", "full", "none", "none"]
    assert [extra_forwards(mode) for mode in MODES] == [0, 0, 1]


def test_transfers_without_a_layer_are_not_repeated():
    loss = Transfer("forward", "dp", "all_reduce", 8, 8)
    assert list(repeated_transfers([loss], [0])) == []
