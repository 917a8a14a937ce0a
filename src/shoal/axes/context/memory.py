"""What an all-to-all makes a transformer block keep from forward for backward (spec CP-1, CP-8). No torch.

A block whose ranks form a ring, or gather, keeps what axes/tensor/memory.py says of a sequence as long as the share, and
no mask. An all-to-all has it keep other copies of queries, keys, values and outputs.
"""

from shoal.axes.context.cost import Crossing
from shoal.axes.context.order import kv_heads_each
from shoal.spec.model import ModelSpec


def exchanged_bytes(model: ModelSpec, cut: Crossing) -> int:
    """Bytes that one block and micro-batch keep more than in a ring; fewer where it is negative.

    Both keep queries, keys and values as attention takes them, and its output. An all-to-all's are copies: so the
    projection, or the values, need not be kept for their sake, nor what rope made of it; the output is kept once more, by
    heads and by tokens; and a KV head counts once for each rank that needs it.
    """
    if cut.across == 1:
        return 0
    projected = cut.heads + 2 * cut.kv_heads
    arrived = cut.heads + 2 * cut.across * kv_heads_each(cut.kv_heads, cut.across)
    turned = cut.heads + cut.kv_heads if model.qk_norm or model.positions == "rope" else 0
    # Norms over heads need the projection themselves; where rope alone changed queries and keys, values were copied.
    released = turned if model.qk_norm else turned + cut.kv_heads if turned else projected
    return cut.tokens * (arrived + cut.heads - released) * cut.head_size * cut.width
