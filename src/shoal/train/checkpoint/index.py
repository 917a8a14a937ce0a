"""What a checkpoint says of itself: index.json, written last, read as plain data and held against a checksum. No torch.

It is JSON and not the pickle that torch's own checkpoints carry, since a pickle from a stranger runs his code.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from math import isfinite, nan, prod
from pathlib import Path
from typing import Any

from shoal.spec.errors import shown

INDEX = "index.json"
MAGIC, VERSION = "shoal checkpoint", 1
WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "int64": 8, "int32": 4}  # bytes per element, by torch's names


class Damaged(Exception):
    """A checkpoint that is not as it was written; str(): why, in half a sentence."""


@dataclass(frozen=True)
class File:
    """A safetensors file of tensors. size: in bytes, of which `head` come before the first tensor; check: their CRC-32."""

    name: str
    size: int
    head: int
    check: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, row-major from byte `at` of file number `file` on; check: CRC-32 of its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    at: int
    check: int


@dataclass(frozen=True)
class Stored:
    """A whole tensor, in chunks that cover it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def size(self, chunk: Chunk) -> int:
        """Bytes of one of its chunks."""
        return prod(chunk.sizes) * WIDTHS[self.dtype]


@dataclass(frozen=True)
class Progress:
    """What a run has done, for its metrics to go on. Losses in nats per token, nan where there is none."""

    tokens: int
    skipped: int
    skipped_in_a_row: int
    first_loss: float
    loss: float
    eval_loss: float


@dataclass(frozen=True)
class Index:
    """step: training steps done, so the data position is step x batch; updates: of the optimizer. job: as a tree of plain
    values. data: what identifies the tokens. tensors: by "kind/parameter", as train/checkpoint/state.py names them.
    """

    step: int
    updates: int
    job: Mapping[str, Any]
    data: str
    progress: Progress
    files: tuple[File, ...]
    tensors: Mapping[str, Stored]


def write_index(index: Index) -> bytes:
    """The content of index.json."""
    body = asdict(index)
    body["progress"] = {name: value if isfinite(value) else None for name, value in body["progress"].items()}
    body["tensors"] = {
        name: [stored.dtype, stored.shape, [list(vars(chunk).values()) for chunk in stored.chunks]]
        for name, stored in index.tensors.items()
    }
    text = _canonical(body)
    head = json.dumps({"format": MAGIC, "version": VERSION, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    return f'{head[:-1]}, "body": {text}}}\n'.encode()


def read_index(folder: Path) -> Index:
    """The index of the checkpoint in `folder`. Raises Damaged when there is none or it is not as it was written."""
    try:
        document = json.loads((folder / INDEX).read_bytes())
    except FileNotFoundError:
        raise Damaged(f"it has no {INDEX}") from None
    except OSError as error:
        raise Damaged(f"its {INDEX} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise Damaged(f"its {INDEX} is torn") from None
    if not isinstance(document, dict) or document.get("format") != MAGIC:
        raise Damaged(f"its {INDEX} is not one of shoal's")
    if document.get("version") != VERSION:
        raise Damaged(f"its format is version {shown(document.get('version'))}, not {VERSION}")
    body = document.get("body")
    try:
        if hashlib.sha256(_canonical(body).encode()).hexdigest() != document.get("sha256"):
            raise Damaged(f"the checksum of its {INDEX} does not fit its content")
        return _index(body)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise Damaged(f"its {INDEX} describes no checkpoint") from None


def _canonical(body: Any) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def _index(body: Any) -> Index:
    """The Index of a parsed body. Raises ValueError, TypeError, LookupError or AttributeError for what cannot be one."""
    files = tuple(_file(entry) for entry in body["files"])
    if not isinstance(body["job"], dict) or not isinstance(body["data"], str):
        raise ValueError
    return Index(
        step=_count(body["step"]),
        updates=_count(body["updates"]),
        job=body["job"],
        data=body["data"],
        progress=_progress(**body["progress"]),
        files=files,
        tensors={name: _stored(entry, files) for name, entry in body["tensors"].items()},
    )


def _progress(tokens: Any, skipped: Any, skipped_in_a_row: Any, first_loss: Any, loss: Any, eval_loss: Any) -> Progress:
    counts, losses = (tokens, skipped, skipped_in_a_row), (first_loss, loss, eval_loss)
    return Progress(*map(_count, counts), *map(_loss, losses))


def _file(entry: Any) -> File:
    file = File(entry["name"], _count(entry["size"]), _count(entry["head"]), _count(entry["check"]))
    if not re.fullmatch(r"rank-\d+\.safetensors", file.name):  # never a path out of the folder
        raise ValueError
    return file


def _stored(entry: Any, files: tuple[File, ...]) -> Stored:
    dtype, shape, chunks = entry
    stored = Stored(dtype, tuple(map(_count, shape)), tuple(_chunk(*chunk) for chunk in chunks))
    for chunk in stored.chunks:
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        inside = all(end <= size for end, size in zip(ends, stored.shape, strict=True))
        file = files[chunk.file]
        if not inside or chunk.at < file.head or chunk.at + stored.size(chunk) > file.size:
            raise ValueError
    whole = (tuple(0 for _ in stored.shape), stored.shape)
    if _corners((chunk.offsets, chunk.sizes) for chunk in stored.chunks) != _corners([whole]):
        raise ValueError  # somewhere there is no chunk, or more than one
    return stored


def _corners(boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[tuple[int, ...], int]:
    """Signs of the corners of (offsets, sizes), summed where they meet: equal for two sets of boxes only where these cover
    every element equally often, as the corners are the differences, along all dimensions, of how often that is.
    """
    signs: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes in boxes:
        for ends in product((0, 1), repeat=len(sizes)):
            corner = tuple(offset + end * size for offset, end, size in zip(offsets, ends, sizes, strict=True))
            signs[corner] += (-1) ** sum(ends)
    return {corner: sign for corner, sign in signs.items() if sign}


def _chunk(offsets: Any, sizes: Any, file: Any, at: Any, check: Any) -> Chunk:
    return Chunk(tuple(map(_count, offsets)), tuple(map(_count, sizes)), _count(file), _count(at), _count(check))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError
    return value


def _loss(value: Any) -> float:
    """JSON knows no nan: null stands for it."""
    if value is not None and type(value) not in (int, float):
        raise ValueError
    return nan if value is None else value
