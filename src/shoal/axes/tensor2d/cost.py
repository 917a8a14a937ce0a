"""What two-dimensional tensor parallelism costs, in closed form: transfers, weights, activations (spec 2D-1, 2D-2).

A grid of q x q ranks; rank (i, j) is number i q + j. A layer Y = X W^T on it moves, per rank, sent and received alike,

    forward   (q - 1) / q^2 (|X| + |W|)      X along the row, W along the column
    backward  2 (q - 1) / q^2 (|X| + |W|)    W and the sums of dX; X and the sums of dW; dY stays

exactly, since each of the q blocks is passed along a chain whose last rank sends nothing and whose first receives
nothing, and every rank is each of them once. Weights travel too, which one dimension never asks for: its price is of
activations alone. Sizes are bytes or elements as named. No torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.axes.tensor.cost import Axis, Shape, chunk_rows
from shoal.axes.tensor.cost import block_transfers as block_transfers_1d
from shoal.axes.tensor.memory import INDEX, MASK, block_activations
from shoal.spec.model import ModelSpec
from shoal.transfer import Transfer, traffic


@dataclass(frozen=True)
class Grid:
    """A micro-batch on a q x q grid, seen from rank (row, column).

    b: sequences of s tokens, which side divides; width: bytes per element of weights and activations.
    """

    side: int
    row: int
    column: int
    b: int
    s: int
    width: int

    @property
    def tokens(self) -> int:
        """Tokens of this rank: those of its row."""
        return self.b // self.side * self.s

    @property
    def accurate(self) -> int:
        """Bytes per element of statistics: float32 at least."""
        return max(4, self.width)

    def moves(self, phase: str, axis: str, op: str, elements: int, width: int, **place: int | None) -> Transfer:
        """One collective over a tensor of `elements` whole elements, along "row" or "column"."""
        rank = self.column if axis == "row" else self.row
        sent, received = traffic(op, elements, width, self.side, rank)
        return Transfer(phase, axis, op, sent, received, 1, **place)

    def passes(self, phase: str, axis: str, op: str, block: int, **place: int | None) -> Transfer:
        """Each rank's block of `block` elements once to, or as a sum from, all the others of the axis."""
        bytes_ = (self.side - 1) * block * self.width
        return Transfer(phase, axis, op, bytes_, bytes_, self.side, **place)


def features(model: ModelSpec, side: int) -> dict[str, tuple[int, int, bool]]:
    """(inputs, outputs, bias) of one rank's blocks of the linear layers of a transformer block, padding included."""
    h, heads = model.hidden // side, model.heads // side
    kv_heads, ffn = max(1, model.kv_heads // side), -(-model.ffn // side)
    first = {"swiglu": ("mlp.gate_up", 2 * ffn), "gelu": ("mlp.up", ffn)}[model.mlp]
    return {
        "attention.qkv": (h, (heads + 2 * kv_heads) * model.head_size, model.qkv_bias),
        "attention.out": (heads * model.head_size, h, model.output_bias),
        first[0]: (h, first[1], model.mlp_bias),
        "mlp.down": (ffn, h, model.mlp_bias),
    }


def linear_transfers(grid: Grid, inputs: int, outputs: int, **place: int | None) -> Iterator[Transfer]:
    """Transfers of one linear layer, forward and backward; inputs, outputs: features of one rank's blocks (2D-2)."""
    if grid.side == 1:
        return
    x, weight = grid.tokens * inputs, outputs * inputs
    yield grid.passes("forward", "row", "broadcast", x, **place)
    yield grid.passes("forward", "column", "broadcast", weight, **place)
    yield grid.passes("backward", "column", "broadcast", weight, **place)
    yield grid.passes("backward", "row", "reduce", x, **place)
    yield grid.passes("backward", "row", "broadcast", x, **place)
    yield grid.passes("backward", "column", "reduce", weight, **place)


def norm_transfers(grid: Grid, kind: str, **place: int | None) -> Iterator[Transfer]:
    """Transfers of a norm over hidden: per token one sum of squares, and back one sum; of LayerNorm two of each."""
    if grid.side == 1:
        return
    if kind == "rmsnorm":
        yield grid.moves("forward", "row", "all_reduce", grid.tokens, grid.accurate, **place)
        yield grid.moves("backward", "row", "all_reduce", grid.tokens, grid.accurate, **place)
    else:
        yield grid.moves("forward", "row", "all_gather", grid.side * 2 * grid.tokens, grid.accurate, **place)
        yield grid.moves("backward", "row", "all_reduce", 2 * grid.tokens, grid.accurate, **place)


def block_transfers(grid: Grid, model: ModelSpec, layer: int, micro_batch: int) -> Iterator[Transfer]:
    """Transfers of one transformer block for one micro-batch: four layers and two norms. Attention needs none."""
    place = {"layer": layer, "micro_batch": micro_batch}
    for _ in range(2):
        yield from norm_transfers(grid, model.norm, **place)
    for inputs, outputs, _ in features(model, grid.side).values():
        yield from linear_transfers(grid, inputs, outputs, **place)


def embedding_transfers(grid: Grid, model: ModelSpec, micro_batch: int) -> Iterator[Transfer]:
    """Transfers of the embedding: sums of what each rank of a row found, and a swap of (i, j) with (j, i); and back."""
    if grid.side == 1:
        return
    block = grid.tokens * model.hidden // grid.side
    for phase, op in (("forward", "reduce"), ("backward", "broadcast")):
        yield grid.passes(phase, "row", op, block, micro_batch=micro_batch)
        if grid.row != grid.column:
            yield Transfer(phase, "tp", "send", block * grid.width, 0, micro_batch=micro_batch)
            yield Transfer(phase, "tp", "receive", 0, block * grid.width, micro_batch=micro_batch)


def head_transfers(grid: Grid, model: ModelSpec, micro_batch: int) -> Iterator[Transfer]:
    """Transfers of the last norm, the head and the loss.

    Those of a linear layer, X gathered from the row and W slice by slice from the column; three numbers per token for
    the softmax, whatever the vocabulary; and the loss itself.
    """
    if grid.side == 1:
        return
    place = {"micro_batch": micro_batch}
    q, h, rows = grid.side, model.hidden // grid.side, -(-model.vocab // grid.side)
    yield from norm_transfers(grid, model.norm, **place)
    for phase in ("forward", "backward"):
        yield grid.moves(phase, "row", "all_gather", q * grid.tokens * h, grid.width, **place)
        for here in slices(rows, grid.tokens, q):
            yield grid.moves(phase, "column", "all_gather", q * here * h, grid.width, **place)
            if phase == "backward":
                yield grid.moves(phase, "column", "reduce_scatter", q * here * h, grid.width, **place)
    yield grid.moves("backward", "row", "reduce_scatter", q * grid.tokens * h, grid.width, **place)
    for numbers in (grid.tokens, 2 * grid.tokens):  # the largest; the sum of exponentials and the target's logit
        yield grid.moves("forward", "row", "all_reduce", numbers, grid.accurate, **place)
    yield grid.moves("forward", "column", "all_reduce", 1, grid.accurate, **place)


def micro_batch_transfers(grid: Grid, model: ModelSpec, micro_batch: int) -> Iterator[Transfer]:
    """Transfers of the whole decoder for one micro-batch, forward and backward."""
    yield from embedding_transfers(grid, model, micro_batch)
    for layer in range(model.layers):
        yield from block_transfers(grid, model, layer, micro_batch)
    yield from head_transfers(grid, model, micro_batch)


def slice_rows(rows: int, tokens: int, side: int) -> int:
    """Ids whose logits a rank forms at once, for all its tokens, out of the `rows` it keeps.

    As many logits as one dimension's chunk of tokens has, and never more weights, gathered from the column, than are in
    one block of its own.
    """
    return min(chunk_rows(tokens), -(-rows // side))


def slices(rows: int, tokens: int, side: int) -> list[int]:
    """Lengths of the slices of a rank's ids."""
    step = slice_rows(rows, tokens, side)
    return [min(step, rows - start) for start in range(0, rows, step)]


def weight_elements(model: ModelSpec, side: int) -> int:
    """Elements of every parameter that one rank keeps, padding included: 1 / q^2 of the matrices.

    Vectors over features are kept by every row of the grid (1 / q of them), norms over a head by all, and fewer KV heads
    than columns by q / kv_heads of these.
    """
    h, norm = model.hidden // side, 2 if model.norm == "layernorm" else 1
    layers = sum(inputs * outputs + outputs * bias for inputs, outputs, bias in features(model, side).values())
    block = layers + 2 * norm * h + 2 * model.head_size * model.qk_norm
    tables = -(-model.vocab // side) * (1 if model.tied else 2) + model.positions_max * (model.positions == "learned")
    return model.layers * block + tables * h + norm * h


def activation_bytes(grid: Grid, model: ModelSpec, documents: bool = False) -> int:
    """Bytes that one transformer block keeps from forward to backward on this rank, as axes/tensor/memory.py counts.

    Inside of attention and MLP, what one dimension of q ranks would keep of this rank's samples. Between layers its
    block of what one dimension keeps whole: the inputs of both norms and, normed, of two layers (4 h per token), and two
    dropout masks; the norms' statistics are those of all features. Matrices of activations so take 1 / q^2.
    """
    own = Shape(grid.b // grid.side, grid.s, model.hidden, grid.width)
    inside = block_activations(model, own, Axis(grid.side, 0), documents)
    h, statistics = model.hidden // grid.side, 4 if model.norm == "layernorm" else 2
    masks = 2 * h * MASK if model.dropout else 0
    return inside.inside + inside.mask + grid.tokens * (4 * h * grid.width + statistics * grid.accurate + masks)


def end_activations(grid: Grid, model: ModelSpec) -> tuple[int, int]:
    """What autograd keeps of the forward of (the embedding, the last norm and the loss) on this rank.

    Of the ids, learned places and targets everything, since parts of them are views; of the last blocks' output, the normed
    states and the masks this rank's block; statistics of the norm, and two numbers per token of the softmax.
    """
    h, ids = model.hidden // grid.side, grid.b * grid.s * INDEX
    statistics = 2 if model.norm == "layernorm" else 1
    embedding = ids + (grid.tokens * h * MASK if model.dropout else 0)
    embedding += grid.s * INDEX if model.positions == "learned" else 0
    return embedding, ids + grid.tokens * (2 * h * grid.width + (statistics + 2) * grid.accurate)


def passing_bytes(grid: Grid, model: ModelSpec) -> int:
    """The most bytes of other ranks' blocks that a layer of a transformer block holds at once: one of X and one of W."""
    if grid.side == 1:
        return 0
    sizes = [grid.tokens * inputs + inputs * outputs for inputs, outputs, _ in features(model, grid.side).values()]
    return max(sizes) * grid.width


def block_bytes(grid: Grid, model: ModelSpec) -> tuple[int, int]:
    """Bytes that a rank sends for one transformer block and micro-batch, forward and backward: (in 2D, in 1D).

    One dimension over the same q^2 ranks moves no weights, but sums whole activations four times, whatever the number
    of ranks (TP-6); here both shrink with q. So 2D sends less where a micro-batch has many tokens.
    """
    rank = grid.row * grid.side + grid.column
    one = block_transfers_1d(Shape(grid.b, grid.s, model.hidden, grid.width), Axis(grid.side**2, rank), 0, 0)
    return sum(t.sent for t in block_transfers(grid, model, 0, 0)), sum(t.sent for t in one)
