"""Mixture-of-experts layers equal Hugging Face's blocks with the same weights: routing, output, every gradient.

Their gates are float32 whatever the model's dtype, so with float64 elsewhere agreement ends at that.
"""

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from shoal.axes.expert.run import MixtureOfExperts
from shoal.spec.moe import MoESpec

HIDDEN = 32
TOLERANCE = 2e-6


def mixtral():
    config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=48, num_local_experts=8, num_experts_per_tok=2)
    return MoESpec(experts=8, top_k=2, expert_ffn=48), MixtralSparseMoeBlock, config


def qwen3(normalised):
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=24, num_experts=16, num_experts_per_tok=4, norm_topk_prob=normalised
    )
    return MoESpec(experts=16, top_k=4, expert_ffn=24, normalised=normalised), Qwen3MoeSparseMoeBlock, config


def qwen2():
    config = Qwen2MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=8,
        num_experts_per_tok=4, norm_topk_prob=False,
    )  # fmt: skip
    spec = MoESpec(
        experts=8, top_k=4, expert_ffn=24, normalised=False, shared_experts=1, shared_ffn=40, shared_gate=True
    )
    return spec, Qwen2MoeSparseMoeBlock, config


def deepseek_v3():
    config = DeepseekV3Config(
        hidden_size=HIDDEN, moe_intermediate_size=24, n_routed_experts=16, num_experts_per_tok=4, n_shared_experts=2,
        n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    spec = MoESpec(
        experts=16, top_k=4, expert_ffn=24, shared_experts=2, router="sigmoid", scaling=2.5, groups=4, groups_kept=2,
        bias=True,
    )  # fmt: skip
    return spec, DeepseekV3MoE, config


def deepseek_v2():
    config = DeepseekV2Config(
        hidden_size=HIDDEN, moe_intermediate_size=24, n_routed_experts=16, num_experts_per_tok=3, n_shared_experts=1,
        n_group=4, topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=1.5,
    )  # fmt: skip
    spec = MoESpec(
        experts=16, top_k=3, expert_ffn=24, shared_experts=1, normalised=False, scaling=1.5, groups=4, groups_kept=2,
        group_score="max",
    )  # fmt: skip
    return spec, DeepseekV2Moe, config


def ours_by_theirs(theirs):
    """Their weights by our names; gates come before ups in ours, as in their experts."""
    state = dict(theirs.state_dict())
    weights = {
        "router.weight": state["gate.weight"],
        "experts.gate_up": state["experts.gate_up_proj"],
        "experts.down": state["experts.down_proj"],
    }
    for shared in ("shared_expert", "shared_experts"):
        if f"{shared}.gate_proj.weight" in state:
            both = [state[f"{shared}.gate_proj.weight"], state[f"{shared}.up_proj.weight"]]
            weights["shared.gate_up.weight"] = torch.cat(both)
            weights["shared.down.weight"] = state[f"{shared}.down_proj.weight"]
    if "shared_expert_gate.weight" in state:
        weights["shared_gate.weight"] = state["shared_expert_gate.weight"]
    if "gate.e_score_correction_bias" in state:
        weights["router.bias"] = state["gate.e_score_correction_bias"]
    return weights


def pair(case):
    spec, block, config = case
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    theirs = block(config).double()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(std=1.0 if name == "gate.weight" else 0.3)
        if spec.bias:
            theirs.gate.e_score_correction_bias.normal_(std=0.2)
    ours = MixtureOfExperts(HIDDEN, spec).double()
    ours.load_state_dict(ours_by_theirs(theirs))
    return ours, theirs


def gradients_by_our_names(theirs):
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    return ours_by_theirs(theirs)


CASES = {
    "mixtral": mixtral(),
    "qwen3-moe": qwen3(True),
    "qwen3-moe, not normalised": qwen3(False),
    "qwen2-moe": qwen2(),
    "deepseek-v3": deepseek_v3(),
    "deepseek-v2": deepseek_v2(),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_equal_those_of_transformers(name):
    ours, theirs = pair(CASES[name])
    x = torch.randn(3, 20, HIDDEN, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()

    _, their_weights, their_experts = theirs.gate(x.flatten(0, 1))
    routing = ours.router(x.flatten(0, 1))
    order, their_order = routing.experts.argsort(1), their_experts.argsort(1)
    assert torch.equal(routing.experts.gather(1, order), their_experts.gather(1, their_order))
    assert_close(routing.weights.gather(1, order), their_weights.gather(1, their_order))

    y, _ = ours(mine)
    y_theirs = theirs(other)
    assert_close(y, y_theirs)
    c = torch.randn_like(y)
    (y * c).sum().backward()
    (y_theirs * c).sum().backward()
    assert_close(mine.grad, other.grad)
    expected = gradients_by_our_names(theirs)
    for parameter, value in ours.named_parameters():
        assert_close(value.grad, expected[parameter], parameter)


def test_the_balance_loss_is_theirs_over_k():
    """Theirs counts a token once for each expert it chose, so it is k at uniform load where ours is 1."""
    ours, theirs = pair(mixtral())
    ours.spec = MoESpec(experts=8, top_k=2, expert_ffn=48, aux_loss=0.02, balance="micro_batch")
    x = torch.randn(3, 20, HIDDEN, dtype=torch.float64)
    logits, _, _ = theirs.gate(x.flatten(0, 1))
    expected = 0.02 * load_balancing_loss_func((logits,), 8, 2) / 2
    assert ours(x)[1].item() / 60 == pytest.approx(expected.item(), rel=TOLERANCE)


def assert_close(a, b, what=""):
    error = torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)
    assert error < TOLERANCE, f"{what} {error:.1e}"
