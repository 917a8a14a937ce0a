"""Text as it lies on disk: text files, JSONL, folders and the Python standard library, read piece by piece."""

import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.spec.errors import RequestError, nearest, shown
from shoal.train.data.naming import named

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")  # what is read in a folder
PIECE = 1 << 18  # characters of a long text that are encoded at once


@dataclass(frozen=True)
class Piece:
    """A run of text. ends: whether its document ends with it; read: bytes of the source read by then, from 0."""

    text: str
    ends: bool
    read: int


def sources(path: str) -> list[Path]:
    """The files of data.path, sorted. Nothing stands for the Python standard library's own source, about 30 MB.

    A folder gives every file below it whose name ends as SUFFIXES say, without hidden files and folders (.git, .venv).
    Raises RequestError naming data.path.
    """
    if not path:
        library = Path(sysconfig.get_path("stdlib"))
        others = {"site-packages", "dist-packages", "__pycache__"}
        return sorted(file for file in library.rglob("*.py") if not others & set(file.relative_to(library).parts))
    given = Path(path)
    try:
        if given.is_dir():
            return _in_folder(given)
        if given.is_file():
            return [given]
        exists = given.exists()
    except OSError as error:  # a name too long, a folder that may not be entered
        raise RequestError(
            "data.path",
            f"data.path = {named(path)} cannot be read ({error.strerror}); a file that you may read would do",
        ) from None
    if exists:
        raise RequestError("data.path", f"data.path = {named(path)} is not a regular file; a text file would do")
    near = nearest(given.name, (other.name for other in given.parent.glob("*")) if given.parent.is_dir() else ())
    hint = f"did you mean {given.parent / near}?" if near else "a text file, a folder or nothing would do"
    raise RequestError("data.path", f"data.path = {named(path)} does not exist; {hint}")


def pieces(files: Iterable[Path], field: str, lenient: bool = False) -> Iterator[Piece]:
    """The text of the files, in order, in bounded memory. A file is a document; in JSONL, each line's `field` is.

    Documents without text are left out. lenient: leave out files that are not UTF-8, instead of raising RequestError.
    """
    before = 0
    for file in files:
        reader = _lines if file.suffix.lower() == ".jsonl" else _text
        open_document = False
        try:
            for piece in reader(file, field):
                open_document = not piece.ends
                yield Piece(piece.text, piece.ends, before + piece.read)
        except UnicodeDecodeError as error:
            if not lenient:
                raise RequestError(
                    "data.path", f"data.path: {named(file)} is not UTF-8 text ({error.reason}); text in UTF-8 would do"
                ) from None
            if open_document:  # its first pieces are out already
                yield Piece("", True, before)
        except OSError as error:
            raise RequestError(
                "data.path",
                f"data.path: {named(file)} cannot be read ({error.strerror}); a file that you may read would do",
            ) from None
        before += file.stat().st_size


def _in_folder(folder: Path) -> list[Path]:
    found = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and file.is_file()
    )
    if not found:
        raise RequestError(
            "data.path",
            f"data.path = {named(folder)} holds no {', '.join(SUFFIXES)} file; a folder with text would do",
        )
    return found


def _text(file: Path, field: str) -> Iterator[Piece]:
    """A text file as one document, in pieces of about PIECE characters."""
    rest, read = "", 0
    with file.open(encoding="utf-8", newline="") as text:
        while block := text.read(PIECE):
            head, rest = _cut(rest + block)
            read += len(block.encode())
            yield Piece(head, False, read)
    if read:
        yield Piece(rest, True, read)


def _lines(file: Path, field: str) -> Iterator[Piece]:
    """A JSONL file, a document per line; long ones in pieces of about PIECE characters."""
    read = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            read += len(line)
            text = _text_of(line, field, f"line {number} of {named(file)}") if line.strip() else ""
            start = 0
            while start < len(text):
                run = text[start : start + PIECE]
                if start + PIECE < len(text):
                    run, _ = _cut(run)
                start += len(run)
                yield Piece(run, start == len(text), read)


def _text_of(line: bytes, field: str, place: str) -> str:
    """The text in a line of JSONL. place: the line in words, for the RequestError."""
    record = None
    try:
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(text := record.get(field), str):
            text.encode()  # JSON can spell half a surrogate pair, which no encoding can
            return text
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise RequestError(
            "data.path", f"data.path: {place} is not Unicode text ({error.reason}); text in UTF-8 would do"
        ) from None
    except (ValueError, RecursionError):
        raise RequestError("data.path", f'data.path: {place} is not JSON; {{"{field}": "..."}} would do') from None
    texts = [key for key, value in record.items() if isinstance(value, str)] if isinstance(record, dict) else []
    hint = f"{shown(nearest(field, texts) or texts[0])} would do" if texts else f'{{"{field}": "..."}} would do'
    raise RequestError("data.field", f"data.field = {shown(field)} is no text in {place}; {hint}")


def _cut(text: str) -> tuple[str, str]:
    """Text in two where a tokenizer would cut it too: before the space of the last word; else after a line, else nowhere."""
    place = text.rstrip().rfind(" ", 1)
    if place < 1:
        place = text.rfind("\n") + 1 or len(text)
    return text[:place], text[place:]
