"""Two hosts: network namespaces joined by a cable (veth), each with a host name of its own. Needs root, else skipped.

Each host knows its own name as 127.0.1.1, as Debian writes it into /etc/hosts. The cable counts bytes, which holds the
ledger against what the kernel saw.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack

import numpy as np
import pytest
from safetensors.numpy import load_file

NAMES = ("alpha", "beta")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 29511  # in namespaces of our own every port is free
TEXT = "".join(f"line {n} of what two hosts read\n" * (n % 5 + 1) for n in range(500))
WORDS = [
    "train", "--model", "tiny", "--dtype", "float64", "--steps", 4, "--data.sequence", 32, "--train.batch", 8,
    "--train.sample", 0, "--machine.timeout_s", 60, "--machine.device", "cpu", "--machine.threads", 1, "--json",
]  # fmt: skip
SHOAL = [sys.executable, "-m", "shoal"]
OVERHEAD = 1.1  # headers and acknowledgements
CHATTER = 1_000_000  # bytes: the store, the launchers' heartbeats, and the weights for model.safetensors


class Host:
    """A network and a host name of its own; they last as long as the process that holds them, which ends with its stdin."""

    def __init__(self, number, hosts_file):
        self.name, self.address, self.cable = NAMES[number], ADDRESSES[number], f"shoal{number}-{os.getpid()}"
        settle = f"hostname {self.name} && mount --bind '{hosts_file}' /etc/hosts && ip link set lo up && echo ready && exec cat"
        self.holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", settle],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if self.holder.stdout.readline() != "ready\n":
            pytest.skip(f"no namespace for a host can be made here: {self.holder.communicate()[1].strip()}")

    def inside(self, *command):
        """The command as it runs on this host."""
        return ["nsenter", "-t", str(self.holder.pid), "--net", "--uts", "--mount", "--wd=.", *map(str, command)]

    def plug_in(self):
        """Puts this host's end of the cable into it."""
        for command in (
            ["ip", "link", "set", self.cable, "netns", self.holder.pid],
            self.inside("ip", "address", "add", f"{self.address}/24", "dev", self.cable),
            self.inside("ip", "link", "set", self.cable, "up"),
        ):
            subprocess.run(list(map(str, command)), check=True)

    def wire(self):
        """Bytes that went over the cable so far: sent, received."""
        told = subprocess.check_output(self.inside("ip", "-json", "-s", "link", "show", self.cable), text=True)
        counters = json.loads(told)[0]["stats64"]
        return np.array([counters["tx"]["bytes"], counters["rx"]["bytes"]])

    def close(self):
        self.holder.stdin.close()
        self.holder.wait(10)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """alpha and beta, joined. Whatever happens, nothing is left: a namespace ends with its processes, and the cable with it."""
    folder = tmp_path_factory.mktemp("etc")
    if missing := [tool for tool in ("unshare", "nsenter", "ip", "hostname", "mount") if shutil.which(tool) is None]:
        pytest.skip(f"no namespace for a host can be made without {missing[0]}")
    with ExitStack() as ends:
        made = []
        for number in range(2):
            file = folder / f"hosts-{NAMES[number]}"
            file.write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {NAMES[number]}\n{ADDRESSES[1 - number]} {NAMES[1 - number]}\n"
            )
            host = Host(number, file)
            ends.callback(host.close)
            made.append(host)
        joined = subprocess.run(
            ["ip", "link", "add", made[0].cable, "type", "veth", "peer", "name", made[1].cable],
            capture_output=True, text=True,
        )  # fmt: skip
        if joined.returncode:
            pytest.skip(f"no cable between two hosts can be made here: {joined.stderr.strip()}")
        # While it is plugged in, nobody finds it here; else it goes with one of its ends.
        ends.callback(subprocess.run, ["ip", "link", "delete", made[0].cable], stderr=subprocess.DEVNULL)
        for host in made:
            host.plug_in()
        yield made


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Weights of one process on one host."""
    out = tmp_path_factory.mktemp("whole")
    (out / "a.txt").write_text(TEXT)
    own = ["--data.path", out / "a.txt", "--data.cache", out, "--out", out]
    subprocess.run([*SHOAL, *map(str, [*WORDS, *own])], check=True, capture_output=True, timeout=120)
    return load_file(out / "model.safetensors")


def torchrun(number, words):
    """The command of host `number` under torchrun, and what it adds to the environment.

    The end point is alpha's name: by its address alpha would not know itself, as its name stands for another one there.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1,
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{NAMES[0]}:{PORT}"]  # fmt: skip
    return [*launcher, "-m", "shoal", *words], {}


def srun(number, words):
    """The same under srun, which starts every rank itself and names the hosts."""
    return [*SHOAL, *words, "--machine.port", PORT], {
        "SLURM_PROCID": str(number), "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "77",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": ",".join(NAMES),
    }  # fmt: skip


def srun_on_the_cable(number, words):
    """The same, with the network chosen by hand, as torch lets one."""
    command, variables = srun(number, words)
    return command, variables | {"GLOO_SOCKET_IFNAME": f"shoal{number}-{os.getpid()}"}


def run(hosts, launcher, words):
    """Runs a command on both hosts at once; exit codes, outputs and errors by host."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "GLOO_"))}
    processes = []
    for number, host in enumerate(hosts):
        command, own = launcher(number, words[number])
        processes.append(
            subprocess.Popen(
                host.inside(*command), env=environment | {"OMP_NUM_THREADS": "1"} | own,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    try:
        told = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], *zip(*told, strict=True)


def apart(folder, words, *texts):
    """Words of each host with a corpus, a cache and an output folder of its own: nothing is shared."""
    own = []
    for name, text in zip(NAMES, texts, strict=True):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text(text)
        own.append(
            [*words, "--data.path", folder / name / "a.txt", "--data.cache", folder / name, "--out", folder / name]
        )
    return own


@pytest.mark.parametrize("launcher, layout", [(torchrun, "dp=2"), (srun, "pp=2"), (srun_on_the_cable, "tp=2")])
def test_two_hosts_compute_what_one_does_and_the_cable_carries_what_the_ledger_says(
    tmp_path, hosts, whole, launcher, layout
):
    before = hosts[0].wire()
    codes, outputs, errors = run(hosts, launcher, apart(tmp_path, [*WORDS, "--layout", layout], TEXT, TEXT))
    assert codes == [0, 0], errors
    carried = hosts[0].wire() - before
    weights = load_file(tmp_path / "alpha" / "model.safetensors")
    for name, weight in whole.items():
        assert np.linalg.norm(weights[name] - weight) <= 1e-12 * np.linalg.norm(weight), name
    rows = json.loads(outputs[0])["transfers"]
    ledger = [sum(sum(row["by_rank"][f"measured_{way}"]) for row in rows) for way in ("sent", "received")]
    print(f"{layout}: cable {carried} bytes sent and received, ledger {ledger}")
    for way in range(2):
        assert ledger[way] <= carried[way] <= OVERHEAD * ledger[way] + CHATTER, (carried, ledger)


def test_a_host_that_reads_other_text_is_named_by_both_and_nobody_waits(tmp_path, hosts):
    other = TEXT.replace("line 7 ", "line 8 ")
    codes, _, errors = run(hosts, srun, apart(tmp_path, [*WORDS, "--layout", "dp=2"], TEXT, other))
    assert codes == [2, 2], errors
    read = r"[\d,]+ tokens, CRC-32 \w+"
    assert all(re.search(f"shoal: data = {read} on rank 0, but {read} on rank 1", error) for error in errors)
