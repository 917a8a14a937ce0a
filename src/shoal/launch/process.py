"""Joins the process group of a layout: from a Place to a World, and back to nothing."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.comm.backend import backend_of
from shoal.comm.gloo import address_gloo
from shoal.comm.ledger import Ledger
from shoal.comm.whereabouts import NOWHERE, Nowhere, Whereabouts, clear
from shoal.comm.world import World
from shoal.launch.attempt import of_this_attempt
from shoal.launch.cluster import Place
from shoal.launch.hosts import check_alike, meet, own_address
from shoal.launch.report import kind_of, words_of
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
def connected(job: Job, place: Place | None, whereabouts: Path | None = None, content: str = "") -> Iterator[World]:
    """A World for the job's layout: alone when `place` is None, else among the processes that share it.

    whereabouts: the folder into which each rank writes where it is; gone when all have done their work.
    content: what identifies the tokens that this rank reads.
    Raises RequestError when the layout wants another number of ranks than there are, when the ranks do not meet, and when
    ranks on several hosts differ in their job, their data or their versions.
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
    if whereabouts is not None and place.rank == 0:
        clear(whereabouts)  # of an earlier attempt; the others write after they have met this rank
    store = meet(place, job.machine.timeout_s)
    fresh = of_this_attempt(store, place, job.machine.timeout_s)
    if place.local_world < place.world:  # several hosts
        check_alike(place, fresh, job, content)
        if not place.interface and (address := own_address(place, fresh, store.host)):
            address_gloo(address)
    dist.init_process_group(
        backend_of(device),
        store=fresh,
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=job.machine.timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    noted = _noted(whereabouts, place)
    world = World(mesh_of(job), place.rank, Ledger(whereabouts=noted), device, job.machine.timeout_s)
    try:
        yield world
        # Only after success: a rank that fails must not wait here for peers that wait for it.
        call = world.calls().begin("barrier")
        dist.barrier()  # nobody leaves while another still waits for it
        call.done()
    except BaseException as error:
        noted.ended(kind_of(error), words_of(error))
        raise
    noted.ended("done")
    world.close()
    dist.destroy_process_group()
    if whereabouts is not None and place.rank == 0:
        clear(whereabouts)
        with suppress(OSError):
            whereabouts.rmdir()


def _noted(folder: Path | None, place: Place) -> Nowhere:
    """What this rank writes down where it is with. A folder that takes no such file is no reason not to train."""
    if folder is None:
        return NOWHERE
    try:
        return Whereabouts(folder, place.rank, place.world)
    except OSError:
        return NOWHERE
