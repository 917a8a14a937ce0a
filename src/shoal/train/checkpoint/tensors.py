"""Tensors in safetensors files, written as a stream with checksums and read chunk by chunk; nothing is ever unpickled."""

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from io import BufferedReader, BufferedWriter
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.train.checkpoint.folder import PIECE
from shoal.train.checkpoint.index import WIDTHS, Damaged, File

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in WIDTHS}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FORMAT = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "int64": "I64", "int32": "I32"}


class Entry(NamedTuple):
    """A tensor to be written. dtype: by torch's name."""

    name: str
    dtype: str
    shape: Sequence[int]


class Lies(NamedTuple):
    """Where a tensor lies in its file: from byte `at` on; check: CRC-32 of its bytes."""

    at: int
    check: int


def write_tensors(
    path: Path, entries: Sequence[Entry], tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[File, list[Lies]]:
    """Writes a new safetensors file, on the disk when this returns; one tensor at a time is asked for and kept.

    entries: the widest elements first, so that every tensor is aligned. tensors: on the CPU, in the entries' order.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for entry in entries:
        stop = start + prod(entry.shape) * WIDTHS[entry.dtype]
        header[entry.name] = {
            "dtype": FORMAT[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    head = len(text).to_bytes(8, "little") + text
    lies, place = [], len(head)
    with path.open("xb") as file:
        file.write(head)
        for entry, tensor in zip(entries, tensors, strict=True):
            assert NAMES[tensor.dtype] == entry.dtype and tuple(tensor.shape) == tuple(entry.shape), entry.name
            size, check = _write(file, tensor)
            lies.append(Lies(place, check))
            place += size
        file.flush()
        os.fsync(file.fileno())
    return File(path.name, place, len(head), zlib.crc32(head)), lies


def _write(file: BufferedWriter, tensor: Tensor) -> tuple[int, int]:
    """Writes the bytes of a tensor; how many, and their CRC-32."""
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    check = 0
    for start in range(0, len(content), PIECE):
        piece = content[start : start + PIECE]
        check = zlib.crc32(piece, check)
        file.write(piece)
    return len(content), check


def read_tensor(file: BufferedReader, name: str, lies: Lies, dtype: str, shape: Sequence[int]) -> Tensor:
    """A tensor of the file `name`, on the CPU. Raises Damaged when its bytes are not those that were written."""
    content = bytearray(prod(shape) * WIDTHS[dtype])
    file.seek(lies.at)
    view, done = memoryview(content), 0
    while done < len(content) and (read := file.readinto(view[done:])):
        done += read
    if done < len(content) or zlib.crc32(content) != lies.check:
        raise Damaged(f"the checksums of its {name} do not fit its content")
    return torch.frombuffer(content, dtype=DTYPES[dtype]).view(tuple(shape))
