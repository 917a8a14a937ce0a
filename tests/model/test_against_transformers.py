"""Logits, loss and every parameter's gradient equal those of Hugging Face's models with the same weights, in float64.

Their rotary frequencies and angles are float32 whatever the model's dtype, so with rope agreement ends at that; without
it, it is that of float64.
"""

import pytest
import transformers

from hugging_face import check_equal
from shoal.spec.model import ModelSpec, RopeSpec

ROPE_TOLERANCE = 3e-6
EXACT_TOLERANCE = 1e-12

SIZES = {"layers": 2, "hidden": 48, "heads": 4, "kv_heads": 2, "ffn": 80, "vocab": 101, "positions_max": 64}
THEIR_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
    "pad_token_id": None,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0, "original_max_position_embeddings": 16}


def llama(**rope):
    parameters = {"rope_type": "default", "rope_theta": 10000.0} | rope
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**THEIR_SIZES, tie_word_embeddings=False, rope_parameters=parameters)
    )


def llama3():
    spec = RopeSpec(scaling="llama3", factor=8, original_positions=16)
    return ModelSpec(**SIZES, rope=spec), llama(rope_type="llama3", **LLAMA3)


def yarn():
    spec = RopeSpec(scaling="yarn", factor=4, original_positions=16, beta_fast=4)
    return ModelSpec(**SIZES, rope=spec), llama(rope_type="yarn", **YARN)


def qwen3():
    theirs = THEIR_SIZES | {"head_dim": 20, "rms_norm_eps": 1e-6}
    config = transformers.Qwen3Config(
        **theirs, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}
    )
    spec = ModelSpec(**SIZES, head_size=20, qk_norm=True, norm_eps=1e-6, tied=True, rope=RopeSpec(theta=5000))
    return spec, transformers.Qwen3ForCausalLM(config)


def mistral():
    config = transformers.MistralConfig(
        **THEIR_SIZES,
        sliding_window=5,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return ModelSpec(**SIZES, window=5), transformers.MistralForCausalLM(config)


def gpt2():
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=48,
        n_head=4,
        n_positions=64,
        vocab_size=101,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        attn_implementation="eager",
    )
    sizes = SIZES | {"kv_heads": 4, "ffn": 192}
    kinds = {"norm": "layernorm", "positions": "learned", "mlp": "gelu", "tied": True}
    spec = ModelSpec(**sizes, **kinds, qkv_bias=True, output_bias=True, mlp_bias=True)
    return spec, transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        pytest.param(lambda: (ModelSpec(**SIZES), llama()), ROPE_TOLERANCE, id="llama"),
        pytest.param(llama3, ROPE_TOLERANCE, id="llama3 rope"),
        pytest.param(yarn, ROPE_TOLERANCE, id="yarn rope"),
        pytest.param(qwen3, ROPE_TOLERANCE, id="qwen3"),
        pytest.param(mistral, ROPE_TOLERANCE, id="mistral window"),
        pytest.param(gpt2, EXACT_TOLERANCE, id="gpt2"),
    ],
)
def test_equals_hugging_face(case, tolerance):
    spec, theirs = case()
    check_equal(spec, theirs, tolerance)
