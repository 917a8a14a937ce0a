"""From text to token files: every kind of source, and every kind of bad one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from shoal.spec.errors import RequestError
from shoal.spec.job import DataSpec
from shoal.train.data import corpus
from shoal.train.data.corpus import prepare, sources
from shoal.train.data.tokenizer import load_tokenizer
from shoal.train.data.tokens import TokenFile


def read(path, cache, **fields):
    """The documents that a corpus became, as text."""
    data = DataSpec(path=str(path), cache=str(cache), **fields)
    file = TokenFile.open(prepare(data))
    file.verify()
    starts = [0, *file.ends[:-1]]
    tokenizer = load_tokenizer(data.tokenizer)
    for end in file.ends:
        assert file.tokens[int(end) - 1] == tokenizer.eod
    return [tokenizer.decode(file.tokens[int(a) : int(b) - 1].tolist()) for a, b in zip(starts, file.ends, strict=True)]


def test_a_text_file_is_one_document_whatever_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE", 100)
    text = "".join(f"line {number} with wörds, 漢字 and\ttabs\r\n" for number in range(200))
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read(tmp_path / "a.txt", tmp_path / "cache") == [text]


def test_a_jsonl_line_is_a_document(tmp_path):
    lines = [{"body": f"text {number}\nmore", "other": 1} for number in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read(tmp_path / "a.jsonl", tmp_path / "cache", field="body") == [line["body"] for line in lines]


def test_a_folder_is_read_in_order_and_below(tmp_path):
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "one.md").write_text("one")
    (folder / "a.txt").write_text("zero")
    (folder / "c.jsonl").write_text('{"text": "two"}\n{"text": "three"}')
    (folder / "d.png").write_bytes(b"\x89")
    assert read(folder, tmp_path / "cache") == ["zero", "one", "two", "three"]


def test_the_default_is_the_standard_librarys_own_source():
    files = sources("")
    assert Path(os.__file__) in files and not any("site-packages" in str(file) for file in files)
    assert sum(file.stat().st_size for file in files) > 5e6


def test_a_prepared_corpus_is_not_prepared_again_until_it_changes(tmp_path):
    source, data = tmp_path / "a.txt", DataSpec(path=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"))
    source.write_text("some text")
    first = prepare(data)
    born = first.stat().st_mtime_ns
    assert prepare(data) == first and first.stat().st_mtime_ns == born
    source.write_text("some other text")
    assert prepare(data) != first


def test_a_damaged_cache_is_made_anew(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    data = DataSpec(path=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"))
    made = prepare(data)
    content = made.read_bytes()
    made.write_bytes(content[:-3])
    assert prepare(data).read_bytes() == content


@pytest.fixture
def tokenizer_json(tmp_path):
    pairs = [("t", "h"), ("th", "e")]
    vocab = {chr(number): place for place, number in enumerate(range(33, 127))}
    vocab |= {"Ġ": len(vocab), "Ċ": len(vocab) + 1}
    vocab |= {"th": len(vocab), "the": len(vocab) + 1}
    library = Tokenizer(BPE(vocab, pairs))
    library.pre_tokenizer = ByteLevel(add_prefix_space=False)
    from tokenizers.decoders import ByteLevel as Decoder

    library.decoder = Decoder()
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_any_tokenizer_json(tmp_path, tokenizer_json):
    (tmp_path / "a.jsonl").write_text('{"text": "the other one"}\n{"text": "then"}')
    assert read(tmp_path / "a.jsonl", tmp_path / "cache", tokenizer=str(tokenizer_json)) == ["the other one", "then"]
    tokenizer = load_tokenizer(str(tokenizer_json))
    assert tokenizer.vocab == 99 and tokenizer.eod == 98 and len(tokenizer.encode("the")) == 1


def test_memory_stays_bounded_for_a_corpus_larger_than_it(tmp_path):
    """60 MB of JSONL under a limit that holds the libraries and the buffers, but not the text and its ids besides."""
    line = json.dumps({"text": "some words of a document that is repeated " * 25}) + "\n"
    with (tmp_path / "a.jsonl").open("w") as file:
        for _ in range(60_000_000 // len(line)):
            file.write(line)
    program = (
        "import resource, sys\n"
        "from shoal.spec.job import DataSpec\n"
        "from shoal.train.data.corpus import prepare\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"prepare(DataSpec(path={str(tmp_path / 'a.jsonl')!r}, cache={str(tmp_path / 'cache')!r}))\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    grown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(grown) < 50, f"grew by {grown} MB"


def put(name, content):
    """Makes a corpus file with this content."""

    def make(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return make


BAD = {
    "missing": (lambda folder: folder / "nowhere.txt", r"data\.path = .*does not exist"),
    "near miss": (
        lambda folder: put("corpus.txt", b"x")(folder) and folder / "korpus.txt",
        "did you mean .*corpus.txt",
    ),
    "empty file": (put("a.txt", b""), r"data\.path = .*holds no text"),
    "empty folder": (lambda folder: (folder / "e").mkdir() or folder / "e", r"data\.path = .*holds no \.txt"),
    "not UTF-8": (put("a.txt", b"a\xffb"), "is not UTF-8 text"),
    "not JSON": (put("a.jsonl", b'{"text": "a"}\nb'), "line 2 of .* is not JSON"),
    "other field": (put("a.jsonl", b'{"body": "a"}'), r"data\.field = text is no text in line 1.*body would do"),
    "not an object": (put("a.jsonl", b"[1]"), r"data\.field = text is no text"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_corpus_is_named_in_one_line_and_leaves_nothing(tmp_path, kind):
    make, message = BAD[kind]
    path = make(tmp_path)
    with pytest.raises(RequestError, match=message) as caught:
        prepare(DataSpec(path=str(path), cache=str(tmp_path / "cache")))
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*")) if (tmp_path / "cache").exists() else True


@pytest.mark.parametrize(
    "content", [None, "{}", "no json", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}']
)
def test_a_bad_tokenizer_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RequestError, match=r"^data\.tokenizer = "):
        load_tokenizer(str(path))
