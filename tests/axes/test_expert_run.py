"""The mixture of experts on one process against a loop over tokens: every option, every gradient, float64."""

import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from moe_reference import token_by_token, weights_of
from shoal.axes.expert.grouped import STEP, Entries, forward_product, input_product, parts, weight_product
from shoal.axes.expert.run import Load, MixtureOfExperts, collect_loads, update_bias
from shoal.comm.world import World
from shoal.kernels.linear import PutOff
from shoal.spec.moe import MoESpec

HIDDEN = 12
SIZES = {"experts": 8, "top_k": 3, "expert_ffn": 10}
SPECS = {
    "plain": MoESpec(**SIZES),
    "one expert": MoESpec(experts=1, top_k=1, expert_ffn=10, normalised=False, router="sigmoid"),
    "one of eight": MoESpec(experts=8, top_k=1, expert_ffn=10, normalised=False),
    "all experts": MoESpec(experts=4, top_k=4, expert_ffn=10, normalised=False),
    "sigmoid": MoESpec(**SIZES, router="sigmoid", scaling=2.5),
    "not normalised": MoESpec(**SIZES, normalised=False),
    "sigmoid, not normalised": MoESpec(**SIZES, router="sigmoid", normalised=False),
    "groups by two best": MoESpec(**SIZES, router="sigmoid", groups=4, groups_kept=2, bias=True),
    "groups by best": MoESpec(**SIZES, groups=4, groups_kept=2, group_score="max"),
    "bias": MoESpec(**SIZES, bias=True),
    "shared": MoESpec(**SIZES, shared_experts=2, shared_ffn=6),
    "shared, gated": MoESpec(**SIZES, shared_experts=1, shared_gate=True),
    "balance loss": MoESpec(**SIZES, aux_loss=0.3),
    "balance loss, sigmoid": MoESpec(**SIZES, router="sigmoid", aux_loss=0.3, bias=True),
    "balance loss over the micro-batch": MoESpec(**SIZES, aux_loss=0.3, balance="micro_batch"),
    "z-loss": MoESpec(**SIZES, z_loss=0.2),
    "capacity": MoESpec(**SIZES, capacity=0.8, aux_loss=0.1),
    "capacity over the micro-batch": MoESpec(**SIZES, capacity=0.8, balance="micro_batch"),
    "everything": MoESpec(
        **SIZES, router="sigmoid", groups=2, groups_kept=1, bias=True, shared_experts=1, shared_gate=True,
        aux_loss=0.1, z_loss=0.1, capacity=1.2, scaling=1.5,
    ),
}  # fmt: skip


def layer(spec, weights, **options):
    module = MixtureOfExperts(HIDDEN, spec, **options).double()
    module.load_state_dict(weights)
    return module


def relative(a, b):
    a, b = a.detach(), b.detach()
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b).clamp_min(1e-30))


def random(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", SPECS)
def test_output_and_every_gradient_are_those_of_a_loop_over_tokens(name):
    spec = SPECS[name]
    weights = weights_of(spec, HIDDEN)
    x, c = random(3, 11, HIDDEN), random(3, 11, HIDDEN, seed=2)
    counted = random(3, 11, seed=3) > -0.5
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    module = layer(spec, weights)
    y, auxiliary = module(mine, counted)
    ((y * c).sum() + auxiliary).backward()
    leaves = {name: w.clone().requires_grad_(name != "router.bias") for name, w in weights.items()}
    y_truth, auxiliary_truth, chosen = token_by_token(spec, leaves, theirs, counted)
    ((y_truth * c).sum() + auxiliary_truth).backward()
    dropped = sum(expert is None for row in chosen for token in row for expert in token)
    assert (dropped > 0) == (spec.capacity > 0) and module.chosen[-1] == dropped

    assert relative(y, y_truth) < 1e-12
    assert abs(auxiliary - auxiliary_truth) <= 1e-12 * abs(auxiliary_truth)
    assert relative(mine.grad, theirs.grad) < 1e-10
    for parameter, value in module.named_parameters():
        assert relative(value.grad, leaves[parameter].grad) < 1e-10, parameter


def test_an_expert_without_tokens_gets_zero_gradients_and_one_with_all_gets_all():
    spec = MoESpec(experts=4, top_k=1, normalised=False, expert_ffn=6, bias=True)
    weights = weights_of(spec, HIDDEN)
    weights["router.bias"] = torch.tensor([0.0, 0.0, 9.0, 0.0], dtype=torch.float64)
    module = layer(spec, weights)
    x = random(2, 5, HIDDEN)
    y, _ = module(x)
    y.sum().backward()
    assert relative(y, token_by_token(spec, weights, x)[0]) < 1e-12
    used = module.experts.gate_up.grad.abs().sum((1, 2)) > 0
    assert used.tolist() == [False, False, True, False]
    assert not module.experts.gate_up.grad.isnan().any() and not module.experts.down.grad.isnan().any()
    assert module.chosen.tolist() == [0, 0, 10, 0, 0]


@pytest.mark.parametrize("balance", ["sequence", "micro_batch"])
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_the_balance_loss_is_its_coefficient_at_uniform_load_and_more_elsewhere(balance, router):
    """EP-5. Tokens that are unit vectors of their own expert: each expert is chosen equally often."""
    spec = MoESpec(experts=4, top_k=1, normalised=False, expert_ffn=6, aux_loss=0.25, balance=balance, router=router)
    weights = weights_of(spec, 4)
    weights["router.weight"] = torch.eye(4, dtype=torch.float64)
    module = MixtureOfExperts(4, spec).double()
    module.load_state_dict(weights)
    even = torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    uneven = torch.eye(4, dtype=torch.float64)[[0, 0, 1, 2]].expand(2, 4, 4)
    assert module(even)[1].item() / 8 == pytest.approx(0.25, abs=1e-15)
    assert module(uneven)[1].item() / 8 > 0.26


def test_the_gate_is_computed_in_float32_at_least():
    """In bfloat16 two logits that differ by less than its steps would tie; the routing must be that of float32."""
    spec = MoESpec(experts=2, top_k=1, normalised=False, expert_ffn=4, bias=True)
    module = MixtureOfExperts(2, spec).to(torch.bfloat16)
    assert module.router.bias.dtype == torch.float32 and module.router.weight.dtype == torch.bfloat16
    with torch.no_grad():
        module.router.weight.copy_(torch.tensor([[256.0, 0.0], [256.0, 0.5]]))
    x = torch.ones(1, 1, 2, dtype=torch.bfloat16, requires_grad=True)
    routing = module.router(x[0])
    assert routing.logits.dtype == torch.float32 and routing.experts.item() == 1
    assert (x[0] @ module.router.weight.t()).unique().numel() == 1, "the case does not tell the two apart"
    routing.weights.sum().backward()
    assert x.grad.dtype == module.router.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_stay_near_float64(dtype):
    spec = SPECS["everything"]
    weights = weights_of(spec, HIDDEN)
    exact, rough = layer(spec, weights), MixtureOfExperts(HIDDEN, spec).to(dtype)
    rough.load_state_dict(weights)
    exact.load_state_dict({name: value.to(dtype) for name, value in weights.items()})
    exact.router.bias = rough.router.bias.double()
    x = random(2, 9, HIDDEN).to(dtype)
    bound = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    wide, narrow = x.double().requires_grad_(), x.clone().requires_grad_()
    for module, given in ((exact, wide), (rough, narrow)):
        y, auxiliary = module(given)
        (y.sum() + auxiliary).backward()
    assert relative(narrow.grad.double(), wide.grad) < bound
    for (name, a), (_, b) in zip(rough.named_parameters(), exact.named_parameters(), strict=True):
        assert relative(a.grad.double(), b.grad) < bound, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 9, 0], [2, 64, 200, 0]])
def test_torchs_grouped_product_computes_what_the_loop_computes(dtype, counts, monkeypatch):
    """On CUDA the products are one call each; the same calls run on CPUs, where shoal loops."""
    counts = torch.tensor(counts)
    n, a, b = int(counts.sum()), 16, 24
    x, gradient, weight = random(n, a).to(dtype), random(n, b).to(dtype), random(4, b, a).to(dtype)
    loop = (
        forward_product(x, weight, counts), input_product(gradient, weight, counts), weight_product(gradient, x, counts)
    )  # fmt: skip
    monkeypatch.setattr("shoal.axes.expert.grouped._one_call", lambda *operands: True)
    grouped = (
        forward_product(x, weight, counts), input_product(gradient, weight, counts), weight_product(gradient, x, counts)
    )  # fmt: skip
    for ours, theirs in zip(loop, grouped, strict=True):
        assert relative(ours.double(), theirs.double()) < (1e-6 if dtype == torch.float32 else 1e-2)
    assert (loop[2][counts == 0] == 0).all()


@hypothesis.given(st.lists(st.integers(0, 400), max_size=8))
def test_experts_rows_are_cut_into_few_lengths(counts):
    """Every row once, in order, with its own expert; whatever the routing, no more than STEP - 1 odd lengths."""
    cut = list(parts(torch.tensor(counts, dtype=torch.int64)))
    rows = [(expert, row) for expert, of in cut for row in range(of.start, of.stop)]
    assert rows == list(zip(np.repeat(np.arange(len(counts)), counts).tolist(), range(sum(counts)), strict=True))
    lengths = [of.stop - of.start for _, of in cut]
    assert all(length > 0 and (length < STEP or length % STEP == 0) for length in lengths)


def test_large_float32_products_go_through_the_linear_kernels():
    """Above the size where oneDNN takes over, the layer still computes what float64 computes."""
    spec = MoESpec(experts=2, top_k=1, normalised=False, expert_ffn=128)
    x = random(1, 600, 128).float().requires_grad_()
    module = MixtureOfExperts(128, spec)
    for seed, parameter in enumerate(module.parameters()):
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(seed))
    exact = MixtureOfExperts(128, spec).double()
    exact.load_state_dict(module.state_dict())
    wide = x.detach().double().requires_grad_()
    for layer_, given in ((module, x), (exact, wide)):
        layer_(given)[0].square().sum().backward()
    assert relative(x.grad.double(), wide.grad) < 1e-5
    for a, b in zip(module.parameters(), exact.parameters(), strict=True):
        assert relative(a.grad.double(), b.grad) < 1e-5


def test_weight_gradients_can_be_put_off():
    """As schedules want it that split backward: nothing before `run`, everything after it."""
    spec = SPECS["shared, gated"]
    weights, x = weights_of(spec, HIDDEN), random(2, 5, HIDDEN)
    at_once, later = layer(spec, weights), layer(spec, weights)
    queue = PutOff()
    for module in (later.router, later.experts, later.shared):
        module.put_off = queue
    grads = []
    for module in (at_once, later):
        given = x.clone().requires_grad_()
        module(given)[0].square().sum().backward()
        grads.append(given.grad)
    assert torch.equal(*grads)
    assert len(queue) == 5 and later.experts.down.grad is None and later.shared.down.weight.grad is None
    queue.run()
    for (name, a), (_, b) in zip(at_once.named_parameters(), later.named_parameters(), strict=True):
        assert relative(b.grad, a.grad) < 1e-14, name


def test_only_the_layers_own_activations_are_kept():
    """What autograd keeps: the input, gate | up of the choices, scores; neither expanded tokens nor experts' outputs."""
    spec = MoESpec(experts=8, top_k=4, expert_ffn=16)
    module = MixtureOfExperts(64, spec)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    kept = {}
    x = torch.randn(1, 256, 64, requires_grad=True)

    def pack(tensor):
        if tensor.is_floating_point() and not any(tensor is p or tensor._base is p for p in module.parameters()):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y, _ = module(x)
    tokens, choices = 256, 256 * 4
    mlp = (tokens * 64 + choices * 2 * 16) * 4
    scores = (tokens * 8 + 4 * choices) * 4  # softmax, and numbers per choice: sum, weights, and their quotients
    assert mlp < sum(kept.values()) <= mlp + scores
    assert y.grad_fn is not None


def test_loads_are_counted_once_a_step_and_move_the_bias_towards_even_load():
    spec = MoESpec(**SIZES, router="sigmoid", bias=True, bias_rate=0.01)
    weights = weights_of(spec, HIDDEN)
    weights["router.bias"] *= 0
    layers = [layer(spec, weights), layer(spec, weights_of(spec, HIDDEN, seed=5))]
    group = World.single().group("dp")
    x = random(4, 64, HIDDEN) + 0.5
    with torch.no_grad():
        layers[0](x)  # an evaluation counts nothing
    layers[0](x[:2])
    layers[0](x[2:])
    loads = collect_loads(layers, 8, group)
    chosen = torch.tensor(token_counts(token_by_token(spec, weights, x)[2], 8))
    assert loads[0] == Load(tuple(chosen.tolist()), 0) and loads[1].chosen == (0,) * 8
    assert collect_loads(layers, 8, group)[0].chosen == (0,) * 8, "a step starts from zero"
    update_bias(layers, loads)
    assert torch.equal(layers[0].router.bias, 0.01 * torch.sign(chosen.double().mean() - chosen))
    assert torch.equal(layers[1].router.bias, weights_of(spec, HIDDEN, seed=5)["router.bias"])
    first = loads[0].max_over_mean
    for _ in range(200):
        layers[0](x)
        loads = collect_loads(layers[:1], 8, group)
        update_bias(layers[:1], loads)
    assert first > 1.3 and loads[0].max_over_mean < 1.1


def token_counts(chosen, experts):
    flat = [expert for row in chosen for token in row for expert in token]
    return [flat.count(expert) for expert in range(experts)]


def test_figures_of_a_load():
    even, worst, mixed = Load((5, 5, 5, 5), 0), Load((0, 20, 0, 0), 3), Load((4, 2, 1, 1), 0)
    assert even.max_over_mean == 1 and even.entropy == pytest.approx(math.log(4))
    assert worst.max_over_mean == 4 and worst.entropy == 0 and worst.rank_max_over_mean(2) == 2
    assert mixed.max_over_mean == 2 and mixed.entropy == pytest.approx(1.75 * math.log(2))
    assert mixed.rank_max_over_mean(2) == 1.5 and mixed.rank_max_over_mean(4) == 2
    assert Load((0, 0), 0).max_over_mean == 1 and Load((0, 0), 0).entropy == 0


def test_entries_are_sorted_by_expert_and_keep_the_order_of_tokens():
    entries = Entries.of(torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([3, 0, 0, 1, 3, 0]), 4, 4)
    assert entries.picks.rows.tolist() == [0, 1, 2, 1, 0, 2] and entries.counts.tolist() == [3, 1, 0, 2]
    ones = entries.picks.add_up(torch.ones(6, 1, dtype=torch.float64))
    assert ones[:, 0].tolist() == [2, 2, 2, 0]


def test_compilation_leaves_the_layer_alone():
    spec = SPECS["plain"]
    module = layer(spec, weights_of(spec, HIDDEN))
    x = random(1, 4, HIDDEN)
    plain = module(x)[0]
    module.compile()
    assert torch.equal(module(x)[0], plain)
