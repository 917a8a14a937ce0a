"""Joins the process group of a layout: from a Place to a World, and back to nothing."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from shoal.comm.backend import backend_of
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.launch.cluster import Place
from shoal.plan.pieces import mesh_of
from shoal.spec.errors import RequestError
from shoal.spec.job import Job
from shoal.spec.machine import Machine


def device_of(machine: Machine, local_rank: int) -> torch.device:
    """The device of a rank: CUDA's when asked for, or when there is one, else the CPU."""
    if machine.device == "cuda" and not torch.cuda.is_available():
        raise RequestError("machine.device", "machine.device = cuda, but torch finds no GPU here; cpu or auto would do")
    if machine.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


@contextmanager
def connected(job: Job, place: Place | None) -> Iterator[World]:
    """A World for the job's layout: alone when `place` is None, else among the processes that share it.

    Raises RequestError when the layout wants another number of ranks than there are.
    """
    ranks = 1 if place is None else place.world
    if job.layout.world != ranks:
        raise RequestError(
            "layout",
            f"layout = {job.layout} needs {job.layout.world} ranks, but {ranks} were started; --layout dp={ranks} would do",
        )
    device = device_of(job.machine, place.local_rank if place else 0)
    torch.set_num_threads(job.machine.threads or max(1, (os.cpu_count() or 1) // (place.local_world if place else 1)))
    if place is None:
        yield World.single(device=device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend_of(device),
        init_method=place.meeting,
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=job.machine.timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    world = World(mesh_of(job), place.rank, Ledger(), device=device)
    yield world
    # Only after success: a rank that fails must not wait here for peers that wait for it.
    dist.barrier()  # nobody leaves while another still waits for it
    world.close()
    dist.destroy_process_group()
