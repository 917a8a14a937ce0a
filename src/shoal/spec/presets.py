"""Models and machines by name, as the fields that make them. What follows from other fields is left out, so it follows.

Figures are those of the publishers' configuration files and data sheets, named above each entry; tests hold the parameter
counts against transformers and against counts worked out by hand.
"""

from typing import Any

_LLAMA3 = {"vocab": 128256, "norm_eps": 1e-5, "kv_heads": 8}
_LLAMA31 = {
    **_LLAMA3,
    "positions_max": 131072,
    "rope": {
        "theta": 500000.0,
        "scaling": "llama3",
        "factor": 8.0,
        "original_positions": 8192,
        "low_frequency_factor": 1.0,
        "high_frequency_factor": 4.0,
    },
}

MODELS: dict[str, dict[str, Any]] = {
    # Ours: small enough for a test on a few processes, with grouped KV heads so that tests see them.
    "tiny": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 257, "positions_max": 512},
    # Ours: 4.9 million parameters, which learn to write something like code within a minute on two cores.
    "demo": {"layers": 6, "hidden": 256, "heads": 4, "vocab": 257, "positions_max": 1024, "tied": True},
    # config.json of openai-community/gpt2; its dropout on attention weights (0.1 as well) has no counterpart here.
    "gpt2": {
        "layers": 12,
        "hidden": 768,
        "heads": 12,
        "vocab": 50257,
        "positions_max": 1024,
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "positions": "learned",
        "mlp": "gelu",
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tied": True,
        "dropout": 0.1,
    },
    # config.json of HuggingFaceTB/SmolLM2-135M; initializer_range is 1/24.
    "smollm2-135m": {
        "layers": 30,
        "hidden": 576,
        "heads": 9,
        "kv_heads": 3,
        "ffn": 1536,
        "vocab": 49152,
        "positions_max": 8192,
        "norm_eps": 1e-5,
        "rope": {"theta": 100000.0},
        "tied": True,
        "init_std": 1 / 24,
    },
    # config.json of meta-llama/Meta-Llama-3-8B and of the Llama-3.1 models (405B in its later form, with 8 KV heads).
    "llama3-8b": {
        **_LLAMA3,
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "ffn": 14336,
        "positions_max": 8192,
        "rope": {"theta": 500000.0},
    },
    "llama3.1-8b": {**_LLAMA31, "layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336},
    "llama3.1-70b": {**_LLAMA31, "layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672},
    "llama3.1-405b": {**_LLAMA31, "layers": 126, "hidden": 16384, "heads": 128, "ffn": 53248},
    # config.json of Qwen/Qwen3-0.6B.
    "qwen3-0.6b": {
        "layers": 28,
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 8,
        "head_size": 128,
        "ffn": 3072,
        "vocab": 151936,
        "positions_max": 40960,
        "norm_eps": 1e-6,
        "rope": {"theta": 1000000.0},
        "qk_norm": True,
        "tied": True,
    },
    # config.json of mistralai/Mistral-7B-v0.1.
    "mistral-7b": {
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 14336,
        "vocab": 32000,
        "positions_max": 32768,
        "norm_eps": 1e-5,
        "rope": {"theta": 10000.0},
        "window": 4096,
    },
    # Ours: `tiny` and `demo` with experts, which take a fresh layout such as ep=2 where no other model is asked for.
    "moe-tiny": {
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 257,
        "positions_max": 512,
        "moe": {"experts": 8, "top_k": 2, "expert_ffn": 64, "shared_experts": 1, "aux_loss": 0.01, "z_loss": 0.001},
    },
    "moe-demo": {
        "layers": 6,
        "hidden": 256,
        "heads": 4,
        "vocab": 257,
        "positions_max": 1024,
        "tied": True,
        "moe": {"experts": 8, "top_k": 2, "expert_ffn": 352, "aux_loss": 0.01, "z_loss": 0.001},
    },
    # config.json of mistralai/Mixtral-8x7B-v0.1 and of Qwen/Qwen3-30B-A3B. aux_loss: router_aux_loss_coef, of a loss that
    # transformers takes over all layers at once, where here each layer has one.
    "mixtral-8x7b": {
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "vocab": 32000,
        "positions_max": 32768,
        "norm_eps": 1e-5,
        "rope": {"theta": 1000000.0},
        "moe": {"experts": 8, "top_k": 2, "expert_ffn": 14336, "aux_loss": 0.02},
    },
    "qwen3-30b-a3b": {
        "layers": 48,
        "hidden": 2048,
        "heads": 32,
        "kv_heads": 4,
        "head_size": 128,
        "ffn": 6144,
        "vocab": 151936,
        "positions_max": 40960,
        "norm_eps": 1e-6,
        "rope": {"theta": 1000000.0},
        "qk_norm": True,
        "moe": {"experts": 128, "top_k": 8, "expert_ffn": 768, "aux_loss": 0.001},
    },
}

# Peak of one device for matrix products, dense, TFLOP/s. float64 is the tensor cores'; float32 is without TF32, which
# torch leaves off unless told otherwise. Sheets print bfloat16 with sparsity, twice what is given here.
MACHINES: dict[str, dict[str, float]] = {
    "a100": {"float64": 19.5, "float32": 19.5, "bfloat16": 312.0},  # NVIDIA A100 data sheet, SXM
    "h100": {"float64": 67.0, "float32": 67.0, "bfloat16": 989.0},  # NVIDIA H100 data sheet, SXM
    "h200": {"float64": 67.0, "float32": 67.0, "bfloat16": 989.0},  # NVIDIA H200 data sheet, SXM
    "b200": {"float64": 37.0, "float32": 75.0, "bfloat16": 2250.0},  # NVIDIA Blackwell data sheet, one GPU of HGX B200
}
