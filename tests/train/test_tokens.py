"""Token files: what is written is read, nothing that is damaged is, and a failed writer leaves nothing."""

import os
import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.spec.errors import RequestError
from shoal.train.data import tokens
from shoal.train.data.tokens import HEADER, TokenFile, TokenWriter


def written(path, documents, vocab=257):
    with TokenWriter(path, vocab, "bytes") as writer:
        for document in documents:
            writer.add(np.asarray(document, dtype=int))
    return path


@given(documents=st.lists(st.lists(st.integers(0, 70_000), max_size=50), max_size=20), flush=st.integers(1, 60))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("vocab", [257, 65_536, 65_537])
def test_round_trip(tmp_path_factory, documents, flush, vocab):
    documents = [[number % vocab for number in document] for document in documents]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "FLUSH", flush)
        file = TokenFile.open(written(tmp_path_factory.mktemp("t") / "a.tokens", documents, vocab))
        file.verify()
    assert file.header.width == (4 if vocab == 65_537 else 2) and file.vocab == vocab
    assert file.tokens.tolist() == [number for document in documents for number in document]
    assert file.ends.tolist() == np.cumsum([len(document) for document in documents], dtype=int).tolist()
    assert file.path.stat().st_size == HEADER + len(file.tokens) * file.header.width + 8 * len(documents)


def test_a_document_may_come_in_parts(tmp_path):
    with TokenWriter(tmp_path / "a.tokens", 257, "bytes") as writer:
        writer.add(np.array([1, 2]), ends=False)
        writer.add(np.array([3]))
        assert (writer.tokens, writer.documents) == (3, 1)
    assert TokenFile.open(tmp_path / "a.tokens").ends.tolist() == [3]


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("place", [10, 200, HEADER + 3, -5, -60])
def test_a_flipped_bit_is_refused(tmp_path, place):
    flip(path := written(tmp_path / "a.tokens", [range(200), range(100)]), place)
    with pytest.raises(RequestError, match=r"^data\.path = .*is no sound token file"):
        TokenFile.open(path)


@pytest.mark.parametrize("length", [0, 100, HEADER, HEADER + 100, -8, -1])
def test_a_truncated_file_is_refused(tmp_path, length):
    path = written(tmp_path / "a.tokens", [range(200), range(100)])
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(RequestError, match=r"^data\.path = .*is no sound token file"):
        TokenFile.open(path)


def test_a_file_of_another_version_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "VERSION", 2)
    path = written(tmp_path / "a.tokens", [range(200)])
    monkeypatch.undo()
    with pytest.raises(RequestError, match="its version is another one"):
        TokenFile.open(path)


@pytest.mark.parametrize(("make", "why"), [(os.mkdir, "Is a directory"), (lambda path: None, "No such file")])
def test_what_cannot_be_read_is_named(tmp_path, make, why):
    make(tmp_path / "a.tokens")
    with pytest.raises(RequestError, match=rf"^data\.path = .*a\.tokens cannot be read \({why}"):
        TokenFile.open(tmp_path / "a.tokens")


def test_damage_in_the_middle_of_a_large_file_is_found_by_verify(tmp_path):
    path = written(tmp_path / "a.tokens", [np.arange(3_000_000) % 257])
    flip(path, path.stat().st_size // 2)
    file = TokenFile.open(path)
    with pytest.raises(RequestError, match="checksum of its ids"):
        file.verify()


def test_a_failed_writer_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), TokenWriter(tmp_path / "a.tokens", 257, "bytes") as writer:
        writer.add(np.arange(10))
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_failed_writer_keeps_the_file_that_was_there(tmp_path):
    path = written(tmp_path / "a.tokens", [[1, 2, 3]])
    with pytest.raises(RequestError):
        written(path, [[1, 300]])
    assert TokenFile.open(path).tokens.tolist() == [1, 2, 3] and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("wrong", [300, -1])
def test_an_id_outside_the_vocabulary_is_refused(tmp_path, wrong):
    with pytest.raises(
        RequestError, match=f"token id {wrong} lies outside the vocabulary of 257 of the tokenizer bytes"
    ):
        written(tmp_path / "a.tokens", [[1, wrong, 2]])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("documents", [1, 3])
def test_no_room_is_named_and_leaves_nothing(tmp_path, documents):
    """The limit on the size of a file stands for a full disk: writing fails in the middle, or at the very end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, hard))
    try:
        with pytest.raises(RequestError, match=r"^data\.cache = .* cannot be written \(File too large\)"):
            written(tmp_path / "a.tokens", [np.zeros(1_000_000, dtype=int)] * documents)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"^data\.cache = .*/file cannot be written"):
        TokenWriter(tmp_path / "file" / "a.tokens", 257, "bytes")


def test_others_may_read_it_as_the_umask_allows(tmp_path):
    before = os.umask(0o027)
    try:
        assert written(tmp_path / "a.tokens", [[1]]).stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)
