"""What a transformer block keeps from forward for backward, in bytes, in closed form (spec BG-5, SP-3). No torch.

Exact for the block that model/block.py builds, run eagerly on CPUs with torch's fused attention over a sequence that no
context ranks share. `published_bytes` has the formulas of Korthikanti et al. 2022 for theirs; with 2-byte elements a GPT
block here keeps the same 34 s b h, and for the softmax's 5 a s^2 b only the logarithms of its sums, 4 a s b.
"""

from dataclasses import dataclass

from shoal.axes.tensor.cost import Axis, Shape
from shoal.spec.model import ModelSpec

MASK = 1  # bytes of a mask's element
INDEX = 8  # bytes of an id or a place
LEAST_BAND = 128  # queries of one band of model/attention.py: narrower ones keep no processor busy


@dataclass(frozen=True)
class Activations:
    """Bytes that one rank keeps of one block and one micro-batch, by what divides them; t: tensor ranks.

    between: what lies between layer pairs, inputs of both norms with their statistics and both dropout masks: divided
    by t with sequence parallelism, else whole on every rank. entered: the inputs of both column layers: whole on every
    rank, divided by t with `regather`. inside: everything between a column layer and its row layer: always divided by
    t, but for KV heads that are fewer than ranks. mask: attention's mask, of a window or of documents, never divided.
    """

    between: int
    entered: int
    inside: int
    mask: int

    @property
    def total(self) -> int:
        return self.between + self.entered + self.inside + self.mask


def block_activations(
    model: ModelSpec, shape: Shape, axis: Axis, documents: bool = False, mlp: bool = True
) -> Activations:
    """What autograd keeps of one block's forward on a rank of the tensor axis, the block's input included.

    documents: whether attention sees only tokens of the same document. mlp: False leaves out the MLP and what enters it,
    where experts take its place. Weights and the rotation of rope, which all blocks share, do not count.
    """
    tokens = shape.b * shape.s
    part = tokens // axis.ranks if axis.sequence else tokens
    hidden = 2 * shape.h * shape.width  # of a token, at the entry of both pairs
    masks = 2 * shape.h * MASK if model.dropout else 0
    entered = part if axis.regather else tokens
    inner = _mlp(model, axis.ranks) if mlp else 0
    queries, mask = masked_products(model, shape.s, documents), shape.width * (shape.b if documents else 1)
    return Activations(
        between=part * (hidden + 2 * _statistics(model, shape.width) + masks),
        entered=entered * (hidden if mlp else hidden // 2),
        inside=tokens * (_attention(model, shape, axis.ranks, documents) + inner * shape.width),
        mask=mask * sum(rows * keys for rows, keys in queries),
    )


def end_activations(model: ModelSpec, shape: Shape, axis: Axis) -> tuple[int, int]:
    """What autograd keeps of the forward of (the embedding, the last norm and the loss), every target counted.

    Embedding: the ids looked up, which of them others keep, learned places, a dropout mask. Loss: its gradients are made in
    forward, that of the normed states whole and that of the head's weight in float32 at least.
    """
    tokens = shape.b * shape.s
    part = tokens // axis.ranks if axis.sequence else tokens
    embedding = tokens * (INDEX + (MASK if axis.ranks > 1 else 0)) + (part * shape.h * MASK if model.dropout else 0)
    embedding += shape.s * INDEX if model.positions == "learned" else 0
    normed = part * (shape.h * shape.width + _statistics(model, shape.width))
    loss = tokens * shape.h * shape.width + -(-model.vocab // axis.ranks) * shape.h * max(4, shape.width)
    return embedding, normed + loss


def _statistics(model: ModelSpec, width: int) -> int:
    """Bytes per token that a norm keeps beside its input: RMSNorm's 1 / rms, LayerNorm's mean and 1 / deviation."""
    return max(4, width) if model.norm == "rmsnorm" else 2 * width


def _attention(model: ModelSpec, shape: Shape, ranks: int, documents: bool) -> int:
    """Bytes per token between the projection of queries, keys and values and the one of the output."""
    heads, kv_heads, accurate = model.heads // ranks, max(1, model.kv_heads // ranks), max(4, shape.width)
    bands = masked_products(model, shape.s, documents)
    repeated = bool(bands) and heads != kv_heads  # masked attention takes one KV head for every query head
    turned = model.qk_norm or model.positions == "rope"  # queries and keys are made anew from the projection
    elements = heads  # the output
    if len(bands) > 1:
        elements += heads  # the bands' outputs, and the same joined
    if model.qk_norm or not turned:
        elements += heads + 2 * kv_heads  # the projection, as long as backward needs queries or keys as they were
    elif not repeated:
        elements += kv_heads  # else the values alone
    if turned:
        elements += heads
    if repeated:
        elements += 2 * heads
    elif turned:
        elements += kv_heads
    statistics = heads + (heads + kv_heads if model.qk_norm else 0)  # of the softmax, and of norms over heads
    return elements * model.head_size * shape.width + statistics * accurate


def _mlp(model: ModelSpec, ranks: int) -> int:
    """Elements per token between the MLP's two layers: gate, up and their product, or up and its GELU."""
    return (3 if model.mlp == "swiglu" else 2) * -(-model.ffn // ranks)


def masked_products(model: ModelSpec, s: int, documents: bool) -> list[tuple[int, int]]:
    """(queries, keys) of each masked product that attention makes; empty where it is causal and nothing else."""
    window = model.window if model.window and model.window < s else None
    if window is None:
        return [(s, s)] if documents else []
    band = max(window, LEAST_BAND)
    if s <= 2 * band:
        return [(s, s)]
    starts = range(0, s, band)
    return [(min(band, s - start), min(start + band, s) - max(0, start - window + 1)) for start in starts]


def published_bytes(b, s, h, a, t=1, *, sequence: bool = False, recompute: str = "none"):
    """Bytes of one layer's activations after Korthikanti et al. 2022, their equations 1 to 6; numbers or NumPy arrays.

    For GPT with GELU, ffn = 4 h, dropout and attention of separate operations, 2-byte elements and 1-byte masks. b, s, h, a:
    micro-batch, sequence, hidden, heads; t: tensor ranks. sequence: with sequence parallelism, where each rank keeps
    its part of every input. recompute: "selective" computes the inside of attention again, "full" the whole layer.
    """
    whole, divided, softmax = 10, 24, 5 * a * s / h
    if recompute == "full":
        whole, divided, softmax = 2, 0, 0
    elif recompute == "selective":
        softmax = 0
    return s * b * h * (whole / (t if sequence else 1) + (divided + softmax) / t)
