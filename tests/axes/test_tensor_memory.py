"""What a block keeps for backward: the closed form against what autograd saves and against what stays alive, to the byte."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reference import GPT, LLAMA
from shoal.axes.tensor.cost import Axis, Shape
from shoal.axes.tensor.memory import block_activations, published_bytes
from shoal.axes.tensor.run import TensorLayers
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.kernels.dropout import DropoutKey
from shoal.mesh import Mesh
from shoal.model.attention import visible
from shoal.model.block import Block
from shoal.model.rope import rotation
from shoal.spec.layout import Layout
from shoal.spec.model import ModelSpec

GROUPED = replace(LLAMA, kv_heads=2)
MODELS = {
    "llama": GROUPED,
    "llama, all KV heads": LLAMA,
    "even llama": replace(LLAMA, ffn=48, qk_norm=True, dropout=0.2),
    "llama, qk_norm, dropout": replace(GROUPED, qk_norm=True, dropout=0.2),
    "llama, one KV head, window": replace(LLAMA, kv_heads=1, window=5),
    "llama, qk_norm, window, head_size": replace(GROUPED, qk_norm=True, window=5, head_size=6),
    "gpt": GPT,
    "gpt, no dropout, GQA": replace(GPT, dropout=0.0, kv_heads=2),
    "gpt, qk_norm, window, GQA": replace(GPT, qk_norm=True, kv_heads=4, window=5),
    "gpt, window, GQA": replace(GPT, kv_heads=2, window=5),
}
AXES = {"tp": {}, "sp": {"sequence": True}, "regather": {"sequence": True, "regather": True}}
DTYPES = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2}


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_the_closed_form_is_what_autograd_keeps(pool, t):
    """Every kind of block on every axis, in a dtype each (on up to 2 ranks in all three), a third with documents."""
    cases = [
        (model, dtype, axis, (place + number) % 3 == kind)
        for place, model in enumerate(MODELS)
        for number, axis in enumerate(AXES)
        for kind, dtype in enumerate(DTYPES)
        if t <= 2 or (place - number) % 3 == kind
    ]
    for rank, found in enumerate(pool.run(measured, t, cases, (3, 16))):
        for (model, dtype, axis, documents), sizes in zip(cases, found, strict=True):
            shape = Shape(3, 16, 32, DTYPES[dtype])
            planned = block_activations(MODELS[model], shape, Axis(t, rank, **AXES[axis]), documents).total
            assert sizes == (planned, planned), f"{model}, {dtype}, {axis}, documents {documents}"


@pytest.mark.parametrize("b, s", [(1, 256), (2, 600), (1, 385)])
def test_a_window_in_bands(pool, b, s):
    """The window's mask is made band by band, and the bands' outputs are kept beside the joined one."""
    for name in ("llama, one KV head, window", "gpt, qk_norm, window, GQA"):
        cases = [(name, torch.float32, "tp", False)]
        for (size,) in pool.run(measured, 2, cases, (b, s)):
            planned = block_activations(MODELS[name], Shape(b, s, 32, 4), Axis(2, 0)).total
            assert size == (planned, planned)


def measured(rank, world, cases, size):
    """(bytes that autograd saves, bytes that live on) of each case."""
    here = World(Mesh.of(Layout(tp=world)), rank, Ledger()) if world > 1 else World.single()
    found = []
    for model, dtype, axis, documents in cases:
        layers = TensorLayers(MODELS[model], here.group("tp"), **AXES[axis])
        found.append(of_block(MODELS[model], layers, dtype, size, documents))
    here.close()
    return found


def of_block(spec: ModelSpec, layers: TensorLayers, dtype: torch.dtype, size: tuple[int, int], documents: bool):
    b, s = size
    block = Block(spec, layers).to(dtype)
    x = torch.zeros(b, s // layers.group.size if layers.sequence else s, spec.hidden, dtype=dtype).requires_grad_()
    accurate = torch.promote_types(dtype, torch.float32)
    turn = rotation(spec.rope, spec.head_size, torch.arange(s)[None], accurate) if spec.positions == "rope" else None
    mask = visible(s, spec.window, torch.arange(s).expand(b, s) // 7 if documents else None, x.device)
    key = layers.noise_key(DropoutKey(1, 0, torch.arange(b), torch.arange(s)))
    noise = key.noise(2, spec.hidden) if spec.dropout else None
    others = [*block.parameters(), *(turn or ()), *(noise or ()), *([] if mask is None else [mask])]

    def forward() -> Tensor:
        return block(x, turn, mask, noise)

    saved = saved_bytes(forward, others)
    own = x.untyped_storage().nbytes()
    return saved, own + living_bytes(forward, [*others, x], saved - own)


def saved_bytes(forward: Callable[[], Tensor], others: list[Tensor]) -> int:
    """Bytes of the storages that autograd's graph refers to, each once, but for those of `others`."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = forward()
    for node in nodes(y.grad_fn):  # functions of our own could keep tensors as attributes, unseen by the hooks
        for tensor in filter(torch.is_tensor, getattr(node, "__dict__", {}).values()):
            pack(tensor)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in places(others))


def places(tensors: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def nodes(last):
    found, waiting = set(), [last]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [before for before, _ in node.next_functions]
    return found


class Storages(TorchDispatchMode):
    """Every storage that an operation returned, weakly, with its bytes."""

    def __init__(self):
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            self.seen.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return result


def living_bytes(forward: Callable[[], Tensor], others: list[Tensor], expected: int) -> int:
    """Bytes of the storages that forward made and that live while nothing but its result is held, but for `others`'.

    Threads of gloo let go of what they moved a moment after it arrived, so a larger number than expected gets a second.
    """
    with Storages() as storages:
        y = forward()
    outside = places([*others, y])
    for _ in range(100):
        made = [storage for place, storage in storages.seen.items() if place not in outside]
        living = sum(size for reference, size in made if not reference.expired())
        if living <= expected:
            break
        time.sleep(0.01)
    return living


@pytest.mark.parametrize("model", [GROUPED, GPT], ids=["llama", "gpt"])
def test_large_products_keep_the_same(model):
    """float32 products that go to oneDNN, through operations of our own, save no more than torch's."""
    large = replace(model, hidden=256, head_size=32, ffn=1024)
    layers = TensorLayers(large, World.single().group("tp"))
    planned = block_activations(large, Shape(2, 128, 256, 4), Axis(1, 0)).total
    assert of_block(large, layers, torch.float32, (2, 128), documents=False) == (planned, planned)


@pytest.mark.parametrize("model", ["even llama", "gpt"])
def test_what_each_axis_divides(pool, model):
    """From measured bytes alone: tp = c + (w - c)/t with the same c for every t, sp with a smaller one, regather w/t.

    With 2-byte elements and dropout c is the 10 s b h of Korthikanti et al., plus the norms' statistics.
    """
    cases = [(model, torch.bfloat16, axis, False) for axis in AXES]
    (whole, *_), *cut = ([size for size, _ in pool.run(measured, t, cases, (3, 16))[t - 1]] for t in (1, 2, 4, 8))
    planned = block_activations(MODELS[model], Shape(3, 16, 32, 2), Axis(1, 0))
    for t, (tp, sp, regather) in zip((2, 4, 8), cut, strict=True):
        assert (t * tp - whole) / (t - 1) == planned.between + planned.entered
        assert (t * sp - whole) / (t - 1) == planned.entered
        assert t * regather == whole
    statistics = {"rmsnorm": 4, "layernorm": 2 * 2}[MODELS[model].norm]
    assert planned.between + planned.entered == 3 * 16 * (10 * 32 + 2 * statistics)


GPT3 = replace(GPT, hidden=12288, heads=96, kv_heads=96, head_size=128, ffn=4 * 12288)


def test_the_published_formulas_give_their_golden():
    """GPT-3's layer on 8 ranks, spec BG-5: 2736, 552, 342, 102 and 48 MiB."""
    one = {"b": 1, "s": 2048, "h": 12288, "a": 96}
    found = [
        published_bytes(**one),
        published_bytes(**one, t=8),
        published_bytes(**one, t=8, sequence=True),
        published_bytes(**one, t=8, sequence=True, recompute="selective"),
        published_bytes(**one, t=8, recompute="full"),
    ]
    assert [size / 2**20 for size in found] == [2736, 552, 342, 102, 48]
    assert published_bytes(**one, t=8, sequence=True, recompute="full") == 6 * 2**20
    ranks = np.array([1, 8])
    assert list(published_bytes(**one, t=ranks) / 2**20) == [2736, 552]


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_gpt_block_keeps_what_is_published_without_the_softmax(t, sequence):
    """Fused attention keeps 4 bytes per head and token where the published block recomputes 5 a s^2 b selectively."""
    b, s, h, a = 2, 2048, 12288, 96
    found = block_activations(GPT3, Shape(b, s, h, 2), Axis(t, 0, sequence, regather=sequence)).total
    norms = 2 * 2 * 2 * b * s // (t if sequence else 1)
    softmax = 4 * a * b * s // t
    assert found - norms - softmax == published_bytes(b, s, h, a, t, sequence=sequence, recompute="selective")


def test_two_ranks_that_share_a_kv_head_by_hand():
    """32 tokens, one query head and one KV head of 4 features, 7 of 50 MLP columns; masks are of no rank's part."""
    shape = Shape(2, 16, 32, 4)
    turned, values, output, sums, mlp = 2 * 4, 4, 4, 1, 3 * 7
    assert block_activations(GROUPED, shape, Axis(8, 0)).inside == 32 * 4 * (turned + values + output + sums + mlp)
    assert block_activations(replace(GROUPED, window=4), shape, Axis(8, 0)).mask == 16 * 16 * 4
    assert block_activations(GROUPED, shape, Axis(8, 0), documents=True).mask == 2 * 16 * 16 * 4
