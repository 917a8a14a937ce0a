"""What tensor and sequence parallelism cost, in closed form: transfers, weights, activations (spec TP-4, TP-6, TP-7, SP-2).

In a group of one everything is silent. Sizes are bytes or elements as named. No torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.spec.model import ModelSpec
from shoal.transfer import Transfer, traffic

LOGITS = 2**22  # of one chunk of the loss: 16 MB in float32
LEAST_ROWS = 512  # tokens of one chunk: fewer make the three matrix products slow
SCALAR = 8  # bytes: the squares of a norm travel as one float64


@dataclass(frozen=True)
class Shape:
    """Activations of one micro-batch: b sequences of s tokens, hidden h, `width` bytes per element."""

    b: int
    s: int
    h: int
    width: int

    @property
    def elements(self) -> int:
        return self.b * self.s * self.h


@dataclass(frozen=True)
class Axis:
    """The tensor axis seen from one rank: its ranks, this one's number, and what sequence parallelism does."""

    ranks: int
    rank: int
    sequence: bool = False
    regather: bool = False

    def moves(self, phase: str, op: str, elements: int, width: int, calls: int = 1, **place: int | None) -> Transfer:
        """`calls` collectives over tensors of `elements` whole elements."""
        sent, received = traffic(op, elements, width, self.ranks, self.rank)
        return Transfer(phase, "tp", op, calls * sent, calls * received, calls, **place)


def chunk_rows(vocabulary: int) -> int:
    """Tokens whose loss is computed at once by a rank that keeps `vocabulary` ids, padding included."""
    return max(LEAST_ROWS, LOGITS // vocabulary)


def linear_transfers(kind: str, inputs: int, outputs: int, ranks: int, rank: int, width: int) -> Iterator[Transfer]:
    """Transfers of one linear layer, forward and backward, in each of the five arrangements of spec TP-4.

    kind: "column", "column, gathered", "row", "row, split", "pair" (column then row); inputs, outputs: elements of X and Y.
    """
    axis = Axis(ranks, rank)
    if ranks == 1:
        return
    if kind == "column, gathered":
        yield axis.moves("forward", "all_gather", outputs, width)
    if kind in ("row", "row, split", "pair"):
        yield axis.moves("forward", "all_reduce", outputs, width)
    if kind in ("column", "column, gathered", "pair"):
        yield axis.moves("backward", "all_reduce", inputs, width)
    if kind == "row, split":
        yield axis.moves("backward", "all_gather", inputs, width)


def block_transfers(shape: Shape, axis: Axis, layer: int, micro_batch: int, pairs: int = 2) -> Iterator[Transfer]:
    """Transfers of one transformer block for one micro-batch (spec TP-6, SP-2).

    One conjugate pair around attention, one around the MLP: 2 all-reduces forward and 2 backward, or in their place 2
    all-gathers and 2 reduce-scatters each; `regather` gathers both inputs once more in backward. pairs: 1 where experts,
    which move what they need, are in the MLP's place.
    """
    place = {"layer": layer, "micro_batch": micro_batch}
    for phase in ("forward", "backward"):
        if axis.sequence:
            gathers = 2 * pairs if axis.regather and phase == "backward" else pairs
            yield axis.moves(phase, "all_gather", shape.elements, shape.width, gathers, **place)
            yield axis.moves(phase, "reduce_scatter", shape.elements, shape.width, pairs, **place)
        else:
            yield axis.moves(phase, "all_reduce", shape.elements, shape.width, pairs, **place)


def embedding_transfers(shape: Shape, axis: Axis, micro_batch: int) -> Iterator[Transfer]:
    """Transfers of the embedding cut over the vocabulary: the sum of what each rank found, and its conjugate (TP-7)."""
    place = {"micro_batch": micro_batch}
    if axis.sequence:
        yield axis.moves("forward", "reduce_scatter", shape.elements, shape.width, **place)
        yield axis.moves("backward", "all_gather", shape.elements, shape.width, **place)
    else:
        yield axis.moves("forward", "all_reduce", shape.elements, shape.width, **place)


def head_transfers(shape: Shape, axis: Axis, vocabulary: int, micro_batch: int) -> Iterator[Transfer]:
    """Transfers of the head and the loss (TP-7): hidden states, and three numbers per token whatever the vocabulary.

    vocabulary: of the whole model; it only decides how many tokens a chunk has, so how many calls there are.
    """
    place = {"micro_batch": micro_batch}
    if axis.sequence:
        yield axis.moves("forward", "all_gather", shape.elements, shape.width, **place)
        yield axis.moves("backward", "reduce_scatter", shape.elements, shape.width, **place)
    else:
        yield axis.moves("backward", "all_reduce", shape.elements, shape.width, **place)
    tokens, chunk = shape.b * shape.s, chunk_rows(-(-vocabulary // axis.ranks))
    for start in range(0, tokens, chunk):
        rows = min(chunk, tokens - start)
        for numbers in (rows, 2 * rows):  # the largest; the sum of exponentials and the target's logit
            yield axis.moves("forward", "all_reduce", numbers, max(4, shape.width), **place)


def micro_batch_transfers(shape: Shape, axis: Axis, model: ModelSpec, micro_batch: int) -> Iterator[Transfer]:
    """Transfers of the whole decoder for one micro-batch, forward and backward."""
    if axis.ranks == 1:
        return
    yield from embedding_transfers(shape, axis, micro_batch)
    for layer in range(model.layers):
        yield from block_transfers(shape, axis, layer, micro_batch)
    yield from head_transfers(shape, axis, model.vocab, micro_batch)


def norm_transfers(ranks: int, rank: int, axis: str = "tp") -> Iterator[Transfer]:
    """The squares of the gradient norm, once a step."""
    if ranks > 1:
        yield Transfer("optimizer", axis, "all_reduce", *traffic("all_reduce", 1, SCALAR, ranks, rank))
