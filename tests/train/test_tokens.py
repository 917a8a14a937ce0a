"""Token files: what is written is read, and nothing that is damaged is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.spec.errors import RequestError
from shoal.train.data.tokens import HEADER, TokenFile, TokenWriter


def written(path, documents, vocab=257):
    with TokenWriter(path, vocab, "bytes") as writer:
        for document in documents:
            writer.add(np.asarray(document))
    return path


@given(documents=st.lists(st.lists(st.integers(0, 70_000), max_size=50), max_size=20))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("vocab", [257, 70_001])
def test_round_trip(tmp_path_factory, documents, vocab):
    documents = [[number % vocab for number in document] for document in documents]
    file = (
        TokenFile.open(written(tmp_path_factory.mktemp("t") / "a.tokens", documents, vocab)) if any(documents) else None
    )
    if file:
        assert file.header.width == (2 if vocab == 257 else 4)
        assert np.array_equal(file.tokens, np.concatenate([np.asarray(d, dtype=int) for d in documents]))
        assert list(file.ends) == list(np.cumsum([len(document) for document in documents]))
        file.verify()


@pytest.mark.parametrize("place", [10, 200, HEADER + 3, -5, -60])
def test_a_flipped_bit_is_refused(tmp_path, place):
    path = written(tmp_path / "a.tokens", [range(200), range(100)])
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
    with pytest.raises(RequestError, match=r"^data\.path = .*is no sound token file"):
        TokenFile.open(path)


@pytest.mark.parametrize("length", [0, 100, HEADER, HEADER + 100, -8, -1])
def test_a_truncated_file_is_refused(tmp_path, length):
    path = written(tmp_path / "a.tokens", [range(200), range(100)])
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(RequestError, match=r"^data\.path = .*is no sound token file"):
        TokenFile.open(path)


def test_damage_in_the_middle_of_a_large_file_is_found_by_verify(tmp_path):
    path = written(tmp_path / "a.tokens", [np.arange(3_000_000) % 257])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RequestError, match="checksum of its ids"):
        TokenFile.open(path).verify()


def test_a_failed_writer_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), TokenWriter(tmp_path / "a.tokens", 257, "bytes") as writer:
        writer.add(np.arange(10))
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_an_id_outside_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(RequestError, match="token id 300 lies outside the vocabulary of 257"):
        written(tmp_path / "a.tokens", [[1, 300]])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"^data\.cache = .*cannot be written"):
        TokenWriter(tmp_path / "file" / "a.tokens", 257, "bytes")
