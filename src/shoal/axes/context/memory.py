"""What a transformer block keeps from forward for backward when context ranks share its sequence (spec CP-1, CP-8). No torch.

Exact, as axes/tensor/memory.py is for a whole sequence. Rings and the all-gather keep what a sequence of the share's
length would, and no mask; an all-to-all keeps other copies of queries, keys, values and outputs.
"""

from dataclasses import replace

from shoal.axes.context.cost import Crossing
from shoal.axes.context.order import kv_heads_each
from shoal.axes.tensor import memory
from shoal.axes.tensor.cost import Axis, Shape
from shoal.spec.model import ModelSpec


def block_activations(model: ModelSpec, cut: Crossing, axis: Axis) -> int:
    """Bytes that one rank keeps of one block and one micro-batch, under any mask, the block's input included.

    cut: how the block's attention crosses the context ranks, with the heads of one rank of the tensor `axis`.
    """
    share = Shape(cut.batch, cut.sequence // cut.ranks, model.hidden, cut.width)
    alone = memory.block_activations(replace(model, window=None), share, axis).total
    return alone + exchanged_bytes(model, cut)


def exchanged_bytes(model: ModelSpec, cut: Crossing) -> int:
    """Bytes that an all-to-all keeps of one block's attention more than a ring; fewer where it is negative.

    Both keep queries, keys and values as attention takes them, and its output. An all-to-all's are copies: so the
    projection need not be kept for their sake, nor what rope made of it; the output is kept once more, by heads and by
    tokens; and a KV head counts once for each rank that needs it.
    """
    if cut.across == 1:
        return 0
    projected, arrived = (
        cut.heads + 2 * cut.kv_heads,
        cut.heads + 2 * cut.across * kv_heads_each(cut.kv_heads, cut.across),
    )
    turned = cut.heads + cut.kv_heads if model.qk_norm or model.positions == "rope" else 0
    released = turned if model.qk_norm else turned + projected  # norms over heads need the projection themselves
    return cut.tokens * (arrived + cut.heads - released) * cut.head_size * cut.width
