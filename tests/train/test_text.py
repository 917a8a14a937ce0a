"""Reading text: files, JSONL and folders give their documents whole, and what is no text is named."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.spec.errors import RequestError
from shoal.train.data import text
from shoal.train.data.text import pieces, sources


def documents(path, field="text", lenient=False):
    """What `pieces` reads, put together again."""
    whole, open_document = [""], False
    for piece in pieces(sources(str(path)), field, lenient):
        whole[-1] += piece.text
        open_document = not piece.ends
        if piece.ends:
            whole.append("")
    assert not open_document, "the last document does not end"
    return whole[:-1]


WORDS = st.text(st.sampled_from("ab \n\r\té漢😀\u2028"), min_size=1, max_size=400)


@given(content=WORDS, piece=st.integers(1, 20))
@example(content="\na " + "a" * 300, piece=3)
@example(content="word " * 80, piece=1)
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_long_document_is_read_in_pieces_without_loss(tmp_path_factory, suffix, content, piece):
    file = tmp_path_factory.mktemp("t") / f"a{suffix}"
    file.write_bytes(json.dumps({"text": content}).encode() if suffix == ".jsonl" else content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "PIECE", piece)
        assert documents(file) == [content]
        read = list(pieces([file], "text"))
    assert max(len(run.text) for run in read) <= 4 * piece, "memory is not bounded"
    assert [run.read for run in read] == sorted(run.read for run in read)
    assert read[-1].read == file.stat().st_size


def test_a_jsonl_line_is_a_document(tmp_path):
    lines = [{"body": f"text {number}\nmore", "other": 1} for number in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert documents(tmp_path / "a.jsonl", "body") == [line["body"] for line in lines]


def test_a_folder_is_read_in_order_and_below_without_hidden_and_empty_files(tmp_path):
    for name, content in {
        "a.TXT": "zero",
        "b/one.md": "one",
        "c.jsonl": '{"text": "two"}\n{"text": ""}\n{"text": "three"}',
        "d.txt": "",
        "e.png": "\x89",
        ".git/f.txt": "hidden",
        "g/.h.txt": "hidden",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert documents(tmp_path) == ["zero", "one", "two", "three"]


def test_the_default_is_the_standard_librarys_own_source():
    files = sources("")
    assert Path(os.__file__) in files and not any("site-packages" in str(file) for file in files)
    assert sum(file.stat().st_size for file in files) > 5e6


def test_what_is_not_utf8_is_left_out_of_the_standard_library_only(tmp_path, monkeypatch):
    """Also when its first pieces have been read already: the next document is still one of its own."""
    monkeypatch.setattr(text, "PIECE", 4)
    (tmp_path / "a.py").write_bytes(b"four four" * 2000 + b"\xff")
    (tmp_path / "b.py").write_text("whole")
    assert documents(tmp_path, lenient=True)[-1] == "whole"
    with pytest.raises(RequestError, match=r"a\.py is not UTF-8 text"):
        documents(tmp_path)


def make(name, content):
    """A maker of a bad corpus: writes `content` to `name` and gives its path."""

    def maker(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return maker


def make_near_miss(folder):
    (folder / "corpus.txt").write_text("x")
    return folder / "korpus.txt"


def make_pipe(folder):
    os.mkfifo(folder / "a.txt")
    return folder / "a.txt"


BAD = {
    "missing": (lambda folder: folder / "nowhere.txt", r"data\.path = .*does not exist"),
    "near miss": (make_near_miss, "did you mean .*corpus.txt"),
    "empty folder": (lambda folder: folder, r"data\.path = .*holds no \.txt"),
    "name too long": (lambda folder: folder / ("a" * 300), r"data\.path = .*cannot be read \(File name too long\)"),
    "not a file": (make_pipe, r"data\.path = .*is not a regular file"),
    "not UTF-8": (make("a.txt", b"a\xffb"), "is not UTF-8 text"),
    "line not UTF-8": (make("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}'), "line 2 of .* is not Unicode text"),
    "half a pair": (make("a.jsonl", b'{"text": "\\ud800"}'), "line 1 of .* is not Unicode text"),
    "not JSON": (make("a.jsonl", b'{"text": "a"}\n\nb'), "line 3 of .* is not JSON"),
    "too deep": (make("a.jsonl", b"[" * 100_000), "line 1 of .* is not JSON"),
    "other field": (make("a.jsonl", b'{"id": "1", "texts": "a"}'), r"data\.field = text is no text in line 1.*texts would do"),
    "not an object": (make("a.jsonl", b"[1]"), r"data\.field = text is no text"),
    "not a string": (make("a.jsonl", b'{"text": 1}'), r"data\.field = text is no text"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_text_is_named_in_one_line(tmp_path, kind):
    maker, message = BAD[kind]
    with pytest.raises(RequestError, match=message) as caught:
        documents(maker(tmp_path))
    assert "\n" not in str(caught.value)
