"""Logits, loss and every parameter's gradient equal those of Hugging Face's models with the same weights, in float64.

Their rotary frequencies and angles are float32 whatever the model's dtype, so with rope agreement ends at that; without
it, it is that of float64.
"""

import pytest
import torch
import transformers
from torch import Tensor, nn

from shoal.model.decoder import Decoder
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


def as_ours(theirs: dict[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Tensors by their names as tensors by ours. Conv1D of GPT-2 keeps (in, out), where a linear layer has (out, in)."""
    if spec.positions == "learned":
        names = {
            "transformer.wte": "embedding",
            "transformer.wpe.weight": "embedding.positions",
            "transformer.h": "blocks",
            "transformer.ln_f": "head.norm",
            "ln_1": "attention_norm",
            "ln_2": "mlp_norm",
            "attn.c_attn": "attention.qkv",
            "attn.c_proj": "attention.out",
            "mlp.c_fc": "mlp.up",
            "mlp.c_proj": "mlp.down",
        }
        conv = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        return {renamed(n, names): x.t() if n.endswith(conv) else x for n, x in theirs.items()}
    names = {
        "model.embed_tokens": "embedding",
        "model.layers": "blocks",
        "model.norm": "head.norm",
        "lm_head": "head",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "mlp_norm",
        "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm",
        "self_attn.o_proj": "attention.out",
        "mlp.down_proj": "mlp.down",
    }
    ours = {renamed(n, names): x for n, x in theirs.items()}
    for layer in range(spec.layers):
        for fused, parts in (("attention.qkv", ("q", "k", "v")), ("mlp.gate_up", ("gate", "up"))):
            room = "self_attn" if fused == "attention.qkv" else "mlp"
            pieces = [ours.pop(f"blocks.{layer}.{room}.{part}_proj.weight") for part in parts]
            ours[f"blocks.{layer}.{fused}.weight"] = torch.cat(pieces)
    return ours


def renamed(name: str, names: dict[str, str]) -> str:
    for theirs, ours in names.items():
        name = name.replace(theirs, ours)
    return name


def shaken(module: nn.Module) -> nn.Module:
    """Random values everywhere, norms and biases included, so that nothing can be left out unseen."""
    random = torch.Generator().manual_seed(3)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.2 * noise)
    return module


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().norm() / theirs.detach().norm())


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
    shaken(theirs)
    ours = Decoder(spec, torch.float64)
    weights = as_ours(dict(theirs.named_parameters()), spec)
    ours.load_state_dict(weights, strict=True)
    text = torch.randint(spec.vocab, (3, 41), generator=torch.Generator().manual_seed(4))
    tokens, targets = text[:, :-1], text[:, 1:]

    their_logits = theirs(input_ids=tokens).logits
    their_loss = nn.functional.cross_entropy(their_logits.flatten(0, 1), targets.flatten(), reduction="sum")
    their_loss.backward()
    loss = ours.loss(tokens, targets)
    loss.backward()

    assert relative(ours(tokens), their_logits) < tolerance
    assert float(loss) == pytest.approx(float(their_loss), rel=tolerance)
    gradients = as_ours({name: p.grad for name, p in theirs.named_parameters()}, spec)
    wrong = {
        name: error
        for name, parameter in ours.named_parameters()
        if not (error := relative(parameter.grad, gradients.pop(name))) < tolerance
    }
    assert not wrong
    assert not gradients
