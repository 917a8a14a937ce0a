"""Which samples of a step belong to which rank and micro-batch: a function of global numbers alone."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MicroBatch:
    """What a rank feeds its model at once: tokens and targets (b, s) int64, -100 where a target does not count.

    samples: (b,) global sample numbers, counted over the whole run. documents: (b, s) int64, tokens of the same number see
    each other; None: all of a sample do.
    """

    tokens: np.ndarray
    targets: np.ndarray
    samples: np.ndarray
    documents: np.ndarray | None = None


def filled(micro_batch: MicroBatch, sequence: int) -> MicroBatch:
    """The micro-batch with sequences of `sequence` tokens; what is filled up is a document of its own and counts nothing."""
    rest = ((0, 0), (0, sequence - micro_batch.tokens.shape[1]))
    documents = micro_batch.documents
    return MicroBatch(
        np.pad(micro_batch.tokens, rest),
        np.pad(micro_batch.targets, rest, constant_values=-100),
        micro_batch.samples,
        None if documents is None else np.pad(documents, rest, constant_values=-1),
    )


def share(batch: int, micro_batches: int, ranks: int, rank: int) -> list[slice]:
    """Parts of a step's `batch` samples that `rank` of `ranks` reads, one per micro-batch.

    Micro-batch first, then rank: micro-batch j of all ranks together is the j-th run of batch / micro_batches samples,
    whatever the number of ranks.
    """
    size, rest = divmod(batch, micro_batches * ranks)
    assert not rest, "Job.check lets no such batch through"
    starts = (micro_batch * size * ranks + rank * size for micro_batch in range(micro_batches))
    return [slice(start, start + size) for start in starts]
