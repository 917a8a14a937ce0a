"""Token files: memory-mapped ids with the ends of documents, written as a stream, refused when damaged.

Layout: a header of 4096 bytes (JSON, padded with spaces), the ids (2 or 4 bytes each, little-endian), then the index of
documents: where each one ends (8 bytes each). The header carries checksums of itself, of the index and of the ids.
"""

import json
import os
import tempfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from shoal.spec.errors import RequestError, shown

MAGIC, VERSION, HEADER = "shoal tokens", 1, 4096
FLUSH = 1 << 20  # ids in memory before they go to the file
EDGE = 1 << 20  # bytes at either end that are checked on opening; `verify` checks them all


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
        kind = np.uint16 if header.width == 2 else np.uint32
        self.tokens = np.memmap(path, kind, "r", HEADER, (header.tokens,))
        start = HEADER + header.tokens * header.width
        self.ends = np.memmap(path, "<u8", "r", start, (header.documents,))

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Opens and checks a token file: header, length, index and both ends. Raises RequestError naming data.path."""
        path = Path(path)
        header = _read_header(path)
        size = HEADER + header.tokens * header.width + header.documents * 8
        if path.stat().st_size != size:
            raise _damaged(path, f"it has {path.stat().st_size:,} bytes and should have {size:,}")
        file = cls(path, header)
        if zlib.crc32(file.ends.tobytes()) != header.index_check or _edges(file.tokens) != header.edge_check:
            raise _damaged(path, "its checksums do not fit its content")
        return file

    def verify(self) -> None:
        """Reads every id and holds it against the checksum; raises RequestError naming data.path."""
        check = 0
        for start in range(0, len(self.tokens), FLUSH):
            check = zlib.crc32(self.tokens[start : start + FLUSH].tobytes(), check)
        if check != self.header.whole_check:
            raise _damaged(self.path, "the checksum of its ids does not fit them")


class TokenWriter:
    """Writes a token file document by document in bounded memory. The file appears on leaving the context, whole.

    Raises RequestError naming `field` when the folder cannot be written, and for ids outside the vocabulary.
    """

    def __init__(self, path: str | Path, vocab: int, tokenizer: str, field: str = "data.cache"):
        self.path, self.vocab, self.tokenizer = Path(path), vocab, tokenizer
        self.kind = np.dtype("<u2" if vocab <= 2**16 else "<u4")
        self.written = self.check = self.pending_ids = 0
        self.pending: list[np.ndarray] = []
        self.ends: list[int] = []
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        except OSError as error:
            raise RequestError(
                field,
                f"{field} = {shown(self.path.parent)} cannot be written ({error.strerror}); a folder of yours would do",
            ) from None
        self.file, self.unfinished = os.fdopen(handle, "w+b"), Path(name)
        self.file.write(b" " * HEADER)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self.file.close()
            self.unfinished.unlink(missing_ok=True)

    def add(self, ids: np.ndarray, ends: bool = True) -> None:
        """Appends ids; ends: whether the document ends with them."""
        if len(ids) and int(ids.max()) >= self.vocab:
            raise RequestError(
                "model.vocab",
                f"token id {int(ids.max())} lies outside the vocabulary of {self.vocab}; a larger one would do",
            )
        self.pending.append(ids.astype(self.kind))
        self.pending_ids += len(ids)
        if ends:
            self.ends.append(self.written + self.pending_ids)
        if self.pending_ids >= FLUSH:
            self._flush()

    def _flush(self) -> None:
        block = np.concatenate(self.pending) if self.pending else np.empty(0, self.kind)
        self.check = zlib.crc32(block.tobytes(), self.check)
        self.file.write(block.tobytes())
        self.written += len(block)
        self.pending, self.pending_ids = [], 0

    def _finish(self) -> None:
        self._flush()
        ends = np.asarray(self.ends, dtype="<u8")
        self.file.write(ends.tobytes())
        self.file.flush()
        tokens = (
            np.memmap(self.unfinished, self.kind, "r", HEADER, (self.written,))
            if self.written
            else np.empty(0, self.kind)
        )
        header = Header(
            self.written,
            len(ends),
            self.kind.itemsize,
            self.vocab,
            self.tokenizer,
            zlib.crc32(ends.tobytes()),
            _edges(tokens),
            self.check,
        )
        fields: dict[str, Any] = {"magic": MAGIC, "version": VERSION, **asdict(header)}
        fields["check"] = zlib.crc32(json.dumps(fields).encode())
        self.file.seek(0)
        self.file.write(json.dumps(fields).encode().ljust(HEADER))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.unfinished.replace(self.path)


def _read_header(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            content = file.read(HEADER)
    except OSError as error:
        raise RequestError(
            "data.path", f"data.path = {shown(path)} cannot be read ({error.strerror}); a token file or text would do"
        ) from None
    try:
        fields = json.loads(content)
        check, magic, version = fields.pop("check"), fields["magic"], fields["version"]
        sound = len(content) == HEADER and magic == MAGIC and check == zlib.crc32(json.dumps(fields).encode())
        if sound and version == VERSION:
            return Header(**{name: value for name, value in fields.items() if name not in ("magic", "version")})
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    raise _damaged(path, "its version is another one" if sound else "its header is not that of a token file")


def _edges(tokens: np.ndarray) -> int:
    """CRC-32 of the first and the last EDGE bytes."""
    count = EDGE // tokens.itemsize
    return zlib.crc32(tokens[-count:].tobytes(), zlib.crc32(tokens[:count].tobytes()))


def _damaged(path: Path, why: str) -> RequestError:
    return RequestError(
        "data.path", f"data.path = {shown(path)} is no sound token file: {why}; `shoal tokenize` writes it anew"
    )
