"""How a training run ended. No torch, so that the command can speak of it before and after."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from shoal.transfer import Transfer


class NotFinite(RuntimeError):
    """Too many steps in a row had a loss or gradients that are not finite."""


class ReplicasDiffer(RuntimeError):
    """Ranks that should hold the same bits of a parameter, a state or a buffer do not."""


@dataclass(frozen=True)
class Summary:
    """How a run ended, as this rank saw it. Losses in nats per token, peak_memory in bytes; text: what the model wrote."""

    out: str
    steps: int
    first_loss: float
    loss: float
    eval_loss: float  # nan when nothing is held out
    tokens: int
    seconds: float
    tokens_per_s: float
    skipped: int
    skipped_at_end: int  # steps in a row
    peak_memory: int
    text: str
    predicted: list[Transfer]
    measured: list[Transfer]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the transfers; what is not finite becomes None, since JSON knows no NaN."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
            if name not in ("predicted", "measured")
        }
