"""Tokenizers: bytes lose nothing, and a tokenizer.json is used for what it is, without its model's limits."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from shoal.spec.errors import RequestError
from shoal.train.data.tokenizer import load_tokenizer


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_lose_nothing(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) == len(text.encode()) and tokenizer.eod not in ids
    assert [list(one) for one in tokenizer.encode_all([text, "a"])] == [ids, [97]]


def word_level(folder, vocab, **fields):
    """A tokenizer.json that knows a few words."""
    library = Tokenizer(models.WordLevel(vocab, **fields))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    return library, folder / "tokenizer.json"


def test_a_corpus_is_neither_cut_nor_padded_as_the_file_would_have_it(tmp_path):
    library, path = word_level(tmp_path, {"a": 0, "b": 1, "</s>": 2, "[PAD]": 3, "?": 4}, unk_token="?")
    library.enable_truncation(4)
    library.enable_padding(pad_id=3, length=8)
    library.save(str(path))
    assert json.loads(path.read_text())["truncation"]["max_length"] == 4
    tokenizer = load_tokenizer(str(path))
    assert [list(ids) for ids in tokenizer.encode_all(["a b a b a b", "b"])] == [[0, 1, 0, 1, 0, 1], [1]]
    assert tokenizer.encode("a b a b a b") == [0, 1, 0, 1, 0, 1]
    assert (tokenizer.vocab, tokenizer.eod) == (5, 2)


def test_the_vocabulary_counts_ids_not_words(tmp_path):
    library, path = word_level(tmp_path, {"a": 0, "<eos>": 9})
    library.save(str(path))
    assert load_tokenizer(str(path)).vocab == 10


def test_text_that_a_tokenizer_has_no_token_for_is_refused(tmp_path):
    library, path = word_level(tmp_path, {"a": 0, "</s>": 1}, unk_token="?")
    library.save(str(path))
    with pytest.raises(RequestError, match=r"^data\.tokenizer = .*cannot encode the text"):
        load_tokenizer(str(path)).encode("a z")


NO_END = '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
EMPTY = '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'


@pytest.mark.parametrize("content", [None, "", "{}", "no json", NO_END, EMPTY])
def test_a_bad_tokenizer_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RequestError, match=r"^data\.tokenizer = ") as caught:
        load_tokenizer(str(path))
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_tokenizer(tmp_path):
    with pytest.raises(RequestError, match=r"^data\.tokenizer = .*cannot be read \(Is a directory\)"):
        load_tokenizer(str(tmp_path))
