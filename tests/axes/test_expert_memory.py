"""What a mixture of experts keeps for backward: by hand, and against what autograd keeps of the module itself."""

import numpy as np
import pytest
import torch

from moe_reference import weights_of
from shoal.axes.expert import cost
from shoal.axes.expert.memory import Around, Flow, Sizes, mixture, routed
from shoal.axes.expert.run import ExpertRanks, MixtureOfExperts
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.mesh import Mesh
from shoal.spec.layout import Layout
from shoal.spec.moe import MoESpec

SPEC = MoESpec(experts=8, top_k=3, expert_ffn=6)


def test_one_rank_by_hand():
    """Two sequences of 5 tokens, hidden 4, experts 3 wide, k = 2 of 4, bfloat16; 18 of 20 choices had room."""
    moe = MoESpec(experts=4, top_k=2, expert_ffn=3, capacity=1.0)
    sizes = Sizes(hidden=4, ffn=3, shared=0, experts=4, ranks=1, once=False, width=2)
    around = Around.of(moe, b=2, part=5, own=5, gathered=1)
    found = mixture(moe, sizes, around, Flow(18, 18, 18, 18))
    normed = 10 * 4 * 2
    routing = 10 * 4 * 4 + 10 * 2 * (8 + 4) + 10 * 4  # scores; chosen experts and their scores; the sums of these
    hidden, weights = 18 * 2 * 3 * 2, 18 * 4
    tables = 18 + 18 + 18 + 11 + 4  # sorted choices; their rows, and by row; where rows begin; tokens of each expert
    assert found.kept == normed + routing + hidden + weights + 8 * tables
    assert found.remade == 0 and mixture(moe, sizes, around, Flow(18, 18, 18, 18), selective=True).remade == normed
    logits, between, gradients = 10 * 4 * 4, 18 * 3 * 3 * 2, 18 * 4 * 2
    assert found.waiting == normed + logits + between + gradients + 8 * (18 + 4)


def test_activations_grow_with_imbalance():
    sizes, around = Sizes(16, 24, 0, 2, 4, False, 2), Around(1, 100, 100, 100, False, False)
    even, loaded = (routed(sizes, around, Flow(200, 200, came, came)) for came in (200, 800))
    assert [even[name] for name in ("arrived", "hidden", "returned", "weights")] == [6400, 19200, 6400, 800]
    assert loaded["arrived"] == 4 * even["arrived"] and loaded["hidden"] == 4 * even["hidden"]
    assert loaded["returned"] == even["returned"], "what a source gets back depends on its own tokens"
    once = routed(Sizes(16, 24, 0, 2, 4, True, 2), around, Flow(200, 150, 200, 150))
    assert once["arrived"] == 150 * 16 * 2 and once["returned"] == 0
    assert routed(Sizes(16, 24, 0, 8, 1, False, 2), around, Flow(200, 200, 200, 200))["arrived"] == 0


def kept_on_rank(rank, world, spec, duplicate_free):
    """Bytes that autograd keeps of a layer of its own on a rank, each storage once, and the routing."""
    group = World(Mesh.of(Layout(dp=world, ep=world)), rank, Ledger()).group("ep")
    alone = World.single().group("tp")
    module = MixtureOfExperts(10, spec, ExpertRanks(group, alone, alone, alone), duplicate_free).double()
    for name, weight in weights_of(spec, 10).items():
        own = weight.chunk(world)[rank] if name.startswith("experts.") else weight
        module.get_parameter(name).data.copy_(own)
    x = torch.randn(2, 10, 10, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).requires_grad_()
    weights = {weight.untyped_storage()._cdata for weight in module.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    return sum(storage.nbytes() for storage in kept.values()), module.router(x.flatten(0, 1)).experts.numpy()


@pytest.mark.parametrize("duplicate_free", [False, True])
@pytest.mark.parametrize("ep", [1, 4])
def test_what_autograd_keeps_is_what_is_planned(pool, ep, duplicate_free):
    kept, chosen = zip(*pool.run(kept_on_rank, ep, SPEC, duplicate_free), strict=True)
    tables = cost.rows_between(chosen, 8), cost.rows_between(chosen, 8, duplicate_free)
    sizes = Sizes(10, 6, 0, 8 // ep, ep, duplicate_free, 8)
    around = Around.of(SPEC, b=2, part=10, own=10, gathered=1)
    assert kept == tuple(mixture(SPEC, sizes, around, Flow.between(*tables, rank)).kept for rank in range(ep))


@pytest.mark.parametrize("once", [False, True])
def test_the_mean_is_that_of_random_choices(once):
    random = np.random.default_rng(0)
    flows = []
    for _ in range(300):
        chosen = [np.stack([random.permutation(8)[:3] for _ in range(20)]) for _ in range(4)]
        flows.append(Flow.between(cost.rows_between(chosen, 8), cost.rows_between(chosen, 8, once), 1))
    for name, mean in vars(Flow.mean(20, 3, 8, 4, once)).items():
        assert mean == pytest.approx(np.mean([getattr(flow, name) for flow in flows]), rel=0.01)
