"""From a corpus to its token file: every document, once, in bounded memory, and nothing when it fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shoal.spec.errors import RequestError
from shoal.spec.job import DataSpec
from shoal.train.data import text
from shoal.train.data.corpus import prepare, write_tokens
from shoal.train.data.tokenizer import load_tokenizer
from shoal.train.data.tokens import TokenFile


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    """Byte-level BPE of 600 tokens, trained on a module of the standard library."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.train(
        [os.__file__],
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    library.save(str(path))
    return path


@pytest.mark.parametrize("kind", ["bytes", "tokenizer.json"])
def test_every_document_is_there_and_ends(tmp_path, tokenizer_json, kind):
    texts = ["the other one", "then 漢字", "x"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in texts))
    tokenizer = load_tokenizer("bytes" if kind == "bytes" else str(tokenizer_json))
    name = "bytes" if kind == "bytes" else str(tokenizer_json)
    file = TokenFile.open(
        prepare(DataSpec(path=str(tmp_path / "a.jsonl"), tokenizer=name, cache=str(tmp_path / "cache")))
    )
    file.verify()
    assert file.vocab == tokenizer.vocab == (257 if kind == "bytes" else 600)
    read = np.split(file.tokens, file.ends[:-1].astype(int))
    assert [ids[-1] for ids in read] == [tokenizer.eod] * 3
    assert [tokenizer.decode(ids[:-1].tolist()) for ids in read] == texts


def test_a_text_encoded_in_pieces_has_the_tokens_of_the_whole(tmp_path, tokenizer_json, monkeypatch):
    monkeypatch.setattr(text, "PIECE", 500)
    content = Path(os.__file__).read_text()
    (tmp_path / "a.txt").write_text(content)
    write_tokens(DataSpec(path=str(tmp_path / "a.txt"), tokenizer=str(tokenizer_json)), tmp_path / "a.tokens", False)
    whole = Tokenizer.from_file(str(tokenizer_json)).encode(content).ids
    assert TokenFile.open(tmp_path / "a.tokens").tokens[:-1].tolist() == whole


def test_a_prepared_corpus_is_not_prepared_again_until_something_changes(tmp_path, tokenizer_json):
    source, data = tmp_path / "a.txt", DataSpec(path=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"))
    source.write_text("some text")
    first = prepare(data)
    born = first.stat().st_ino
    assert prepare(data) == first and first.stat().st_ino == born
    other = prepare(DataSpec(path=str(source), cache=data.cache, tokenizer=str(tokenizer_json)))
    source.write_text("some other text")
    assert len({first, other, prepare(data)}) == 3
    assert first.parent == tmp_path / "cache" and len(list(first.parent.iterdir())) == 3


def test_without_a_cache_folder_the_users_own_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    (tmp_path / "a.txt").write_text("some text")
    assert prepare(DataSpec(path=str(tmp_path / "a.txt"))).parent == tmp_path / "x" / "shoal" / "tokens"


def test_a_damaged_cache_is_made_anew(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    data = DataSpec(path=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"))
    made = prepare(data)
    content = made.read_bytes()
    made.write_bytes(content[:-3])
    assert prepare(data).read_bytes() == content


def test_processes_that_start_together_build_it_once(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 1000)
    program = (
        "import time\n"
        "from shoal.spec.job import DataSpec\n"
        "from shoal.train.data import corpus\n"
        "write = corpus.write_tokens\n"
        "def slow(*arguments): print('built'); time.sleep(1); write(*arguments)\n"
        "corpus.write_tokens = slow\n"
        f"corpus.prepare(DataSpec(path={str(tmp_path / 'a.txt')!r}, cache={str(tmp_path / 'cache')!r}))\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert "".join(said).count("built") == 1
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".tokens"]


@pytest.mark.parametrize(("kind", "limit"), [("bytes", 50), ("tokenizer.json", 200)])
def test_memory_stays_bounded_for_a_corpus_larger_than_it(tmp_path, tokenizer_json, kind, limit):
    """30 MB of JSONL in less memory, MB, than holds the text with its ids, or its encodings all at once (over 1 GB)."""
    line = json.dumps({"text": "some words of a document that is repeated " * 25}) + "\n"
    with (tmp_path / "a.jsonl").open("w") as file:
        for _ in range(30_000_000 // len(line)):
            file.write(line)
    name = "bytes" if kind == "bytes" else str(tokenizer_json)
    program = (
        "from shoal.spec.job import DataSpec\n"
        "from shoal.train.data.corpus import prepare\n"
        "from shoal.train.data.tokenizer import load_tokenizer\n"
        "from shoal.train.display import peak_memory\n"
        f"load_tokenizer({name!r}).encode('a')\n"
        "before = peak_memory('cpu')\n"
        f"data = DataSpec(path={str(tmp_path / 'a.jsonl')!r}, tokenizer={name!r}, cache={str(tmp_path / 'cache')!r})\n"
        "prepare(data)\n"
        "print((peak_memory('cpu') - before) // 10**6)\n"
    )
    grown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert 0 < int(grown) < limit, f"grew by {grown} MB"


@pytest.mark.parametrize("content", [None, b"", b"\xff", b'{"text": "a"}\nb', b'{"body": "a"}', b'{"text": ""}'])
def test_a_corpus_that_fails_leaves_nothing(tmp_path, content):
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RequestError, match=r"^data\.(path|field)"):
        prepare(DataSpec(path=str(path), cache=str(tmp_path / "cache")))
    assert not list(tmp_path.glob("cache/*"))


def test_a_cache_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(RequestError, match=r"^data\.cache = .*a\.txt/cache cannot be written \(Not a directory\)"):
        prepare(DataSpec(path=str(tmp_path / "a.txt"), cache=str(tmp_path / "a.txt" / "cache")))


def test_a_token_file_is_read_only_with_the_tokenizer_that_made_it(tmp_path, tokenizer_json):
    (tmp_path / "a.txt").write_text("some text")
    path = str(tmp_path / "a.tokens")
    for maker, other, would_do in (
        ("bytes", str(tokenizer_json), "bytes would do"),
        (str(tokenizer_json), "bytes", "the tokenizer.json of 600 tokens that did would do"),
    ):
        write_tokens(DataSpec(path=str(tmp_path / "a.txt"), tokenizer=maker), Path(path), False)
        assert prepare(DataSpec(path=path, tokenizer=maker)) == Path(path)
        with pytest.raises(RequestError, match=rf"^data\.tokenizer = .* did not make .*; {would_do}"):
            prepare(DataSpec(path=path, tokenizer=other))
