"""The decoder a person asks for: sizes and kinds, with everything that follows from them filled in. No torch."""

import math
from dataclasses import dataclass, field
from typing import Literal

from shoal.spec.errors import RequestError, alternatives, divisors
from shoal.spec.fields import check_fields, derived, described, resolve
from shoal.spec.moe import MoESpec


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021), plain or stretched as in Llama 3.1 or YaRN (Peng et al. 2023).

    attention_factor is resolved: 0.1 ln(factor) + 1 for yarn, else 1. Raises RequestError.
    """

    theta: float = described(10000.0, "base of the rotary frequencies", above=0)
    scaling: Literal["none", "llama3", "yarn"] = described("none", "how the frequencies are stretched to longer texts")
    factor: float = described(1.0, "by how much the context is stretched", low=1)
    original_positions: int = described(8192, "positions of the training before stretching, tokens", low=1)
    low_frequency_factor: float = described(
        1.0, "llama3: waves longer than original_positions over this are stretched in full", above=0
    )
    high_frequency_factor: float = described(
        4.0, "llama3: waves shorter than original_positions over this stay as they are", above=0
    )
    beta_fast: float = described(32.0, "yarn: dimensions that turn more often than this keep their frequency", above=0)
    beta_slow: float = described(1.0, "yarn: dimensions that turn less often than this are stretched in full", above=0)
    attention_factor: float = derived("yarn: factor on queries and keys; none = 0.1 ln(factor) + 1", above=0)

    def __post_init__(self) -> None:
        check_fields(self, "model.rope")
        resolve(self, attention_factor=0.1 * math.log(self.factor) + 1 if self.scaling == "yarn" else 1.0)
        for upper, lower in (("high_frequency_factor", "low_frequency_factor"), ("beta_fast", "beta_slow")):
            least = getattr(self, lower)
            if getattr(self, upper) <= least:
                name = f"model.rope.{upper}"
                raise RequestError(
                    name, f"{name} = {getattr(self, upper)} must exceed {lower} = {least}; {4 * least} would do"
                )


@dataclass(frozen=True)
class ModelSpec:
    """A decoder. kv_heads, head_size and ffn may be given as None and are resolved, so readers always see ints.

    moe: the experts that some layers have in the place of their MLP; None where all are dense. Raises RequestError when the
    sizes do not fit each other.
    """

    name: str = described("custom", "name of the model, for people")
    layers: int = described(4, "transformer blocks", low=1)
    hidden: int = described(256, "hidden size", low=1)
    heads: int = described(4, "query heads", low=1)
    kv_heads: int = derived("key and value heads, a divisor of heads; none = heads", low=1)
    head_size: int = derived("size of one head; none = hidden / heads", low=1)
    ffn: int = derived("width of the MLP; none = 4 hidden for gelu, about 8/3 hidden for swiglu", low=1)
    vocab: int = described(257, "token ids; 257 are the bytes and one end of document", low=1)
    positions_max: int = described(2048, "longest sequence, tokens", low=1)
    norm: Literal["rmsnorm", "layernorm"] = described("rmsnorm", "kind of norm")
    norm_eps: float = described(1e-5, "what norms add to the variance", above=0)
    positions: Literal["rope", "learned"] = described("rope", "how tokens know their place")
    rope: RopeSpec = field(default_factory=RopeSpec)
    mlp: Literal["swiglu", "gelu"] = described("swiglu", "kind of MLP; gelu is the tanh approximation")
    moe: MoESpec | None = None
    qk_norm: bool = described(False, "RMSNorm over head_size on queries and keys, before rope")
    qkv_bias: bool = described(False, "biases on queries, keys and values")
    output_bias: bool = described(False, "bias on attention's output")
    mlp_bias: bool = described(False, "biases in the MLP")
    tied: bool = described(False, "the head shares the embedding's weight")
    window: int | None = described(
        None, "sliding window: a token sees itself and window - 1 before it; none = all", low=1
    )
    dropout: float = described(0.0, "dropout on the embedding and both residual branches", low=0, below=1)
    init_std: float = described(
        0.02, "standard deviation of fresh matrices; projections into the residual divide it by sqrt(2 layers)", low=0
    )

    def __post_init__(self) -> None:
        check_fields(self, "model")
        resolve(self, kv_heads=self.heads, ffn=default_ffn(self.hidden, self.mlp))
        if self.heads % self.kv_heads:
            raise RequestError(
                "model.kv_heads",
                f"model.kv_heads = {self.kv_heads} does not divide the model's {self.heads} heads; "
                f"{alternatives(divisors(self.heads), self.kv_heads)} would",
            )
        if self.head_size is None and self.hidden % self.heads:
            even = 2 if self.positions == "rope" else 1
            sizes = [heads for heads in divisors(self.hidden) if self.hidden // heads % even == 0]
            raise RequestError(
                "model.heads",
                f"model.heads = {self.heads} does not divide model.hidden = {self.hidden} and no head_size is given; "
                f"{alternatives(sizes, self.heads) if sizes else 'a head_size such as 64'} would",
            )
        resolve(self, head_size=self.hidden // self.heads)
        if self.positions == "rope" and self.head_size % 2:
            raise RequestError(
                "model.head_size",
                f"model.head_size = {self.head_size} is odd, but rope turns pairs; {self.head_size + 1} would do "
                f"(not given, it is hidden / heads)",
            )
        if self.moe:
            self._check_experts(self.moe)

    def _check_experts(self, moe: MoESpec) -> None:
        if self.mlp != "swiglu":
            raise RequestError(
                "model.mlp", f"model.mlp = {self.mlp} is no kind that experts have; swiglu would do, or no model.moe"
            )
        if moe.first_dense >= self.layers:
            raise RequestError(
                "model.moe.first_dense",
                f"model.moe.first_dense = {moe.first_dense} leaves none of the {self.layers} layers experts; "
                f"at most {self.layers - 1} would do",
            )
        if not self.mixtures:
            raise RequestError(
                "model.moe.every",
                f"model.moe.every = {moe.every} gives none of the {self.layers} layers experts; 1 would do",
            )

    @property
    def mixtures(self) -> list[int]:
        """The layers that have experts."""
        return [layer for layer in range(self.layers) if self.moe and self.moe.at(layer)]


def default_ffn(hidden: int, mlp: str) -> int:
    """Width of the MLP that a model has when none is given: the same number of weights for both kinds, about.

    gelu: 4 hidden. swiglu has three matrices, so 8/3 hidden (Shazeer 2020), rounded up to a multiple of 64, of 8 below
    256 hidden.
    """
    if mlp == "gelu":
        return 4 * hidden
    step = 64 if hidden >= 256 else 8
    return -(-8 * hidden // (3 * step)) * step
