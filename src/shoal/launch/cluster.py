"""Where this process stands when somebody else started it: torchrun's or Slurm's variables read into one Place."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.spec.errors import RequestError

SLURM_PORTS = range(20_000, 40_000)  # every rank derives the same port from the job's number


@dataclass(frozen=True)
class Place:
    """One process among `world`: its rank, its place on its host, and the address at which the ranks meet."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    meeting: str  # as torch.distributed's init_method
    interface: str = ""  # what a person chose for gloo, which torch then uses; "" = the one that reaches the others


def find_place(environment: Mapping[str, str], port: int = 0) -> Place | None:
    """The Place that torchrun or srun gave this process; None when a person started it by hand.

    Slurm is recognised by a *step* (srun): inside a batch script, outside srun, there is one process and no peer to join.
    port: where rank 0 listens under Slurm, 0 to derive it from the job's number.
    """
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return Place(
            rank=_number(environment, "RANK"),
            world=_number(environment, "WORLD_SIZE"),
            local_rank=_number(environment, "LOCAL_RANK", 0),
            local_world=_number(environment, "LOCAL_WORLD_SIZE", 1),
            meeting="env://",
            interface=environment.get("GLOO_SOCKET_IFNAME", ""),
        )
    if {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= environment.keys():
        tasks = _number(environment, "SLURM_STEP_NUM_TASKS")
        job = _number(environment, "SLURM_JOB_ID", 0)
        local = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "1"))
        return Place(
            rank=_number(environment, "SLURM_PROCID"),
            world=tasks,
            local_rank=_number(environment, "SLURM_LOCALID", 0),
            local_world=int(local.split("(")[0].split(",")[0]),
            meeting=f"tcp://{_first_host(environment)}:{port or SLURM_PORTS[job % len(SLURM_PORTS)]}",
            interface=environment.get("GLOO_SOCKET_IFNAME", ""),
        )
    return None


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise RequestError(
            name, f"{name} = {text!r} in the environment is not a whole number; torchrun sets it"
        ) from None


def _first_host(environment: Mapping[str, str]) -> str:
    """Name of the host of rank 0, from the step's node list (scontrol expands forms like node[01-04])."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
    if "[" not in nodes:
        return nodes.split(",")[0]
    listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    return listed.stdout.split()[0]
