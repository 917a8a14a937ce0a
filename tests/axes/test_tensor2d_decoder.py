"""The whole decoder on a grid against one process: loss, logits, every gradient, every byte; and what is kept meanwhile."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.axes.tensor.run import TensorLayers
from shoal.axes.tensor2d import cost
from shoal.axes.tensor2d.cut import piece
from shoal.axes.tensor2d.run import Tensor2DLayers
from shoal.comm.collectives import all_reduce
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.kernels.dropout import DropoutKey
from shoal.kernels.linear import PutOff
from shoal.mesh import Mesh
from shoal.model.attention import visible
from shoal.model.block import Block
from shoal.model.decoder import Decoder
from shoal.model.init import initialise
from shoal.model.rope import rotation
from shoal.spec.inventory import inventory
from shoal.spec.model import ModelSpec
from shoal.verify.assemble import assembled, disagreement

LLAMA = ModelSpec(layers=2, hidden=36, heads=6, kv_heads=6, ffn=49, vocab=61, positions_max=16, dropout=0.1)
MODELS = {
    "kv heads for all": LLAMA,
    "one kv head, q and k norms, biases, tied": replace(
        LLAMA, kv_heads=1, qk_norm=True, qkv_bias=True, output_bias=True, tied=True
    ),
    "kv heads that divide": replace(LLAMA, heads=12, head_size=4, kv_heads=6, window=5),
    "gpt, tied": replace(
        LLAMA, norm="layernorm", positions="learned", mlp="gelu", qkv_bias=True, output_bias=True, mlp_bias=True,
        tied=True, vocab=6,
    ),
}  # fmt: skip
BATCH, SEQUENCE = 6, 8


def grid_layers(rank, world, spec):
    side = round(world**0.5)
    sizes = {"tp": world, "grid": side, "kv": max(1, side // spec.kv_heads)}
    here = World(Mesh(sizes, ("tp",)), rank, Ledger())
    return here, Tensor2DLayers(spec, here.group("row"), here.group("column"), here.group("tp"))


def batch(spec):
    random = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(spec.vocab, (BATCH, SEQUENCE), generator=random) for _ in range(2))
    targets[0, :3] = -100
    documents = (torch.arange(SEQUENCE) >= 5).long().expand(BATCH, -1) + torch.arange(BATCH)[:, None] % 2
    key = DropoutKey(3, 5, torch.arange(BATCH) + 11, torch.arange(SEQUENCE))
    return {"tokens": tokens, "documents": documents, "dropout": key}, targets


def one_step(rank, world, spec, put_off, forgotten):
    """Loss, whole gradients of this rank's pieces, ledger and logits; partial gradients along `forgotten` stay partial."""
    here, layers = grid_layers(rank, world, spec)
    model = Decoder(spec, torch.float64, layers=layers)
    pieces = layers.pieces(inventory(spec))
    initialise(model, spec, 0, pieces)
    queue = PutOff()
    if put_off:
        for module in model.modules():
            if hasattr(module, "put_off"):
                module.put_off = queue
    inputs, targets = batch(spec)
    with here.ledger.at(phase="forward", micro_batch=0):
        loss = model.loss(targets=targets, **inputs)
    with here.ledger.at(phase="backward", micro_batch=0):
        (loss / 7).backward()
        queue.run()
    transfers = here.ledger.transfers()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for kept in pieces:
        for share in kept.shares:
            if share.partial and share.axis != forgotten:
                all_reduce(gradients[kept.parameter.name][share.start : share.stop], here.group(share.axis))
    with torch.no_grad():
        logits = model(**inputs)
    here.close()
    return float(loss.detach()), gradients, transfers, logits


def one_process(spec):
    model = Decoder(spec, torch.float64)
    initialise(model, spec, 0)
    inputs, targets = batch(spec)
    loss = model.loss(targets=targets, **inputs)
    (loss / 7).backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return float(loss.detach()), gradients, model(**inputs).detach().numpy()


def worst(whole, truth):
    """The largest relative L2 error of a gradient."""
    return max(np.linalg.norm(whole[name] - truth[name]) / np.linalg.norm(truth[name]) for name in truth)


def pieces_of(spec, side):
    return [[piece(p, side, *divmod(rank, side)) for p in inventory(spec)] for rank in range(side**2)]


@pytest.mark.parametrize("side", [1, 2, 3])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_grid_computes_what_one_process_computes(pool, model, side):
    """Dropout and documents on; float64; copies equal to the bit; padding without a gradient; bytes as planned."""
    loss, truth, logits = one_process(model)
    put_off = side == 3
    ranks = pool.run(one_step, side**2, model, put_off, "nothing")
    for found, _, _, scores in ranks:
        assert found == pytest.approx(loss, rel=1e-13)
        np.testing.assert_allclose(scores, logits, rtol=0, atol=1e-13)
    held, pieces = [gradients for _, gradients, *_ in ranks], pieces_of(model, side)
    assert worst(assembled(held, pieces), truth) < 1e-11
    assert disagreement(held, pieces) is None
    for rank, (_, _, transfers, _) in enumerate(ranks):
        here = cost.Grid(side, *divmod(rank, side), BATCH, SEQUENCE, 8)
        assert by_place(transfers) == by_place(cost.micro_batch_transfers(here, model, 0))


def by_place(transfers):
    """Bytes sent, received and calls by phase, layer, micro-batch, axis and primitive."""
    totals: dict[tuple, list[int]] = {}
    for t in transfers:
        row = totals.setdefault((t.phase, t.layer, t.micro_batch, t.axis, t.op), [0, 0, 0])
        row[:] = [row[0] + t.sent, row[1] + t.received, row[2] + t.calls]
    return totals


@pytest.mark.parametrize("axis", ["column", "kv", "tp"])
def test_a_sum_of_partial_gradients_that_is_forgotten_is_caught(pool, axis):
    """Norms, biases, shared KV heads, norms over a head: each wrong without its sum, and different between copies."""
    model = MODELS["one kv head, q and k norms, biases, tied"]
    _, truth, _ = one_process(model)
    held = [gradients for _, gradients, *_ in pool.run(one_step, 4, model, False, axis)]
    assert worst(assembled(held, pieces_of(model, 2)), truth) > 0.01
    assert disagreement(held, pieces_of(model, 2)) is not None


class Peak(TorchDispatchMode):
    """The most bytes of storages that operations made and that were there at once; `saved` ones counted apart."""

    def __init__(self, *given):
        super().__init__()
        self.most = 0
        self._given = {tensor.untyped_storage()._cdata for tensor in given}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._given:
                self._made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, sum(size for _, size in self._made.values()))
        return result


def one_block(rank, world, spec, kind, dtype):
    """Bytes that a block keeps for backward, and the most that forward and backward have at once."""
    here, layers = grid_layers(rank, world, spec)
    b, width = BATCH // layers.column_group.size, layers.width
    if kind == "1D":
        layers, b, width = TensorLayers(spec, here.group("tp")), BATCH, spec.hidden
    block = Block(spec, layers).to(getattr(torch, dtype))
    x = torch.randn(b, SEQUENCE, width, dtype=getattr(torch, dtype), requires_grad=True)
    turn = None
    if spec.positions == "rope":
        turn = rotation(
            spec.rope, spec.head_size, torch.arange(SEQUENCE)[None], torch.promote_types(x.dtype, torch.float32)
        )
    noise = None
    if spec.dropout:
        key = DropoutKey(0, 0, torch.arange(b), torch.arange(SEQUENCE))
        noise = key.noise(2, width)
    given = [*block.parameters(), *(turn or ())]
    saved: dict[int, tuple[Tensor, int]] = {}  # the tensors stay, so that no storage takes another's address

    def note(tensor):
        storage = tensor.untyped_storage()
        if all(storage.data_ptr() != known.untyped_storage().data_ptr() for known in given):
            saved[storage.data_ptr()] = (tensor.detach(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        block(x, turn, visible(SEQUENCE, spec.window, None, x.device), noise)
    kept = sum(size for _, size in saved.values())
    with Peak(x, *given) as peak:
        block(x, turn, visible(SEQUENCE, spec.window, None, x.device), noise).sum().backward()
    here.close()
    return kept, peak.most


@pytest.mark.parametrize("side", [1, 2, 3])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_what_a_block_keeps_for_backward_is_the_formula(pool, model, side, dtype):
    width = {"float64": 8, "bfloat16": 2}[dtype]
    for kept, _ in pool.run(one_block, side**2, model, "2D", dtype):
        assert kept == cost.activation_bytes(cost.Grid(side, 0, 0, BATCH, SEQUENCE, width), model)


@pytest.mark.parametrize("side", [2, 3])
def test_a_grid_holds_less_at_its_peak_than_a_row_of_as_many_ranks(pool, side):
    """Where activations outweigh weights; 1D keeps the norms' and layers' inputs whole on every rank (2D-2)."""
    model = replace(LLAMA, dropout=0.0)
    (kept, peak), *_ = pool.run(one_block, side**2, model, "2D", "float32")
    (kept_1d, peak_1d), *_ = pool.run(one_block, side**2, model, "1D", "float32")
    assert kept < kept_1d and peak < peak_1d
