"""The parameters of a model: names, shapes, how they start and where the tensor axis may cut them. No torch.

The decoder is built to this list and the cost formulas read it, so plan and run agree on every parameter.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shoal.spec.model import ModelSpec
from shoal.spec.moe import MoESpec


@dataclass(frozen=True)
class Part:
    """A run of `rows` along the cut dim that holds `units` (heads, ffn columns, token ids) which stay whole.

    shared: ranks may keep the same unit where there are fewer units than ranks, as for KV heads.
    """

    rows: int
    units: int
    shared: bool = False


@dataclass(frozen=True)
class Cut:
    """How the tensor axis may cut a parameter: along `dim`, every part (q, k, v; gate, up) by whole units."""

    dim: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Parameter:
    """One parameter. unit: what ZeRO-3 gathers at once and what a pipeline places; decay: whether weight decay applies.

    std: standard deviation for init "normal", else 0. cut: None when every tensor rank keeps all of it. mixture: whether it
    belongs to a mixture of experts, which expert-tensor ranks cut in the place of tensor ranks; experts: how many experts
    lie along its dim 0, of which every expert rank keeps a part, or 0.
    """

    name: str
    shape: tuple[int, ...]
    unit: str
    decay: bool
    init: Literal["normal", "ones", "zeros"]
    std: float
    cut: Cut | None
    mixture: bool = False
    experts: int = 0


def elements(parameter: Parameter) -> int:
    """Number of elements of a parameter."""
    return math.prod(parameter.shape)


def used(parameter: Parameter, model: ModelSpec) -> float:
    """Elements of a parameter that one token uses: of experts those that it chooses."""
    share = model.moe.top_k / parameter.experts if model.moe and parameter.experts else 1
    return elements(parameter) * share


def inventory(model: ModelSpec) -> list[Parameter]:
    """Every parameter, in the decoder's order. Linear weights are (out, in)."""
    vocabulary = Cut(0, (Part(model.vocab, model.vocab),))
    parameters = [_matrix("embedding.weight", (model.vocab, model.hidden), "embedding", model.init_std, vocabulary)]
    if model.positions == "learned":
        shape = (model.positions_max, model.hidden)
        parameters.append(_matrix("embedding.positions", shape, "embedding", model.init_std, None))
    for layer in range(model.layers):
        parameters += _block(model, layer)
    if not model.tied:
        parameters.append(_matrix("head.weight", (model.vocab, model.hidden), "head", model.init_std, vocabulary))
    parameters += _norm(model.norm, "head.norm", model.hidden, "head")
    return parameters


def parameter_count(model: ModelSpec) -> int:
    """Number of parameters; a tied head counts once."""
    return sum(map(elements, inventory(model)))


def flops_per_token(model: ModelSpec, sequence: int) -> float:
    """Model FLOPs of forward and backward per token (Narayanan et al. 2021, but causal): what utilisation counts.

    6 per weight of a matrix product that a token uses, the head's included (tied or not), looked-up embeddings not; and
    12 x layers x heads x head_size x k for attention's two products, where k is the mean number of keys that a token
    sees: sequence / 2, or w - w^2 / (2 sequence) with a window of w < sequence. Norms, softmax and recomputation count
    nothing.
    """
    looked_up = ("embedding.weight", "embedding.positions")
    products = sum(used(p, model) for p in inventory(model) if p.decay and p.name not in looked_up)
    if model.tied:
        products += model.vocab * model.hidden
    seen = min(model.window or sequence, sequence)
    keys = seen - seen * seen / (2 * sequence)
    return 6.0 * products + 12.0 * model.layers * model.heads * model.head_size * keys


def buffers(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """What a model keeps beside its parameters, by name: (shape) of routing biases, in float32 at least, which start at 0."""
    if model.moe is None or not model.moe.bias:
        return {}
    return {f"blocks.{layer}.mlp.router.bias": (model.moe.experts,) for layer in model.mixtures}


def _block(model: ModelSpec, layer: int) -> Iterator[Parameter]:
    """The parameters of one transformer block."""
    block = f"blocks.{layer}"
    h, f, d = model.hidden, model.ffn, model.head_size
    a, g = model.heads, model.kv_heads
    std, residual_std = model.init_std, model.init_std / math.sqrt(2 * model.layers)
    q, kv, columns = Part(a * d, a), Part(g * d, g, shared=True), Part(f, f)

    yield from _norm(model.norm, f"{block}.attention_norm", h, block)
    yield from _linear(f"{block}.attention.qkv", (a + 2 * g) * d, h, block, std, Cut(0, (q, kv, kv)), model.qkv_bias)
    if model.qk_norm:
        yield from _norm("rmsnorm", f"{block}.attention.q_norm", d, block)
        yield from _norm("rmsnorm", f"{block}.attention.k_norm", d, block)
    yield from _linear(f"{block}.attention.out", h, a * d, block, residual_std, Cut(1, (q,)), model.output_bias)
    yield from _norm(model.norm, f"{block}.mlp_norm", h, block)
    if model.moe and model.moe.at(layer):
        yield from _mixture(model.moe, h, block, std, residual_std)
        return
    if model.mlp == "swiglu":
        yield from _linear(f"{block}.mlp.gate_up", 2 * f, h, block, std, Cut(0, (columns, columns)), model.mlp_bias)
    else:
        yield from _linear(f"{block}.mlp.up", f, h, block, std, Cut(0, (columns,)), model.mlp_bias)
    yield from _linear(f"{block}.mlp.down", h, f, block, residual_std, Cut(1, (columns,)), model.mlp_bias)


def _mixture(moe: MoESpec, h: int, block: str, std: float, residual_std: float) -> Iterator[Parameter]:
    """The parameters of a layer's mixture of experts; gate before up in each."""

    def matrix(name: str, shape: tuple[int, ...], std: float, cut: Cut | None, experts: int = 0) -> Parameter:
        return Parameter(f"{block}.mlp.{name}", shape, block, True, "normal", std, cut, True, experts)

    e, f, width = moe.experts, moe.expert_ffn, moe.shared_width
    columns, shared = Part(f, f), Part(width, width)
    yield matrix("router.weight", (e, h), std, None)
    yield matrix("experts.gate_up", (e, 2 * f, h), std, Cut(1, (columns, columns)), e)
    yield matrix("experts.down", (e, h, f), residual_std, Cut(2, (columns,)), e)
    if width:
        yield matrix("shared.gate_up.weight", (2 * width, h), std, Cut(0, (shared, shared)))
        yield matrix("shared.down.weight", (h, width), residual_std, Cut(1, (shared,)))
    if moe.shared_gate:
        yield matrix("shared_gate.weight", (1, h), std, None)


def _linear(name: str, rows: int, columns: int, unit: str, std: float, cut: Cut, bias: bool) -> Iterator[Parameter]:
    """A weight (rows, columns) and, if asked for, its bias, which is cut only where the outputs are."""
    yield _matrix(f"{name}.weight", (rows, columns), unit, std, cut)
    if bias:
        yield Parameter(f"{name}.bias", (rows,), unit, False, "zeros", 0.0, cut if cut.dim == 0 else None)


def _matrix(name: str, shape: tuple[int, int], unit: str, std: float, cut: Cut | None) -> Parameter:
    return Parameter(name, shape, unit, True, "normal", std, cut)


def _norm(kind: str, name: str, size: int, unit: str) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (size,), unit, False, "ones", 0.0, None)
    if kind == "layernorm":
        yield Parameter(f"{name}.bias", (size,), unit, False, "zeros", 0.0, None)
