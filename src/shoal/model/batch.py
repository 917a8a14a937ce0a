"""What a decoder is given of one micro-batch, and what all its blocks need of that."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.kernels.dropout import DropoutKey, Noise
from shoal.model.moe import Tokens
from shoal.model.rope import Rotation


@dataclass(frozen=True)
class Batch:
    """tokens int64 (b, s); targets int64 (b, s), -100 where none counts, or None; positions int64 (b or 1, s), the places
    of the tokens, by default 0 to s - 1; documents int64 (b, S), where tokens see only tokens of the same number, S the
    whole sequence; dropout None switches dropout off. order int64 (b, s): grows with a token's global place in its sequence,
    and with the sequence's in the micro-batch of all ranks; by default as tokens stand here. seed: d total / d loss, from
    which auxiliary losses start their backward.
    """

    tokens: Tensor
    targets: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None
    dropout: DropoutKey | None = None
    order: Tensor | None = None
    seed: float = 1.0


@dataclass(frozen=True)
class Setting:
    """What the blocks share in one forward.

    turn: rope's rotation, or None; seen: which keys each query sees, as the model's attention wants to know it; noise: keys
    of every dropout site, rows (1 + 2 layers, b, s) and features, or None. routing: of the tokens, where there are experts.
    """

    turn: Rotation | None
    seen: Any
    noise: Noise | None
    routing: Tokens | None = None

    def sites(self, layer: int) -> Noise | None:
        """The keys of a block's two dropout sites."""
        return None if self.noise is None else (self.noise[0][1 + 2 * layer : 3 + 2 * layer], self.noise[1])
