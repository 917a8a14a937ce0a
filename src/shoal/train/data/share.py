"""Which samples of a step belong to which rank and micro-batch: a function of global numbers alone."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MicroBatch:
    """What a rank feeds its model at once: tokens and targets (b, s) int64, -100 where a target does not count.

    samples: (b,) global sample numbers, counted over the whole run.
    """

    tokens: np.ndarray
    targets: np.ndarray
    samples: np.ndarray


def share(batch: int, micro_batches: int, ranks: int, rank: int) -> list[slice]:
    """Parts of a step's `batch` samples that `rank` of `ranks` reads, one per micro-batch.

    Micro-batch first, then rank: micro-batch j of all ranks together is the j-th run of batch / micro_batches samples,
    whatever the number of ranks.
    """
    size, rest = divmod(batch, micro_batches * ranks)
    assert not rest, "Job.check lets no such batch through"
    starts = (micro_batch * size * ranks + rank * size for micro_batch in range(micro_batches))
    return [slice(start, start + size) for start in starts]
