"""Documents out of text, JSONL, folders or the Python standard library, and the token file made of them."""

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from shoal.spec.errors import RequestError, nearest, shown
from shoal.spec.job import DataSpec
from shoal.train.data.tokenizer import Tokenizer, load_tokenizer
from shoal.train.data.tokens import VERSION, TokenFile, TokenWriter

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")  # what is read in a folder
PIECE = 1 << 20  # characters of a text file that are encoded at once
GATHERED = 1 << 22  # characters of short documents that are encoded at once


@dataclass(frozen=True)
class Piece:
    """A run of text. ends: whether its document ends with it; read: bytes of the source read by then, from 0."""

    text: str
    ends: bool
    read: int


def sources(path: str) -> list[Path]:
    """The files of data.path, sorted. Nothing stands for the standard library's own modules, tests left out.

    A folder gives every file below it whose name ends as SUFFIXES say. Raises RequestError naming data.path.
    """
    if not path:
        library = Path(sysconfig.get_path("stdlib"))
        left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
        return sorted(file for file in library.rglob("*.py") if not left_out & set(file.relative_to(library).parts))
    given = Path(path)
    if given.is_dir():
        found = sorted(file for file in given.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not found:
            raise RequestError(
                "data.path",
                f"data.path = {shown(path)} holds no {', '.join(SUFFIXES)} file; a folder with text would do",
            )
        return found
    if not given.exists():
        near = nearest(given.name, (other.name for other in given.parent.glob("*")) if given.parent.is_dir() else ())
        hint = f"did you mean {given.parent / near}?" if near else "a text file, a folder or nothing would do"
        raise RequestError("data.path", f"data.path = {shown(path)} does not exist; {hint}")
    return [given]


def pieces(files: Iterable[Path], field: str, lenient: bool = False) -> Iterator[Piece]:
    """The text of the files, in order, in bounded memory. A file is a document; in JSONL, each line's `field` is.

    lenient: leave out files that are not UTF-8, instead of raising RequestError.
    """
    before = 0
    for file in files:
        reader = _lines if file.suffix == ".jsonl" else _text
        try:
            for piece in reader(file, field):
                yield Piece(piece.text, piece.ends, before + piece.read)
        except UnicodeDecodeError as error:
            if not lenient:
                raise RequestError(
                    "data.path", f"data.path: {shown(file)} is not UTF-8 text ({error.reason}); text in UTF-8 would do"
                ) from None
        except OSError as error:
            raise RequestError(
                "data.path",
                f"data.path: {shown(file)} cannot be read ({error.strerror}); a file that you may read would do",
            ) from None
        before += file.stat().st_size


def write_tokens(data: DataSpec, target: Path, show_progress: bool, target_field: str = "data.cache") -> None:
    """Writes the token file of a corpus: every document's ids and the tokenizer's end of document. Raises RequestError."""
    files = sources(data.path)
    tokenizer = load_tokenizer(data.tokenizer)
    total = sum(file.stat().st_size for file in files)
    columns = (TextColumn("reading the corpus"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    with (
        TokenWriter(target, tokenizer.vocab, tokenizer.identity, target_field) as writer,
        Progress(*columns, console=console, disable=not (show_progress and console.is_terminal), transient=True) as bar,
    ):
        task = bar.add_task("", total=total)
        for batch in _batches(pieces(files, data.field, lenient=not data.path)):
            _add(writer, tokenizer, batch)
            bar.update(task, completed=batch[-1].read)
        if writer.written + writer.pending_ids <= len(writer.ends):  # nothing but ends of documents
            raise RequestError("data.path", f"data.path = {shown(data.path)} holds no text; a file with text would do")


def prepare(data: DataSpec, show_progress: bool = False) -> Path:
    """The token file of data.path: itself if it is one, else made once and kept in the cache folder. Raises RequestError.

    Processes that prepare the same corpus at once do not disturb each other: each writes a file of its own, and the
    last to finish puts equal content in the place of equal content.
    """
    if data.path.endswith(".tokens"):
        return TokenFile.open(data.path).path
    files = sources(data.path)
    tokenizer = load_tokenizer(data.tokenizer)
    marks = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    recipe = json.dumps([VERSION, tokenizer.identity, data.field, marks])
    name = hashlib.blake2b(recipe.encode(), digest_size=12).hexdigest()
    target = cache_folder(data) / f"{name}.tokens"
    if target.exists():
        try:
            return TokenFile.open(target).path
        except RequestError:
            pass  # a damaged cache is made anew
    write_tokens(data, target, show_progress)
    return target


def cache_folder(data: DataSpec) -> Path:
    """data.cache, else shoal's part of the user's cache folder (XDG base directories)."""
    if data.cache:
        return Path(data.cache)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "shoal" / "tokens"


def _text(file: Path, field: str) -> Iterator[Piece]:
    """A text file as one document, cut after white space into pieces of about PIECE characters."""
    rest, read = "", 0
    with file.open(encoding="utf-8", newline="") as text:
        while block := text.read(PIECE):
            rest += block
            cut = max(rest.rfind(" "), rest.rfind("\n")) + 1 or len(rest)
            read += len(block.encode())
            yield Piece(rest[:cut], False, read)
            rest = rest[cut:]
        yield Piece(rest, True, read)


def _lines(file: Path, field: str) -> Iterator[Piece]:
    """A JSONL file, a document per line."""
    read = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            read += len(line)
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except UnicodeDecodeError:
                raise
            except ValueError:
                raise RequestError(
                    "data.path", f'data.path: line {number} of {shown(file)} is not JSON; {{"{field}": "..."}} would do'
                ) from None
            text = record.get(field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                keys = (
                    [key for key, value in record.items() if isinstance(value, str)] if isinstance(record, dict) else []
                )
                hint = f"{keys[0]} would do" if keys else f'{{"{field}": "..."}} would do'
                raise RequestError(
                    "data.field", f"data.field = {field} is no text in line {number} of {shown(file)}; {hint}"
                )
            yield Piece(text, True, read)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in lists of about GATHERED characters, as a tokenizer encodes many texts faster than one by one."""
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
