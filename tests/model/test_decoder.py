"""The decoder as a whole: the inventory's parameters, documents, gradients as views, dtypes, compilation, sampling."""

import shutil

import pytest
import torch

from shoal.kernels.dropout import DropoutKey
from shoal.model.decoder import Decoder
from shoal.model.init import initialise
from shoal.model.sample import sample
from shoal.spec.inventory import inventory
from shoal.spec.model import ModelSpec

SMALL = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 31, "positions_max": 40}
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
LEARNED = {"positions": "learned", "norm": "layernorm", "mlp": "gelu", **BIASES}
KINDS = [
    {},
    LEARNED,
    {"tied": True, "kv_heads": 2, "qk_norm": True},
    {"head_size": 10, "mlp_bias": True},
    {**LEARNED, "tied": True},
]


def fresh(spec: ModelSpec, dtype=torch.float64) -> Decoder:
    model = Decoder(spec, dtype)
    initialise(model, spec, seed=1)
    return model


def text(spec: ModelSpec, b: int, s: int) -> torch.Tensor:
    return torch.randint(spec.vocab, (b, s), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_parameters_are_the_inventory(kind):
    spec = ModelSpec(**SMALL, **kind)
    model, entries = Decoder(spec), inventory(spec)
    assert [(n, tuple(p.shape)) for n, p in model.named_parameters()] == [(e.name, e.shape) for e in entries]
    ids = {id(p): n for n, p in model.named_parameters()}
    by_unit = {unit: [ids[id(p)] for p in module.parameters()] for unit, module in model.units()}
    assert by_unit == {
        unit: [e.name for e in entries if e.unit == unit] for unit in dict.fromkeys(e.unit for e in entries)
    }


@pytest.mark.parametrize("kind", [{}, {"kv_heads": 2, "window": 3}, LEARNED], ids=str)
def test_packed_documents_compute_what_they_compute_alone(kind):
    spec = ModelSpec(**SMALL, **kind)
    packed, alone = fresh(spec), fresh(spec)
    lengths = [[5, 1, 9, 3], [11, 7]]
    documents = torch.tensor([[d for d, n in enumerate(row) for _ in range(n)] for row in lengths])
    positions = torch.tensor([[i for n in row for i in range(n)] for row in lengths])
    tokens, targets = text(spec, 2, 19)[:, :-1], text(spec, 2, 19)[:, 1:]

    loss = packed.loss(tokens, targets, positions, documents)
    loss.backward()
    total = 0.0
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            part = slice(start, start + length)
            piece = alone.loss(tokens[row : row + 1, part], targets[row : row + 1, part])
            piece.backward()
            total += float(piece.detach())
            start += length

    assert float(loss) == pytest.approx(total, rel=1e-12)
    for (name, a), (_, b) in zip(packed.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-13, msg=name)


def test_gradients_accumulate_into_the_views_that_are_there():
    spec = ModelSpec(**SMALL, tied=True)
    model, reference = fresh(spec), fresh(spec)
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    views = [
        view.view(p.shape) for view, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)
    ]
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = view
    tokens = text(spec, 4, 9)
    for half in tokens.split(2):
        model.loss(half[:, :-1], half[:, 1:]).backward()
    assert all(parameter.grad is view for parameter, view in zip(parameters, views, strict=True))
    reference.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    expected = torch.cat([p.grad.flatten() for p in reference.parameters()])
    torch.testing.assert_close(flat, expected, rtol=1e-11, atol=1e-14)


def test_a_token_is_no_function_of_later_ones():
    spec = ModelSpec(**SMALL)
    model, tokens = fresh(spec), text(spec, 1, 12)
    changed = tokens.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % spec.vocab
    assert torch.equal(model(tokens)[:, :8], model(changed)[:, :8])
    assert not torch.equal(model(tokens)[:, 8:], model(changed)[:, 8:])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_every_dtype_is_close_to_float64(dtype, tolerance):
    spec = ModelSpec(**SMALL, kv_heads=2, qk_norm=True)
    exact, model, tokens = fresh(spec), fresh(spec, dtype), text(spec, 4, 33)
    exact.load_state_dict(model.state_dict())  # bfloat16 rounds the weights themselves
    losses = [m.loss(tokens[:, :-1], tokens[:, 1:]) for m in (exact, model)]
    for loss in losses:
        loss.backward()
    assert losses[1].dtype == torch.float32
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=tolerance / 10)
    for (name, a), (_, b) in zip(model.named_parameters(), exact.named_parameters(), strict=True):
        assert (a.grad.double() - b.grad).norm() < tolerance * b.grad.norm(), name


@pytest.mark.parametrize("kind", [*KINDS, {"window": 3, "kv_heads": 2}, {"dropout": 0.2}], ids=str)
def test_blocks_compile_once_and_without_a_break(kind):
    torch._dynamo.reset()
    spec = ModelSpec(**SMALL, **kind)
    model, compiled, tokens = fresh(spec), fresh(spec), text(spec, 2, 17)
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for block in compiled.blocks.values():
        block.compile(fullgraph=True, backend=counting)
    for step in range(2):
        for m in (model, compiled):
            key = DropoutKey(0, step, torch.arange(2) + 2 * step, torch.arange(16))
            m.zero_grad()
            m.loss(tokens[:, :-1], tokens[:, 1:], dropout=key).backward()
        for (name, a), (_, b) in zip(model.named_parameters(), compiled.named_parameters(), strict=True):
            assert (a.grad - b.grad).norm() <= 1e-11 * a.grad.norm(), name
    assert len(graphs) == 1  # for both blocks and both steps


@pytest.mark.skipif(not shutil.which("g++"), reason="torch's compiler needs one of C++")
def test_compile_blocks_changes_neither_names_nor_gradients():
    torch._dynamo.reset()
    spec = ModelSpec(**SMALL, kv_heads=2, qk_norm=True)
    model, compiled, tokens = fresh(spec), fresh(spec), text(spec, 2, 17)
    compiled.compile_blocks()
    for m in (model, compiled):
        m.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    for (name, a), (same_name, b) in zip(model.named_parameters(), compiled.named_parameters(), strict=True):
        assert name == same_name
        assert (a.grad - b.grad).norm() <= 1e-11 * a.grad.norm(), name


def test_sampling_follows_the_most_probable_or_the_seed():
    spec = ModelSpec(**SMALL | {"positions_max": 6})
    model = fresh(spec)
    prompt = [3, 1, 4]
    greedy = sample(model, prompt, 5, temperature=0)
    ids = list(prompt)
    for expected in greedy:
        assert int(model(torch.tensor([ids[-6:]]))[0, -1].argmax()) == expected
        ids.append(expected)
    assert len(greedy) == 5
    drawn = [sample(model, prompt, 20, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(0 <= i < spec.vocab for i in drawn[0])


def test_sampling_draws_in_proportion():
    """One position, known probabilities: frequencies within five standard deviations."""
    spec = ModelSpec(layers=1, hidden=8, heads=2, vocab=4, positions_max=1)
    model = fresh(spec)
    with torch.no_grad():
        model.head.weight.mul_(40)
    temperature, count = 0.7, 2000
    p = (model(torch.tensor([[2]]))[0, -1] / temperature).softmax(-1)
    drawn = [sample(model, [2], 1, temperature, seed)[0] for seed in range(count)]
    for i in range(4):
        assert abs(drawn.count(i) - count * p[i]) < 5 * (count * p[i] * (1 - p[i])) ** 0.5
