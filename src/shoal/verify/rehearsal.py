"""The dry run: the real step of one rank of a large layout, on tensors that have shapes and no values.

Nothing of the step is left out or replaced: the trainer, its schedule and its collectives run as on the rank itself, on one
CPU, without the other ranks and without memory for tensors. So what it sends, holds and computes can be audited against
the plan at any size.
"""

import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.comm.rehearsal import rehearsed
from shoal.plan.experts import routed_step
from shoal.plan.flops import step_flops
from shoal.plan.memory import memory
from shoal.plan.pieces import mesh_of
from shoal.plan.traffic import step_transfers
from shoal.spec.errors import RequestError
from shoal.spec.job import Job
from shoal.train.data.share import MicroBatch
from shoal.train.trainer import Trainer
from shoal.transfer import Transfer
from shoal.verify.audit import MemoryRow, Row, audit, audit_memory
from shoal.verify.flops import count
from shoal.verify.known import Known
from shoal.verify.measure import measured_step


@dataclass(frozen=True)
class Rehearsal:
    """What one rank's step sends, holds and computes, planned and rehearsed.

    coordinates: the rank's, by axis. transfers: as recorded; rows: of them against the plan. flops: by kind, (planned,
    rehearsed). most: bytes of all tensors at once, short-lived ones included. seconds: that the rehearsal took.
    """

    layout: str
    world: int
    rank: int
    coordinates: Mapping[str, int]
    transfers: Sequence[Transfer]
    rows: Sequence[Row]
    memory: Sequence[MemoryRow]
    flops: Mapping[str, tuple[int, int]]
    most: int
    seconds: float

    @property
    def failures(self) -> list[str]:
        """One line for each thing that is not as planned."""
        lines = [row.difference() for row in self.rows if not row.ok]
        lines += [row.difference() for row in self.memory if not row.ok]
        lines += [
            f"{kind}: planned {planned:,} floating-point operations, rehearsed {seen:,}"
            for kind, (planned, seen) in self.flops.items()
            if planned != seen
        ]
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The document of `shoal train --dry-run --json`."""
        return {
            "ok": not self.failures,
            "layout": self.layout,
            "world": self.world,
            "rank": self.rank,
            "coordinates": dict(self.coordinates),
            "transfers": [row.as_dict() for row in self.rows],
            "memory": [row.as_dict() for row in self.memory],
            "flops": [
                {"kind": kind, "predicted": planned, "measured": seen} for kind, (planned, seen) in self.flops.items()
            ],
            "most_bytes": self.most,
            "seconds": self.seconds,
            "failures": self.failures,
        }


def rehearse(job: Job, rank: int) -> Rehearsal:
    """Rehearses one step of `rank` of the job's layout. Every target counts, and blocks are not compiled.

    Experts are chosen evenly (verify/known.py), alike on all ranks, and the plan is that of this routing.

    Raises RequestError for a rank that is not in the layout, and for what needs values or real files.
    """
    _refuse(job)
    started = time.perf_counter()
    eager = replace(job, train=replace(job.train, compile=False))
    mesh = mesh_of(job)
    with rehearsed(mesh, rank) as world, FakeTensorMode(), WithoutValues(job.model.moe is not None) as seen:
        trainer = Trainer(eager, world, Blank(job), drawn=False)
        if job.layout.zero == 3:
            with world.ledger.off():
                trainer.step(0)  # in which stage 3 learns what to fetch ahead
        seen.begin(trainer.model.parameters())
        before = trainer.mixtures.routed(seen.array)
        held = measured_step(trainer, 0)
        routed = {layer: after - before[layer] for layer, after in trainer.mixtures.routed(seen.array).items()}
    transfers = world.ledger.transfers()
    everywhere = dict.fromkeys(mesh.group("ep", rank), routed)
    planned = [*step_transfers(job, rank, tokens=False), *routed_step(job, rank, everywhere)]
    return Rehearsal(
        str(job.layout),
        mesh.world,
        rank,
        mesh.coordinates(rank),
        transfers,
        audit([planned], [transfers]),
        audit_memory(rank, memory(job, rank, everywhere), held),
        {kind: (flops, seen.flops[kind]) for kind, flops in step_flops(job, rank, everywhere).items()},
        seen.most,
        time.perf_counter() - started,
    )


def _refuse(job: Job) -> None:
    if job.train.offload == "disk":
        raise RequestError("train.offload", "train.offload = disk would write real files in a dry run; host would do")
    if job.data.packing == "packed" and job.layout.cp > 1:
        raise RequestError(
            "data.packing",
            "data.packing = packed makes the work of context ranks depend on the text, of which a dry run has none; "
            "stream would do",
        )


class Blank:
    """Micro-batches of one rank as to their shapes: every target counts, and all of a sample is one document."""

    def __init__(self, job: Job):
        self.job = job

    def batch(self, step: int) -> list[MicroBatch]:
        zeros = np.zeros((self.job.micro_batch, self.job.data.sequence), dtype=np.int64)
        documents = zeros if self.job.data.packing == "packed" else None
        return [MicroBatch(zeros, zeros, zeros[:, 0], documents)] * self.job.layout.micro_batches


class WithoutValues(TorchDispatchMode):
    """Inside a FakeTensorMode: whoever asks a tensor for a value hears 1, or "all of it"; shapes, memory and work are real.

    integers: whether those of integers are known all the same, as routing wants it. flops: floating-point operations by kind.
    now, most: bytes of all tensors alive, and the most so far.
    """

    def __init__(self, integers: bool = False) -> None:
        super().__init__()
        self.known = Known() if integers else None
        self.flops: Counter[str] = Counter()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}  # of living storages, by address
        self._resized: list[UntypedStorage] = []

    def begin(self, resized: Iterable[Tensor] = ()) -> None:
        """Forgets what was computed so far, and what is no longer held. resized: tensors whose memory comes and goes."""
        self._resized = [*{x.untyped_storage()._cdata: x.untyped_storage() for x in resized}.values()]
        self.flops.clear()
        self._look_again()
        self.most = self.now

    def array(self, x: Tensor) -> np.ndarray:
        """What a tensor of integers holds."""
        found = self.known.array(x) if self.known else None
        assert found is not None, "asked for a value that nobody knows"
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = self.known.value(args[0]) if self.known and args and isinstance(args[0], Tensor) else None
        if value is None:
            match func:
                case torch.ops.aten._local_scalar_dense.default:
                    return _one(args[0].dtype)
                case torch.ops.aten.nonzero.default:
                    return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        elif func is torch.ops.aten._local_scalar_dense.default:
            return self.array(args[0]).item()
        count(func, args, self.flops)
        result = self.known.call(func, args, kwargs or {}) if self.known else func(*args, **(kwargs or {}))
        for x in (result,) if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else ():
            if isinstance(x, Tensor):
                self._meet(x.untyped_storage())
        if self.now > self.most:
            self._look_again()
            self.most = max(self.most, self.now)
        return result

    def _meet(self, storage: UntypedStorage) -> None:
        """Counts a storage, which may be new or of another size than before."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _look_again(self) -> None:
        """Notices memory that was given back since."""
        for storage in self._resized:
            self._meet(storage)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _one(dtype: torch.dtype) -> Any:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
