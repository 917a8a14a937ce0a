"""A corpus becomes a token file: encoded once, in bounded memory, and kept in the cache."""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from shoal.spec.errors import RequestError
from shoal.spec.job import DataSpec
from shoal.train.data.lock import locked
from shoal.train.data.naming import named
from shoal.train.data.text import Piece, pieces, sources
from shoal.train.data.tokenizer import Tokenizer, load_tokenizer
from shoal.train.data.tokens import VERSION, TokenFile, TokenWriter, cannot_write

GATHERED = 1 << 20  # characters that a tokenizer gets at once: many texts are faster than one by one


def prepare(data: DataSpec, show_progress: bool = False) -> Path:
    """The token file of data.path: itself if it is one, else made once and kept in the cache folder. Raises RequestError.

    Of several processes that prepare the same corpus at once, one builds it and the others wait for it.
    """
    if data.path.endswith(".tokens"):
        file = TokenFile.open(data.path)
        _check_tokenizer(file, data.tokenizer)
        return file.path
    target = _cached(data)
    if _sound(target):
        return target
    with ExitStack() as held:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(target.with_name(f".{target.name}.lock")))
        except OSError as error:
            raise cannot_write("data.cache", target.parent, error) from None
        if not _sound(target):  # another process may have made it meanwhile
            write_tokens(data, target, show_progress)
    return target


def write_tokens(data: DataSpec, target: Path, show_progress: bool, target_field: str = "data.cache") -> None:
    """Writes the token file of a corpus: every document's ids and the tokenizer's end of document. Raises RequestError."""
    files = sources(data.path)
    tokenizer = load_tokenizer(data.tokenizer)
    total = sum(file.stat().st_size for file in files)
    columns = (TextColumn("reading the corpus"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    live = show_progress and sys.stderr.isatty()
    console = Console(file=sys.stderr, force_terminal=live)
    with (
        TokenWriter(target, tokenizer.vocab, tokenizer.identity, target_field) as writer,
        Progress(*columns, console=console, disable=not live, transient=True) as bar,
    ):
        task = bar.add_task("", total=total)
        for batch in _batches(pieces(files, data.field, lenient=not data.path)):
            _add(writer, tokenizer, batch)
            bar.update(task, completed=batch[-1].read)
        if not writer.tokens:
            raise RequestError("data.path", f"data.path = {named(data.path)} holds no text; a file with text would do")


def cache_folder(data: DataSpec) -> Path:
    """data.cache, else shoal's part of the user's cache folder (XDG base directories)."""
    if data.cache:
        return Path(data.cache)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "shoal" / "tokens"


def _cached(data: DataSpec) -> Path:
    """Where the cache keeps a corpus: under a name that changes with its files and with how they are read."""
    marks = []
    for file in sources(data.path):
        state = file.stat()
        marks.append((str(file.resolve()), state.st_size, state.st_mtime_ns))
    recipe = json.dumps([VERSION, load_tokenizer(data.tokenizer).identity, data.field, marks])
    return cache_folder(data) / f"{hashlib.blake2b(recipe.encode(), digest_size=12).hexdigest()}.tokens"


def _sound(target: Path) -> bool:
    """Whether the cache has it; a damaged file is made anew."""
    try:
        TokenFile.open(target)
    except RequestError:
        return False
    return True


def _check_tokenizer(file: TokenFile, name: str) -> None:
    """Raises RequestError when data.tokenizer did not make the token file: its text would be read as another's."""
    if load_tokenizer(name).identity == file.header.tokenizer:
        return
    maker = "bytes" if file.header.tokenizer == "bytes" else f"the tokenizer.json of {file.vocab:,} tokens that did"
    raise RequestError(
        "data.tokenizer", f"data.tokenizer = {named(name)} did not make {named(file.path)}; {maker} would do"
    )


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in lists of about GATHERED characters."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= GATHERED:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _add(writer: TokenWriter, tokenizer: Tokenizer, batch: list[Piece]) -> None:
    end = np.asarray([tokenizer.eod])
    for piece, ids in zip(batch, tokenizer.encode_all([piece.text for piece in batch]), strict=True):
        writer.add(np.concatenate([ids, end]) if piece.ends else ids, piece.ends)
