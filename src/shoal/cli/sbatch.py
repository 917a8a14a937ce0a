"""`shoal sbatch`: prints an sbatch file that runs a job on Slurm's hosts. Nothing is written or started."""

import argparse
import re
import sys
from pathlib import Path

from shoal.cli.options import add_job_options, print_json, read_job
from shoal.cli.train import BASE
from shoal.launch.slurm import Allocation, sbatch_file
from shoal.plan.refusals import check_job
from shoal.spec.build import job_to_tree
from shoal.spec.errors import RequestError, divisors, shown
from shoal.spec.job import Job
from shoal.spec.toml import job_toml

COUNT, NUMBER = r"[1-9]\d{0,6}", r"\d{1,6}"
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.,@:+/-]*"
TIME = r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}"
KINDS = {
    COUNT: "a number from 1",
    NUMBER: "a whole number",
    NAME: "a name that Slurm knows",
    TIME: "a time as Slurm takes it",
}
OPTIONS = {
    "nodes": ("N", "hosts (default: as many as the layout needs)", COUNT, "2"),
    "per-node": ("N", "ranks per host, one per GPU (default: the layout's ranks / hosts)", COUNT, "8"),
    "partition": ("NAME", "Slurm's partition (default: the cluster's)", NAME, "gpu"),
    "account": ("NAME", "Slurm's account (default: yours)", NAME, "project1"),
    "time": ("TIME", "time limit: minutes, H:MM:SS or D-H:MM:SS (default: the partition's)", TIME, "02:00:00"),
    "max-restarts": ("N", "start ranks that fail again, up to N times, by torchrun (default: srun, once)", NUMBER, "3"),
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    add_job_options(parser)
    for name, (shape, words, _, _) in OPTIONS.items():
        parser.add_argument(f"--{name}", metavar=shape, help=words)


def run(arguments: argparse.Namespace) -> int:
    job = read_job(arguments, BASE)
    check_job(job)
    asked = _allocation(arguments, job.layout.world)
    _check_world(job, asked)
    _check_restarts(job, asked)
    if arguments.dump_config:
        print_json(job_to_tree(job)) if arguments.json else print(job_toml(job), end="")
        return 0
    folder = Path.cwd()
    text = sbatch_file(job, asked, folder, sys.executable)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(
            "folder", f"the name of this folder, {shown(folder, limit=1000)}, is not valid UTF-8; another one would do"
        ) from None
    if arguments.json:
        print_json({"ok": True, "nodes": asked.nodes, "per_node": asked.per_node, "script": text})
    else:
        print(text, end="")
    return 0


def _allocation(arguments: argparse.Namespace, world: int) -> Allocation:
    """What the options ask of Slurm, hosts and ranks per host filled in. Raises RequestError."""
    given = {}
    for name, (_, _, form, example) in OPTIONS.items():
        text = getattr(arguments, name.replace("-", "_"))
        if text is not None and not re.fullmatch(form, text, re.ASCII):
            raise RequestError(name, f"--{name} {shown(text)} is not {KINDS[form]}; --{name} {example} would do")
        given[name] = text
    if given["nodes"] is None and given["per-node"] is None:
        raise RequestError("nodes", f"--nodes and --per-node are missing; {_split(world, 8)} would do")
    nodes, per_node = (None if given[name] is None else int(given[name]) for name in ("nodes", "per-node"))
    restarts = given["max-restarts"]
    return Allocation(
        nodes=nodes or -(-world // (per_node or 1)),
        per_node=per_node or -(-world // (nodes or 1)),
        partition=given["partition"] or "",
        account=given["account"] or "",
        time=given["time"] or "",
        max_restarts=None if restarts is None else int(restarts),
    )


def _check_world(job: Job, asked: Allocation) -> None:
    """Raises RequestError, with hosts and a layout that would do, when there are not as many ranks as the layout has."""
    ranks, layout = asked.nodes * asked.per_node, job.layout
    if ranks == layout.world:
        return
    rest = layout.world // layout.dp
    other = f", or dp={ranks // rest} in the layout," if ranks % rest == 0 else ""
    raise RequestError(
        "nodes",
        f"--nodes {asked.nodes} --per-node {asked.per_node} are {ranks:,} ranks, but layout = {layout} has "
        f"{layout.world:,}; {_split(layout.world, asked.per_node)}{other} would do",
    )


def _split(world: int, most: int) -> str:
    """Hosts and ranks per host for `world` ranks, as options: the most per host that divides them, up to `most`."""
    per_node = max(ranks for ranks in divisors(world) if ranks <= most)
    return f"--nodes {world // per_node} --per-node {per_node}"


def _check_restarts(job: Job, asked: Allocation) -> None:
    """Raises RequestError when ranks that are started again would begin anew."""
    if not asked.max_restarts:
        return
    train = job.train
    for field, wrong, good in (("save_every", not train.save_every, "100"), ("resume", train.resume != "auto", "auto")):
        if wrong:
            raise RequestError(
                f"train.{field}",
                f"train.{field} = {shown(getattr(train, field))} with --max-restarts {asked.max_restarts}: ranks that are "
                f"started again would begin anew; --train.{field} {good} would do",
            )
