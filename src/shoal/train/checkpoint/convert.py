"""Whole weights out of a checkpoint, without any ranks: one parameter at a time, into one safetensors file."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from shoal.spec.build import job_from_tree
from shoal.spec.job import Job
from shoal.train.checkpoint.folder import opened
from shoal.train.checkpoint.index import Index
from shoal.train.checkpoint.tensors import DTYPES, Entry, Lies, read_tensor, write_tensors
from shoal.train.files import whole


def convert(path: Path, index: Index, out: Path, dtype: str = "") -> int:
    """Writes the weights and buffers of a checkpoint, under their own names, to `out`; how many bytes that are.

    dtype: of the weights, by default the run's own, as in its model.safetensors; buffers keep theirs. Raises Damaged for
    bytes that are not as they were written, RequestError for a full disk; then the old file stays, if any.
    """
    job = job_from_tree(index.job)
    entries = sorted(_entries(index, dtype or job.train.dtype), key=lambda entry: -DTYPES[entry[1].dtype].itemsize)
    tensors = (_whole(path, index, name).to(DTYPES[entry.dtype]) for name, entry in entries)
    with whole(out) as unfinished:
        file, _ = write_tensors(unfinished, [entry for _, entry in entries], tensors, _metadata(job))
    return file.size


def _entries(index: Index, dtype: str) -> Iterator[tuple[str, Entry]]:
    """(name in the checkpoint, what becomes of it) of each weight and buffer."""
    for name, stored in index.tensors.items():
        kind, _, own = name.partition("/")
        if kind in ("weight", "buffer"):
            yield name, Entry(own, dtype if kind == "weight" else stored.dtype, stored.shape)


def _whole(path: Path, index: Index, name: str) -> Tensor:
    stored = index.tensors[name]
    whole = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    for chunk in stored.chunks:
        file = index.files[chunk.file]
        with opened(path, file) as content:
            part = read_tensor(content, file.name, Lies(chunk.at, chunk.check), stored.dtype, chunk.sizes)
        box = zip(chunk.offsets, chunk.sizes, strict=True)
        whole[tuple(slice(start, start + size) for start, size in box)] = part
    return whole


def _metadata(job: Job) -> dict[str, str]:
    return {"model": json.dumps(asdict(job.model))}
