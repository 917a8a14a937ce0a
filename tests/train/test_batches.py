"""Samples and batches: next-token targets, held-out data, and the same global batch under every layout."""

import numpy as np
import pytest

from shoal.spec.errors import RequestError
from shoal.spec.job import DataSpec, Job, TrainSpec
from shoal.spec.layout import Layout
from shoal.spec.machine import Machine
from shoal.spec.model import ModelSpec
from shoal.train.data.batches import IGNORED, Batches, Dataset, check_vocabulary
from shoal.train.data.tokens import HEADER, TokenFile, TokenWriter


@pytest.fixture
def corpus(tmp_path):
    """20 documents of 1 to 20 tokens: 1, 2 2, 3 3 3, ..."""
    with TokenWriter(tmp_path / "a.tokens", 257, "bytes") as writer:
        for number in range(1, 21):
            writer.add(np.arange(number) + number)
    return tmp_path / "a.tokens"


def test_stream_samples_cover_the_tokens_and_predict_the_next(corpus):
    data = DataSpec(sequence=8, eval_fraction=0.2)
    text = TokenFile.open(corpus).tokens.astype(np.int64)
    train, held_out = Dataset(corpus, data, "train"), Dataset(corpus, data, "eval")
    assert (train.samples, held_out.samples) == (21, 5)
    tokens = np.concatenate([split.get(np.arange(split.samples))[0].ravel() for split in (train, held_out)])
    targets = np.concatenate([split.get(np.arange(split.samples))[1].ravel() for split in (train, held_out)])
    assert np.array_equal(tokens, text[: 26 * 8]) and np.array_equal(targets, text[1 : 26 * 8 + 1])


def test_document_samples_never_cross_a_documents_end(corpus):
    train = Dataset(corpus, DataSpec(sequence=8, packing="documents", eval_fraction=0.1), "train")
    tokens, targets = train.get(np.arange(train.samples))
    assert train.samples == 18
    for number, (text, wanted) in enumerate(zip(tokens, targets, strict=True), 1):
        valid = min(number - 1, 8)
        assert list(text[:valid]) == list(range(number, number + valid))
        assert list(wanted[:valid]) == list(range(number + 1, number + 1 + valid))
        assert (wanted[valid:] == IGNORED).all()


@pytest.mark.parametrize(("packing", "samples"), [("stream", 26), ("documents", 20)])
@pytest.mark.parametrize("fraction", [0.0, 1e-6, 0.1, 0.5, 0.999])
def test_the_last_samples_are_held_out_and_none_is_in_both(corpus, packing, samples, fraction):
    data = DataSpec(sequence=8, packing=packing, eval_fraction=fraction)
    train, held_out = Dataset(corpus, data, "train"), Dataset(corpus, data, "eval")
    expected = min(samples - 1, max(1, round(samples * fraction))) if fraction else 0
    assert (train.samples, held_out.samples) == (samples - expected, expected)
    whole = Dataset(corpus, DataSpec(sequence=8, packing=packing, eval_fraction=0), "train").get(np.arange(samples))
    for name, place in (("tokens", 0), ("targets", 1)):
        parts = [split.get(np.arange(split.samples))[place] for split in (train, held_out)]
        assert np.array_equal(np.concatenate(parts), whole[place]), name


def test_two_samples_are_one_to_train_and_one_to_hold_out(corpus):
    splits = [Dataset(corpus, DataSpec(sequence=104), split).samples for split in ("train", "eval")]
    assert splits == [1, 1]


def test_a_document_without_a_token_is_a_sample_without_a_target(tmp_path):
    with TokenWriter(tmp_path / "a.tokens", 257, "bytes") as writer:
        for document in ([1, 2, 3], [], [4]):
            writer.add(np.array(document, dtype=int))
    data = DataSpec(sequence=4, packing="documents", eval_fraction=0)
    _, targets = Dataset(tmp_path / "a.tokens", data, "train").get(np.arange(3))
    assert targets.tolist() == [[2, 3, -100, -100], [-100] * 4, [-100] * 4]


def job(layout):
    return Job(ModelSpec(), Layout.parse(layout), Machine(), DataSpec(sequence=8), TrainSpec(batch=8, seed=3))


@pytest.mark.parametrize("layout", ["dp=1", "dp=2", "dp=4", "dp=1,micro_batches=4", "dp=2,micro_batches=2"])
def test_every_layout_reads_the_same_global_batch_in_the_same_order(corpus, layout):
    dataset = Dataset(corpus, DataSpec(sequence=8), "train")
    (whole,) = Batches(dataset, job("dp=1"), 0).batch(5)
    asked = job(layout)
    ranks = [Batches(dataset, asked, rank).batch(5) for rank in range(asked.layout.dp)]
    in_order = [ranks[rank][number] for number in range(asked.layout.micro_batches) for rank in range(asked.layout.dp)]
    for field in ("tokens", "targets", "samples"):
        assert np.array_equal(np.concatenate([getattr(part, field) for part in in_order]), getattr(whole, field))
    assert list(whole.samples) == list(range(40, 48))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_evaluation_reads_each_held_out_sample_once_however_many_ranks(corpus, ranks):
    dataset = Dataset(corpus, DataSpec(sequence=8, eval_fraction=0.4), "eval")
    parts = [Batches(dataset, job(f"dp={ranks}"), rank).first(8) for rank in range(ranks)]
    counted = [
        sample
        for part in parts
        for batch in part
        for sample, targets in zip(batch.samples, batch.targets, strict=True)
        if (targets >= 0).any()
    ]
    assert sorted(counted) == list(range(dataset.samples))
    assert len({batch.tokens.shape for part in parts for batch in part}) == 1  # what a pipeline and a grid need


def test_a_corpus_too_short_for_one_sample_names_a_length_that_would_do(corpus):
    with pytest.raises(
        RequestError, match=r"data\.sequence = 500 is too long for the corpus of 210 tokens; 104 would do"
    ):
        Dataset(corpus, DataSpec(sequence=500), "train")
    assert Dataset(corpus, DataSpec(sequence=104), "train").samples == 1


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_a_corpus_too_short_for_any_sample_is_named(tmp_path, packing):
    with TokenWriter(tmp_path / "a.tokens", 257, "bytes"):
        pass
    with pytest.raises(RequestError, match=r"^data\.path = .*a\.tokens holds 0 tokens; a corpus of 2 or more would do"):
        Dataset(tmp_path / "a.tokens", DataSpec(packing=packing), "train")


def test_ids_that_cannot_be_are_refused_where_opening_does_not_look(tmp_path):
    with TokenWriter(tmp_path / "a.tokens", 257, "bytes") as writer:
        writer.add(np.arange(3_000_000) % 257)
    with (tmp_path / "a.tokens").open("r+b") as file:
        file.seek(HEADER + 2 * 1_500_000 + 1)
        file.write(b"\xff")
    dataset = Dataset(tmp_path / "a.tokens", DataSpec(sequence=1000), "train")
    dataset.get(np.array([0, 1498, 1501]))
    for sample in (1499, 1500):  # as a target of the one, a token of the other
        with pytest.raises(RequestError, match=r"^data\.path = .*ids outside its vocabulary of 257"):
            dataset.get(np.array([sample]))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(corpus):
    with pytest.raises(
        RequestError, match=r"model\.vocab = 100 is smaller than the tokenizer's 257 tokens; 257 or more"
    ):
        check_vocabulary(TokenFile.open(corpus), 100)
