"""Whole decoders with mixtures of experts equal Hugging Face's, logits, loss and every gradient, with random weights.

Their gates are float32 whatever the model's dtype, and so are their rotary angles; agreement ends at that. DeepSeek-V3
itself has latent attention, which this decoder has not; dots.llm1 is DeepSeek-V3 with attention by heads.
"""

import pytest
import transformers

from hugging_face import check_equal
from shoal.spec.model import ModelSpec, RopeSpec
from shoal.spec.moe import MoESpec

TOLERANCE = 5e-6
SIZES = {"layers": 3, "hidden": 48, "heads": 4, "kv_heads": 2, "vocab": 101, "positions_max": 64}
THEIR_SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
ROPE = RopeSpec(theta=5000)


def mixtral():
    config = transformers.MixtralConfig(
        **THEIR_SIZES, intermediate_size=40, num_local_experts=8, num_experts_per_tok=2, sliding_window=None
    )
    spec = ModelSpec(**SIZES, rope=ROPE, moe=MoESpec(experts=8, top_k=2, expert_ffn=40))
    return spec, transformers.MixtralForCausalLM(config)


def qwen3(normalised=True):
    """Dense first, then every other layer; heads of a size of their own, normed queries and keys."""
    config = transformers.Qwen3MoeConfig(
        **THEIR_SIZES, head_dim=20, intermediate_size=80, moe_intermediate_size=24, num_experts=16, num_experts_per_tok=4,
        norm_topk_prob=normalised, mlp_only_layers=[0, 1],
    )  # fmt: skip
    moe = MoESpec(experts=16, top_k=4, expert_ffn=24, normalised=normalised, first_dense=2)
    spec = ModelSpec(**SIZES, head_size=20, ffn=80, qk_norm=True, rope=ROPE, moe=moe)
    return spec, transformers.Qwen3MoeForCausalLM(config)


def qwen2():
    """Shared experts behind a gate, biases on queries, keys and values; every second layer is dense."""
    config = transformers.Qwen2MoeConfig(
        **THEIR_SIZES, intermediate_size=80, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=8,
        num_experts_per_tok=4, norm_topk_prob=False, decoder_sparse_step=2,
    )  # fmt: skip
    moe = MoESpec(
        experts=8, top_k=4, expert_ffn=24, normalised=False, shared_experts=1, shared_ffn=40, shared_gate=True, every=2
    )
    return ModelSpec(**SIZES, ffn=80, qkv_bias=True, rope=ROPE, moe=moe), transformers.Qwen2MoeForCausalLM(config)


def deepseek_v3():
    """dots.llm1: DeepSeek-V3's dense first layer, sigmoid scores in groups, a bias on the choice, and shared experts."""
    config = transformers.Dots1Config(
        **THEIR_SIZES, head_dim=20, intermediate_size=80, moe_intermediate_size=24, n_routed_experts=16,
        num_experts_per_tok=4, n_shared_experts=2, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True,
        first_k_dense_replace=1,
    )  # fmt: skip
    moe = MoESpec(
        experts=16, top_k=4, expert_ffn=24, shared_experts=2, router="sigmoid", scaling=2.5, groups=4, groups_kept=2,
        bias=True, first_dense=1,
    )  # fmt: skip
    spec = ModelSpec(**SIZES, head_size=20, ffn=80, qk_norm=True, rope=ROPE, moe=moe)
    return spec, transformers.Dots1ForCausalLM(config)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(mixtral, id="mixtral"),
        pytest.param(qwen3, id="qwen3-moe"),
        pytest.param(lambda: qwen3(normalised=False), id="qwen3-moe, not normalised"),
        pytest.param(qwen2, id="qwen2-moe"),
        pytest.param(deepseek_v3, id="deepseek-v3"),
    ],
)
def test_a_decoder_equals_that_of_hugging_face(case):
    spec, theirs = case()
    check_equal(spec, theirs, TOLERANCE)
