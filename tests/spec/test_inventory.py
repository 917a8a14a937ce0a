"""The parameter inventory against independent counts: published ones, closed forms, transformers' models."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.spec.build import job_from_tree
from shoal.spec.inventory import buffers, elements, flops_per_token, inventory, parameter_count
from shoal.spec.model import ModelSpec
from shoal.spec.moe import MoESpec
from shoal.spec.presets import MODELS

PUBLISHED = {
    "gpt2": 124_439_808,
    "smollm2-135m": 134_515_008,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
}


def preset(name):
    return job_from_tree({"model": {"preset": name}}).model


@st.composite
def models(draw):
    kv_heads, share = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return ModelSpec(
        layers=draw(st.integers(1, 4)),
        hidden=draw(st.integers(1, 40)),
        heads=kv_heads * share,
        kv_heads=kv_heads,
        head_size=2 * draw(st.integers(1, 8)),
        ffn=draw(st.integers(1, 50)),
        vocab=draw(st.integers(1, 60)),
        positions_max=draw(st.integers(1, 30)),
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        positions=draw(st.sampled_from(["rope", "learned"])),
        mlp=draw(st.sampled_from(["swiglu", "gelu"])),
        qk_norm=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 64)),
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    assert parameter_count(preset(name)) == PUBLISHED[name]


def test_every_preset_is_covered_by_a_count():
    assert set(MODELS) == {*PUBLISHED, "tiny", "demo", "moe-tiny", "moe-demo"}
    assert 3e6 < parameter_count(preset("demo")) < 5e6


@given(models())
def test_count_is_the_closed_form(model):
    h, f, d, a, g = model.hidden, model.ffn, model.head_size, model.heads, model.kv_heads
    norm = 2 * h if model.norm == "layernorm" else h
    attention = h * d * (a + 2 * g) + h * a * d + model.qkv_bias * d * (a + 2 * g) + model.output_bias * h
    mlp = 3 * h * f + model.mlp_bias * (2 * f + h) if model.mlp == "swiglu" else 2 * h * f + model.mlp_bias * (f + h)
    block = attention + mlp + 2 * norm + 2 * d * model.qk_norm
    outside = model.vocab * h * (1 if model.tied else 2) + norm
    learned = model.positions_max * h if model.positions == "learned" else 0
    assert parameter_count(model) == model.layers * block + outside + learned


@given(models())
def test_every_parameter_is_whole(model):
    parameters = inventory(model)
    assert len({p.name for p in parameters}) == len(parameters)
    for p in parameters:
        assert p.decay == (len(p.shape) == 2) == (p.init == "normal") == (p.std > 0)
        assert p.init == ("zeros" if p.name.endswith(".bias") else "normal" if p.decay else "ones")
        if p.cut:
            assert sum(part.rows for part in p.cut.parts) == p.shape[p.cut.dim]
            assert all(part.rows % part.units == 0 for part in p.cut.parts)
    order = ["embedding", *(f"blocks.{i}" for i in range(model.layers)), "head"]
    assert list(dict.fromkeys(p.unit for p in parameters)) == order


@given(models())
def test_residual_projections_start_smaller(model):
    for p in inventory(model):
        residual = p.name.endswith(("attention.out.weight", "mlp.down.weight"))
        if p.init == "normal":
            assert p.std == pytest.approx(0.02 / math.sqrt(2 * model.layers) if residual else 0.02)


def test_names_shapes_and_cuts_of_one_model():
    model = ModelSpec(
        layers=1, hidden=8, heads=4, kv_heads=2, ffn=24, vocab=11, qk_norm=True, qkv_bias=True, mlp_bias=True
    )
    listed = [
        (p.name, p.shape, p.cut and (p.cut.dim, [(c.rows, c.units) for c in p.cut.parts])) for p in inventory(model)
    ]
    assert listed == [
        ("embedding.weight", (11, 8), (0, [(11, 11)])),
        ("blocks.0.attention_norm.weight", (8,), None),
        ("blocks.0.attention.qkv.weight", (16, 8), (0, [(8, 4), (4, 2), (4, 2)])),
        ("blocks.0.attention.qkv.bias", (16,), (0, [(8, 4), (4, 2), (4, 2)])),
        ("blocks.0.attention.q_norm.weight", (2,), None),
        ("blocks.0.attention.k_norm.weight", (2,), None),
        ("blocks.0.attention.out.weight", (8, 8), (1, [(8, 4)])),
        ("blocks.0.mlp_norm.weight", (8,), None),
        ("blocks.0.mlp.gate_up.weight", (48, 8), (0, [(24, 24), (24, 24)])),
        ("blocks.0.mlp.gate_up.bias", (48,), (0, [(24, 24), (24, 24)])),
        ("blocks.0.mlp.down.weight", (8, 24), (1, [(24, 24)])),
        ("blocks.0.mlp.down.bias", (8,), None),
        ("head.weight", (11, 8), (0, [(11, 11)])),
        ("head.norm.weight", (8,), None),
    ]
    names = [
        p.name for p in inventory(ModelSpec(layers=1, norm="layernorm", positions="learned", mlp="gelu", tied=True))
    ]
    assert names == [
        "embedding.weight",
        "embedding.positions",
        "blocks.0.attention_norm.weight",
        "blocks.0.attention_norm.bias",
        "blocks.0.attention.qkv.weight",
        "blocks.0.attention.out.weight",
        "blocks.0.mlp_norm.weight",
        "blocks.0.mlp_norm.bias",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.down.weight",
        "head.norm.weight",
        "head.norm.bias",
    ]


def test_a_mixture_of_experts_is_listed_in_the_place_of_the_mlp():
    moe = MoESpec(experts=4, expert_ffn=6, shared_experts=2, shared_ffn=5, shared_gate=True, bias=True, first_dense=1)
    model = ModelSpec(layers=2, hidden=8, heads=2, ffn=24, vocab=11, moe=moe)
    listed = [
        (p.name.removeprefix("blocks.1.mlp."), p.shape, p.cut and (p.cut.dim, len(p.cut.parts)), p.experts)
        for p in inventory(model)
        if p.mixture
    ]
    assert listed == [
        ("router.weight", (4, 8), None, 0),
        ("experts.gate_up", (4, 12, 8), (1, 2), 4),
        ("experts.down", (4, 8, 6), (2, 1), 4),
        ("shared.gate_up.weight", (20, 8), (0, 2), 0),
        ("shared.down.weight", (8, 10), (1, 1), 0),
        ("shared_gate.weight", (1, 8), None, 0),
    ]
    assert all(p.decay and p.unit == "blocks.1" for p in inventory(model) if p.mixture)
    assert [p.std for p in inventory(model) if p.name.endswith("down")] == [0.02 / math.sqrt(4)]
    assert buffers(model) == {"blocks.1.mlp.router.bias": (4,)} and buffers(replace(model, moe=None)) == {}


def test_a_token_uses_some_experts_only():
    """Mixtral's 12.9 and Qwen3-30B-A3B's 3.3 thousand millions, less what is looked up and the norms."""
    for name, active in (("mixtral-8x7b", 12_879_925_248), ("qwen3-30b-a3b", 3_353_032_704)):
        model = preset(name)
        idle = model.vocab * model.hidden + sum(elements(p) for p in inventory(model) if not p.decay)
        attention = 12 * model.layers * model.heads * model.head_size * 4096 / 2
        assert flops_per_token(model, 4096) - attention == 6 * (active - idle)


@pytest.mark.parametrize("name", ["tiny", "gpt2", "smollm2-135m", "qwen3-0.6b", "mistral-7b"])
def test_transformers_builds_the_same_number_of_parameters(name):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    model = preset(name)
    shared = {"vocab_size": model.vocab, "tie_word_embeddings": model.tied}
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=model.hidden, n_layer=model.layers, n_head=model.heads, n_positions=model.positions_max, **shared
        )
    else:
        kind = {"qwen3-0.6b": transformers.Qwen3Config, "mistral-7b": transformers.MistralConfig}
        config = kind.get(name, transformers.LlamaConfig)(
            hidden_size=model.hidden,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads,
            head_dim=model.head_size,
            intermediate_size=model.ffn,
            **shared,
        )
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    assert built.num_parameters() == parameter_count(model)


def test_model_flops_of_a_known_model():
    model = preset("llama3.1-8b")
    matmul = 8_030_261_248 - 128256 * 4096 - 65 * 4096  # without the looked-up embedding and the norms
    assert flops_per_token(model, 8192) == 6 * matmul + 12 * 32 * 4096 * 8192 / 2
    tied = preset("gpt2")
    assert flops_per_token(tied, 1024) == 6 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1024 / 2


@given(models(), st.integers(1, 300))
def test_attention_flops_follow_the_keys_a_token_sees(model, sequence):
    window = model.window or sequence
    seen = sum(min(place + 1, window) for place in range(sequence)) / sequence
    linear = 6 * sum(elements(p) for p in inventory(model) if p.decay and p.name.startswith("blocks."))
    linear += 6 * model.vocab * model.hidden
    keys = (flops_per_token(model, sequence) - linear) / (12 * model.layers * model.heads * model.head_size)
    assert 0 < keys <= seen <= keys + 0.5 + 1e-9  # the closed form leaves out the half of the diagonal
