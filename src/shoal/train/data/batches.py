"""Samples out of a token file, and the part of each step's batch that one rank reads."""

from pathlib import Path
from typing import Literal

import numpy as np

from shoal.spec.errors import RequestError
from shoal.spec.job import DataSpec, Job
from shoal.train.data.naming import named
from shoal.train.data.order import sample_index
from shoal.train.data.share import MicroBatch, share
from shoal.train.data.tokens import TokenFile, damaged

IGNORED = -100  # a target that does not count


class Dataset:
    """The samples of one split. The last eval_fraction of the samples is held out (one at least, if there are two).

    stream and packed: sample i is the i-th run of `sequence` tokens, with the next token of each as its target. documents: sample
    i is document i, cut to `sequence` tokens or padded with targets that do not count.
    Raises RequestError naming data.sequence when the file is too short for a sample, data.path when it is so for any.
    """

    def __init__(self, tokens: str | Path, data: DataSpec, split: Literal["train", "eval"]):
        self.file, self.sequence, self.packing = TokenFile.open(tokens), data.sequence, data.packing
        self.cut = data.packing != "documents"  # anywhere
        count = (len(self.file.tokens) - 1) // data.sequence if self.cut else len(self.file.ends)
        if count < 1:
            raise _too_short(self.file, data)
        held_out = min(count - 1, max(1, round(count * data.eval_fraction))) if data.eval_fraction else 0
        self.first = 0 if split == "train" else count - held_out
        self.samples = count - held_out if split == "train" else held_out

    def get(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets of the samples with these numbers in the split: int64 (k, sequence) each.

        Raises RequestError for ids that cannot be, in those parts of a damaged file that opening it does not read.
        """
        tokens = np.zeros((len(samples), self.sequence), dtype=np.int64)
        targets = np.full_like(tokens, IGNORED)
        for row, sample in enumerate(samples):
            start, stop = self._span(self.first + int(sample))
            text = self.file.tokens[start:stop]
            valid = max(0, len(text) - 1)
            tokens[row, :valid], targets[row, :valid] = text[:-1], text[1:]
        if max(tokens.max(initial=0), targets.max(initial=0)) >= self.file.vocab:
            raise damaged(self.file.path, f"it has ids outside its vocabulary of {self.file.vocab}")
        return tokens, targets

    def documents(self, samples: np.ndarray) -> np.ndarray | None:
        """The number of each token's document in the file, int64 (k, sequence); None where a sample is one text to all.

        An end-of-document token belongs to the document that it ends.
        """
        if self.packing != "packed":
            return None
        starts = (self.first + np.asarray(samples, dtype=np.int64)) * self.sequence
        places = starts[:, None] + np.arange(self.sequence)
        return np.searchsorted(self.file.ends, places, side="right")

    def _span(self, sample: int) -> tuple[int, int]:
        """Where the sample's tokens lie: at most sequence + 1 of them."""
        if self.cut:
            return sample * self.sequence, (sample + 1) * self.sequence + 1
        start = int(self.file.ends[sample - 1]) if sample else 0
        return start, min(int(self.file.ends[sample]), start + self.sequence + 1)


class Batches:
    """What rank `rank` of the data axis reads, step by step."""

    def __init__(self, dataset: Dataset, job: Job, rank: int):
        self.dataset, self.job, self.rank = dataset, job, rank

    def batch(self, step: int) -> list[MicroBatch]:
        """The rank's micro-batches of a training step, in order."""
        train, layout = self.job.train, self.job.layout
        index = sample_index(step, train.batch, train.seed, self.dataset.samples)
        numbers = step * train.batch + np.arange(train.batch)
        return [
            MicroBatch(*self.dataset.get(index[part]), numbers[part], self.dataset.documents(index[part]))
            for part in share(train.batch, layout.micro_batches, layout.dp, self.rank)
        ]

    def first(self, batches: int) -> list[MicroBatch]:
        """The rank's part of the split's first `batches` x batch samples, in their own order, for evaluation.

        Every rank gets equally many micro-batches of one size, since a forward may be a collective. Where the samples run
        out, the first sample comes again, with targets that do not count.
        """
        ranks, size = self.job.layout.dp, self.job.micro_batch
        numbers = np.arange(min(batches * self.job.train.batch, self.dataset.samples))
        parts = []
        for start in range(self.rank * size, len(numbers) + self.rank * size, ranks * size):
            part = numbers[start : start + size]
            filled = np.concatenate((part, np.zeros(size - len(part), numbers.dtype)))
            tokens, targets = self.dataset.get(filled)
            targets[len(part) :] = IGNORED
            parts.append(MicroBatch(tokens, targets, filled, self.dataset.documents(filled)))
        return parts


def check_vocabulary(file: TokenFile, vocab: int) -> None:
    """Raises RequestError when the model has fewer ids than the token file's tokenizer."""
    if vocab < file.vocab:
        raise RequestError(
            "model.vocab",
            f"model.vocab = {vocab} is smaller than the tokenizer's {file.vocab} tokens; {file.vocab} or more would do",
        )


def _too_short(file: TokenFile, data: DataSpec) -> RequestError:
    """The error for a corpus without a single sample; the sequence it names gives two, one to train and one to hold out."""
    tokens = len(file.tokens)
    if tokens < 2 or not len(file.ends):
        return RequestError(
            "data.path", f"data.path = {named(file.path)} holds {tokens} tokens; a corpus of 2 or more would do"
        )
    return RequestError(
        "data.sequence",
        f"data.sequence = {data.sequence} is too long for the corpus of {tokens} tokens; "
        f"{max(1, (tokens - 1) // 2)} would do",
    )
