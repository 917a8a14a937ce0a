"""The text of an sbatch file that runs a job on Slurm's hosts: srun starts the ranks, or a torchrun that restarts them.

The file stands alone: it holds the whole job as TOML. Whatever comes from a person is quoted for bash.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.launch.cluster import SLURM_PORTS
from shoal.spec.errors import shown
from shoal.spec.job import Job
from shoal.spec.toml import job_toml

WARNING = 120  # seconds before the time limit at which the ranks get SIGTERM
END = "END_OF_JOB"  # no line of TOML is this word alone, as each is a table's name or an assignment


@dataclass(frozen=True)
class Allocation:
    """What is asked of Slurm. per_node: ranks, so GPUs, of one host; time: in one of Slurm's forms; "" asks for nothing.

    max_restarts: how often ranks that fail are started again, by torchrun; None has srun start them, once.
    """

    nodes: int
    per_node: int
    partition: str = ""
    account: str = ""
    time: str = ""
    max_restarts: int | None = None


def sbatch_file(job: Job, asked: Allocation, folder: Path, python: str) -> str:
    """The sbatch file. folder: absolute, what the job's relative paths start from; python: the interpreter on every host."""
    out = shlex.quote(str(folder / job.train.out))
    layout = shown(job.layout, limit=1000)
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(job, asked)),
        "",
        f"# {layout}: {asked.nodes} x {asked.per_node} ranks. Written by shoal sbatch; options of sbatch override those above.",
        "set -euo pipefail",
        f"python={shlex.quote(python)}",
        f"cd -- {shlex.quote(str(folder))}  # on a file system that all hosts see",
        f"mkdir -p -- {out}",
        f'job={out}/sbatch-"$SLURM_JOB_ID".toml',
        f"cat > \"$job\" <<'{END}'",
        *job_toml(job).splitlines(),
        END,
        "",
        *_start(job, asked),
    ]
    return "\n".join([*lines, ""])


def _options(job: Job, asked: Allocation) -> Iterator[str]:
    """The options of sbatch, none with a character that it or bash could read in another way."""
    restarts = asked.max_restarts is not None
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(job.train.out).name).strip("-")
    yield f"--job-name={name or 'shoal'}"
    yield f"--nodes={asked.nodes}"
    yield f"--ntasks-per-node={1 if restarts else asked.per_node}"
    if job.machine.device != "cpu":
        yield f"--gpus-per-node={asked.per_node}"
    if job.machine.threads:
        yield f"--cpus-per-task={_cpus(job, asked)}"
    else:  # a rank's threads are then the host's cores / its ranks
        yield "--exclusive"
        yield "--mem=0"
    for option in ("partition", "account", "time"):
        if value := getattr(asked, option):
            yield f"--{option}={value}"
    yield f"--signal=TERM@{WARNING}"
    if restarts:  # with train.resume = auto, also after the loss of a host
        yield "--requeue"
        yield "--open-mode=append"


def _start(job: Job, asked: Allocation) -> Iterator[str]:
    """The lines that start the ranks, numbered host by host as the mesh wants its fastest links."""
    cpus = f"--cpus-per-task={_cpus(job, asked)}" if job.machine.threads else "--cpu-bind=none"
    srun = f"srun --kill-on-bad-exit=1 --distribution=block {cpus}"
    if asked.max_restarts is None:
        yield f'exec {srun} "$python" -m shoal train "$job"'
        return
    port = job.machine.port or f"$(({SLURM_PORTS.start} + SLURM_JOB_ID % {len(SLURM_PORTS)}))"
    yield 'read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    yield f'exec {srun} "$python" -m torch.distributed.run \\'
    yield f"    --nnodes={asked.nodes} --nproc-per-node={asked.per_node} --max-restarts={asked.max_restarts} \\"
    yield f'    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first:{port}" \\'
    yield '    -m shoal train "$job"'


def _cpus(job: Job, asked: Allocation) -> int:
    """Cores of one task: a rank's threads, or those of all ranks of a host under its torchrun."""
    return job.machine.threads * (1 if asked.max_restarts is None else asked.per_node)
