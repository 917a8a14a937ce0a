"""Token files: memory-mapped ids with the ends of documents, written as a stream, refused when damaged.

Layout: a header of 4096 bytes (JSON, padded with spaces), the ids (2 or 4 bytes each, little-endian), then the index of
documents: where each one ends (8 bytes each). The header carries checksums of itself, of the index and of the ids.
"""

import json
import os
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from shoal.spec.errors import RequestError
from shoal.train.data.naming import named

MAGIC, VERSION, HEADER = "shoal tokens", 1, 4096
FLUSH = 1 << 20  # ids or documents in memory before they go to the file
EDGE = 1 << 20  # bytes at either end that are checked on opening; `verify` checks them all
INDEX = np.dtype("<u8")


@dataclass(frozen=True)
class Header:
    """What a token file says of itself. width: bytes per id; checks: CRC-32 of the index, of both ends and of all ids."""

    tokens: int
    documents: int
    width: int
    vocab: int
    tokenizer: str
    index_check: int
    edge_check: int
    whole_check: int


class TokenFile:
    """A token file opened for reading. tokens: ids (n,), memory-mapped; ends: where each document ends (d,)."""

    def __init__(self, path: Path, header: Header):
        self.path, self.header = path, header
        self.vocab = header.vocab
        self.tokens = np.memmap(path, f"<u{header.width}", "r", HEADER, (header.tokens,))
        start = HEADER + header.tokens * header.width
        self.ends = np.memmap(path, INDEX, "r", start, (header.documents,))

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Opens and checks a token file: header, length, index and both ends. Raises RequestError naming data.path."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                header = _read_header(path, file)
                ids = header.tokens * header.width
                actual, size = os.fstat(file.fileno()).st_size, HEADER + ids + header.documents * INDEX.itemsize
                if actual != size:
                    raise damaged(path, f"it has {actual:,} bytes and should have {size:,}")
                edge_check = _check_edges(file, ids)
        except OSError as error:
            raise RequestError(
                "data.path",
                f"data.path = {named(path)} cannot be read ({error.strerror}); a token file or text would do",
            ) from None
        opened = cls(path, header)
        if edge_check != header.edge_check or _check_all(opened.ends) != header.index_check:
            raise damaged(path, "its checksums do not fit its content")
        return opened

    @property
    def content(self) -> str:
        """What identifies the ids, in words."""
        return f"{self.header.tokens:,} tokens, CRC-32 {self.header.whole_check:08x}"

    def verify(self) -> None:
        """Reads every id and holds it against the checksum; raises RequestError naming data.path."""
        if _check_all(self.tokens) != self.header.whole_check:
            raise damaged(self.path, "the checksum of its ids does not fit them")


class TokenWriter:
    """Writes a token file document by document in bounded memory. The file appears on leaving the context, whole.

    tokens, documents: how many there are so far. Raises RequestError naming `field` when the folder cannot be written,
    and for ids outside the vocabulary.
    """

    def __init__(self, path: str | Path, vocab: int, tokenizer: str, field: str = "data.cache"):
        self.path, self.vocab, self.tokenizer, self.field = Path(path), vocab, tokenizer, field
        self.kind = np.dtype("<u2" if vocab <= 2**16 else "<u4")
        self.tokens = self.documents = 0
        self._check = self._index_check = 0
        self._ids: list[np.ndarray] = []
        self._ends: list[int] = []
        self._waiting = 0  # ids not yet in the file
        folder = self.path.parent
        self._unfinished = folder / f".{self.path.name}.{os.getpid()}.{secrets.token_hex(4)}"
        with self._writing():
            folder.mkdir(parents=True, exist_ok=True)
            # It has no name, so nothing is left of it however the process ends.
            self._index = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
            self._file = self._unfinished.open("x+b")
        self._file.write(b" " * HEADER)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            for file in (self._index, self._file):
                with suppress(OSError):  # a full disk, said before; what counts was flushed and synced by _finish
                    file.close()
            self._unfinished.unlink(missing_ok=True)

    def add(self, ids: np.ndarray, ends: bool = True) -> None:
        """Appends ids; ends: whether the document ends with them."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab:
            wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise RequestError(
                "model.vocab",
                f"token id {wrong} lies outside the vocabulary of {self.vocab} of the tokenizer {self.tokenizer}; "
                f"a larger one would do",
            )
        self._ids.append(ids.astype(self.kind))
        self._waiting += len(ids)
        self.tokens += len(ids)
        if ends:
            self.documents += 1
            self._ends.append(self.tokens)
        if self._waiting >= FLUSH or len(self._ends) >= FLUSH:
            self._flush()

    def _flush(self) -> None:
        ids = np.concatenate(self._ids, dtype=self.kind).tobytes() if self._ids else b""
        ends = np.asarray(self._ends, INDEX).tobytes()
        self._check, self._index_check = zlib.crc32(ids, self._check), zlib.crc32(ends, self._index_check)
        with self._writing():
            self._file.write(ids)
            self._index.write(ends)
        self._ids, self._ends, self._waiting = [], [], 0

    def _finish(self) -> None:
        self._flush()
        with self._writing():
            self._index.seek(0)
            shutil.copyfileobj(self._index, self._file)
            edge_check = _check_edges(self._file, self.tokens * self.kind.itemsize)
            header = Header(
                tokens=self.tokens,
                documents=self.documents,
                width=self.kind.itemsize,
                vocab=self.vocab,
                tokenizer=self.tokenizer,
                index_check=self._index_check,
                edge_check=edge_check,
                whole_check=self._check,
            )
            fields: dict[str, Any] = {"magic": MAGIC, "version": VERSION, **asdict(header)}
            fields["check"] = zlib.crc32(json.dumps(fields).encode())
            self._file.seek(0)
            self._file.write(json.dumps(fields).encode().ljust(HEADER))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._unfinished.replace(self.path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise cannot_write(self.field, self.path.parent, error) from None


def cannot_write(field: str, folder: Path, error: OSError) -> RequestError:
    """The error for a folder that takes no file: no permission, no room, no such place."""
    return RequestError(
        field, f"{field} = {named(folder)} cannot be written ({error.strerror}); a folder of yours with room would do"
    )


def damaged(path: Path, why: str) -> RequestError:
    """The error for a token file that is not as it was written."""
    return RequestError(
        "data.path",
        f"data.path = {named(path)} is no sound token file: {why}; one made anew by `shoal tokenize` would do",
    )


def _read_header(path: Path, file: BinaryIO) -> Header:
    content = file.read(HEADER)
    try:
        fields = json.loads(content)
        check, magic, version = fields.pop("check"), fields["magic"], fields["version"]
        sound = len(content) == HEADER and magic == MAGIC and check == zlib.crc32(json.dumps(fields).encode())
        if sound and version == VERSION:
            return Header(**{name: value for name, value in fields.items() if name not in ("magic", "version")})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        sound = False
    raise damaged(path, "its version is another one" if sound else "its header is not that of a token file")


def _check_edges(file: BinaryIO, size: int) -> int:
    """CRC-32 of the first and the last EDGE bytes of the ids, which take `size` bytes."""
    file.seek(HEADER)
    check = zlib.crc32(file.read(min(EDGE, size)))
    file.seek(HEADER + max(0, size - EDGE))
    return zlib.crc32(file.read(min(EDGE, size)), check)


def _check_all(numbers: np.ndarray) -> int:
    """CRC-32 of an array, in bounded memory."""
    check = 0
    for start in range(0, len(numbers), FLUSH):
        check = zlib.crc32(numbers[start : start + FLUSH].tobytes(), check)
    return check
