"""`shoal sbatch`: a file that bash reads, that starts as many ranks as the layout has, and that trains what a local run does."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from shoal.cli.main import main
from shoal.spec.build import job_from_tree
from shoal.spec.toml import read_toml

# What srun and scontrol do for the file, with every host this one: srun starts its tasks with the variables of Slurm's own
# (man srun, "output environment variables"), hands its standard input to them, and ends them all when one fails.
SRUN = """#!{python}
import os, re, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1 + next(n for n, word in enumerate(sys.argv[1:]) if not word.startswith("--")):]
nodes, per_node = (int(os.environ[name]) for name in ("SLURM_NNODES", "SLURM_NTASKS_PER_NODE"))
print("srun", *options, file=open(os.environ["FAKE_LOG"], "a"))
tasks = []
for rank in range(nodes * per_node):
    own = dict(SLURM_PROCID=rank, SLURM_LOCALID=rank % per_node, SLURM_NODEID=rank // per_node,
               SLURM_STEP_NUM_TASKS=nodes * per_node, SLURM_STEP_NODELIST="localhost",
               SLURM_STEP_TASKS_PER_NODE=f"{{per_node}}(x{{nodes}})")
    tasks.append(subprocess.Popen(command, env=os.environ | {{name: str(value) for name, value in own.items()}}))
codes = [task.wait() for task in tasks]
sys.exit(max(codes))
"""
SCONTROL = "#!/bin/sh\nprintf 'localhost\\nother\\nthird\\n'\n"
NASTY = 'it\'s a "test" $HOME `id` \\ é'


def sbatch(capsys, *words):
    """What `shoal sbatch words` prints."""
    assert main(["sbatch", *map(str, words)]) == 0
    return capsys.readouterr().out


def options(script):
    """The options in the #SBATCH lines."""
    return re.findall(r"^#SBATCH (--\S+)$", script, re.MULTILINE)


def embedded(script):
    """The job in the here-document."""
    return re.search(r"<<'END_OF_JOB'\n(.*?)\nEND_OF_JOB\n", script, re.DOTALL)[1] + "\n"


def run(script, folder):
    """Runs the file as Slurm would, from a folder that is not the job's; the options that its srun got."""
    tools, elsewhere = folder / "tools", folder / "elsewhere"
    tools.mkdir()
    elsewhere.mkdir()
    for name, text in {"srun": SRUN.format(python=sys.executable), "scontrol": SCONTROL}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (elsewhere / "job.sbatch").write_text(script)
    asked = dict(option.lstrip("-").split("=") for option in options(script) if "=" in option)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | {
        "PATH": f"{tools}:{os.environ['PATH']}", "FAKE_LOG": str(folder / "log"), "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": asked["nodes"],
        "SLURM_NTASKS_PER_NODE": asked["ntasks-per-node"],
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "job.sbatch"], cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return (folder / "log").read_text().split()[1:]


def metrics(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [[line["loss"], line["grad_norm"]] for line in lines]


@pytest.mark.parametrize(
    "restarts", [[], ["--max-restarts", 2, "--train.save_every", 2, "--train.resume", "auto"]], ids=["srun", "torchrun"]
)
def test_the_file_trains_what_a_local_run_trains(tmp_path, capsys, monkeypatch, restarts):
    """Two hosts of two ranks each by srun, one host of two by torchrun; folders with all that a shell could trip over."""
    home = tmp_path / f"{NASTY}\nnext line"
    home.mkdir()
    (home / f"{NASTY}.txt").write_text("".join(f"line {n} of a text\n" for n in range(900)))
    monkeypatch.chdir(home)
    job = ["--model", "tiny", "--dtype", "float64", "--data.path", f"{NASTY}.txt", "--data.cache", "cache", "--steps", 3,
           "--data.sequence", 32, "--train.batch", 8, "--train.sample", 0, "--machine.threads", 1,
           "--machine.device", "cpu"]  # fmt: skip
    assert main(["train", *map(str, job), "--out", "whole"]) == 0
    capsys.readouterr()
    size = ["--layout", "dp=2", "--nodes", 1, "--per-node", 2] if restarts else ["--layout", "dp=4", "--nodes", 2]
    script = sbatch(capsys, *job, *size, *restarts, "--out", f"-runs/{NASTY}")
    given = run(script, tmp_path)
    assert "--kill-on-bad-exit=1" in given and f"--cpus-per-task={2 if restarts else 1}" in given
    out = home / f"-runs/{NASTY}"
    np.testing.assert_allclose(metrics(out), metrics(home / "whole"), rtol=1e-10)
    assert (out / f"sbatch-{os.getpid()}.toml").read_text() == embedded(script)
    assert job_from_tree(read_toml(out / "job.toml")).layout.dp == (2 if restarts else 4)


@pytest.mark.parametrize(
    "text", [NASTY, "a\nb", "$(touch owned)", "END_OF_JOB", "\nEND_OF_JOB\n", "'; touch owned; '", "日本"]
)
def test_no_value_leaves_its_quotes(tmp_path, capsys, monkeypatch, text):
    """The job in the file is the job that was asked for, and bash does nothing else with it."""
    (tmp_path / text).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / text)
    words = ["--layout", "dp=2", "--per-node", 2, "--out", text, "--data.field", text, "--data.tokenizer", text]
    script = sbatch(capsys, *words)
    assert main(["sbatch", *map(str, words), "--dump-config"]) == 0
    assert embedded(script) == capsys.readouterr().out
    tree = job_from_tree(tomllib.loads(embedded(script)))
    assert (tree.train.out, tree.data.field) == (text, text)
    before_srun = script[: script.index("exec srun")]
    (tmp_path / "elsewhere").mkdir()
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "5"}
    done = subprocess.run(["bash"], input=before_srun + 'printf %s "$PWD"', cwd=tmp_path / "elsewhere", env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert (done.returncode, done.stderr, done.stdout) == (0, "", str(tmp_path / text))
    assert (tmp_path / text / text / "sbatch-5.toml").read_text() == embedded(script)
    assert not list(tmp_path.rglob("owned"))


@pytest.mark.parametrize(
    "words, there, absent",
    [
        (["--layout", "dp=16", "--nodes", 2, "--per-node", 8],
         ["--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--exclusive", "--mem=0", "--signal=TERM@120"],
         ["--partition", "--account", "--time", "--requeue", "--cpus-per-task"]),
        (["--layout", "dp=16", "--per-node", 8, "--machine.device", "cpu", "--machine.threads", 3],
         ["--nodes=2", "--cpus-per-task=3"], ["--gpus-per-node", "--exclusive"]),
        (["--layout", "dp=8", "--nodes", 2, "--partition", "big,gpu", "--account", "p-1", "--time", "1-02:00:00"],
         ["--ntasks-per-node=4", "--partition=big,gpu", "--account=p-1", "--time=1-02:00:00"], []),
        (["--layout", "dp=8", "--nodes", 2, "--max-restarts", 3, "--train.save_every", 5, "--train.resume", "auto"],
         ["--ntasks-per-node=1", "--gpus-per-node=4", "--requeue", "--open-mode=append"], []),
    ],
)  # fmt: skip
def test_what_is_asked_of_slurm(capsys, words, there, absent):
    script = sbatch(capsys, *words, "--out", "runs/my first; run")
    found = options(script)
    assert set(there) <= set(found) and not [one for one in found if one.startswith(tuple(absent))], found
    assert "--job-name=my-first-run" in found
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert len(found) == script.count("#SBATCH")


def test_torchrun_gets_the_first_host_and_a_port_of_the_job(capsys):
    words = ["--layout", "dp=16", "--nodes", 2, "--max-restarts", 3, "--train.save_every", 5, "--train.resume", "auto"]
    script = sbatch(capsys, *words)
    assert "--nnodes=2 --nproc-per-node=8 --max-restarts=3" in script
    assert '--rdzv-endpoint="$first:$((20000 + SLURM_JOB_ID % 20000))"' in script
    assert '--rdzv-endpoint="$first:4321"' in sbatch(capsys, *words, "--machine.port", 4321)


def test_json_holds_the_file(capsys):
    words = ["--layout", "dp=4", "--nodes", 2]
    document = json.loads(sbatch(capsys, *words, "--json"))
    assert document == {"ok": True, "nodes": 2, "per_node": 2, "script": sbatch(capsys, *words)}


NOT_A_NAME = "is not a name that Slurm knows; --"
TWO = ["--layout", "dp=2", "--nodes", 2]
REFUSED = {
    "no hosts": (["--layout", "dp=16"], "--nodes and --per-node are missing; --nodes 2 --per-node 8 would do"),
    "too many ranks": (["--layout", "dp=4", "--nodes", 2, "--per-node", 8],
                       "are 16 ranks, but layout = dp=4 has 4; --nodes 1 --per-node 4, or dp=16 in the layout, would do"),
    "too few ranks": (["--layout", "dp=8,tp=4", "--nodes", 2, "--per-node", 8],
                      "has 32; --nodes 4 --per-node 8, or dp=4 in the layout, would do"),
    "a number that fits no dp": (["--layout", "tp=3,dp=5", "--nodes", 2, "--per-node", 8, "--model.heads", 3, "--model.hidden", 96],
                                 "has 15; --nodes 3 --per-node 5 would do"),
    "hosts that do not divide": (["--layout", "dp=5", "--nodes", 2], "--nodes 2 --per-node 3 are 6 ranks"),
    "no host": (["--layout", "dp=2", "--nodes", 0], "--nodes 0 is not a number from 1; --nodes 2 would do"),
    "half a host": (["--layout", "dp=2", "--per-node", 1.5], "--per-node 1.5 is not a number from 1"),
    "another kind of digit": (["--layout", "dp=2", "--per-node", "\u0662"], "--per-node \u0662 is not a number from 1"),
    "a time": ([*TWO, "--time", "2h"], "--time 2h is not a time as Slurm takes it; --time 02:00:00 would do"),
    "a partition with an option in it": ([*TWO, "--partition", "a --wrap=b"], NOT_A_NAME),
    "a partition that is an option": ([*TWO, "--partition=--wrap=id"], NOT_A_NAME),
    "an account with a line in it": ([*TWO, "--account", "a\n#SBATCH --x"], f"--account a\\n#SBATCH --x {NOT_A_NAME}"),
    "restarts from nothing": ([*TWO, "--max-restarts", 2], "--train.save_every 100 would do"),
    "restarts that begin anew": ([*TWO, "--max-restarts", 2, "--train.save_every", 10],
                                 "ranks that are started again would begin anew; --train.resume auto would do"),
    "what train refuses": (["--layout", "sp", "--nodes", 2], "there are no tensor ranks to cut the sequence over"),
    "what a pipeline refuses": (["--layout", "pp=8", "--nodes", 2, "--model", "tiny"], "8 stages want as many layers"),
    "what does not fit": (["--layout", "dp=7", "--nodes", 7], "train.batch = 480 does not divide over dp = 7"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_one_line_and_no_file(capsys, case):
    words, said = REFUSED[case]
    assert main(["sbatch", "--train.batch", "480", *map(str, words)]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_a_folder_whose_name_is_no_text(tmp_path, capsys, monkeypatch):
    (tmp_path / "a\udcff").mkdir()
    monkeypatch.chdir(tmp_path / "a\udcff")
    assert main(["sbatch", "--layout", "dp=2", "--nodes", "2"]) == 2
    captured = capsys.readouterr()
    assert "a\\udcff, is not valid UTF-8; another one would do" in captured.err and not captured.out


def test_it_answers_without_torch():
    code = (
        "import sys; from shoal.cli.main import main; "
        "main(['sbatch', '--layout', 'dp=4', '--nodes', '2']); assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, cwd=Path.home()).returncode == 0
