"""A process that saves in a loop and is killed again and again: `python killed_saves.py FOLDER ROUNDS SEED [BREAK]`.

Every round a forked writer goes on from the last good checkpoint and saves as fast as it can, telling by a pipe which save
is done; its state after step n is n in every element. It is killed with SIGKILL at a random moment; with ROUNDS = 0 before
each of the calls in turn that bring files to the disk, give them their names and remove them. After each round the parent
looks at what lies in the folder, and says at the end what it saw, as JSON. BREAK: what makes the writer careless.
"""

import json
import os
import random
import signal
import sys
import time
from itertools import count, product
from pathlib import Path

import torch

from checkpoints import PROGRESS, small
from shoal.comm.world import World
from shoal.train.checkpoint import folder, storage
from shoal.train.checkpoint.folder import check, latest, path_of, steps
from shoal.train.checkpoint.index import Damaged
from shoal.train.checkpoint.peers import Peers
from shoal.train.checkpoint.resume import latest_of, restore
from shoal.train.checkpoint.save import Saver
from shoal.train.checkpoint.state import parts_of
from shoal.train.checkpoint.storage import Reader
from shoal.train.checkpoint.tensors import Lies, read_tensor
from shoal.train.trainer import Trainer
from shoal.verify.trial import MadeUpBatches

LONGEST = 0.06  # seconds of a round, from the first save on
LAST = 10**7
CALLS = ("fsync", "rename", "unlink", "rmdir")


def main(root, rounds, seed, broken=""):
    root, random_ = Path(root), random.Random(seed)
    job = small("dp=1", root, {"layers": 1}, steps=LAST, save_every=1, keep=2)
    trainer = Trainer(job, World.single(), MadeUpBatches(job, 0))
    checkpoints, peers = root / folder.CHECKPOINTS, Peers(trainer.world)
    seen = {"kills": 0, "completed": 0, "lost": 0, "torn": 0, "wrong": 0, "left_unfinished": 0}
    newest = 0
    moments = [random_.uniform(0, LONGEST) for _ in range(rounds)] or list(product(CALLS, range(1, 9)))
    for moment in moments:
        reported = killed_writer(trainer, checkpoints, peers, moment, broken)
        seen["kills"] += 1
        newest = max(newest, reported)
        seen["torn"] += sum(map(is_torn, map(lambda step: path_of(checkpoints, step), steps(checkpoints))))
        seen["left_unfinished"] += any(checkpoints.glob(".step-*"))
        found = latest(checkpoints, warn=lambda line: None)
        if newest and (found is None or int(found.name[5:]) < newest):
            seen["lost"] += 1
        elif found is not None:
            seen["wrong"] += not holds(found, int(found.name[5:]))
            newest = int(found.name[5:])
    seen["completed"] = newest
    print(json.dumps(seen))


def killed_writer(trainer, checkpoints, peers, moment, broken):
    """Forks a writer and kills it after so many seconds, or (call, n) before its n-th such call; the last step that it
    reported as saved.
    """
    reads, writes = os.pipe()
    writer = os.fork()
    if not writer:
        os.close(reads)
        try:
            if isinstance(moment, tuple):
                die_before(*moment)
            write(trainer, checkpoints, peers, writes, broken)
        finally:
            os._exit(1)
    os.close(writes)
    os.read(reads, 8)  # it has begun
    if not isinstance(moment, tuple):
        time.sleep(moment)
        os.kill(writer, signal.SIGKILL)
    _, status = os.waitpid(writer, 0)
    assert os.WIFSIGNALED(status), "the writer ended by itself"
    reported = b""
    while piece := os.read(reads, 1 << 16):
        reported += piece
    os.close(reads)
    whole = len(reported) // 8 * 8
    return int.from_bytes(reported[whole - 8 : whole], "little") if whole else 0


def die_before(call, number):
    """Makes this process kill itself before its call number `number` of that kind."""
    real, calls = getattr(os, call), count(1)

    def counted(*arguments, **named):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    setattr(os, call, counted)


def write(trainer, checkpoints, peers, pipe, broken):
    if broken == "in-place":  # no hidden folder: what is half written has its name already
        folder.unfinished = storage.unfinished = path_of
    if broken == "delete-in-place":
        folder.prune = storage.prune = lambda root, keep: [
            folder.shutil.rmtree(path_of(root, step)) for step in steps(root)[:-keep]
        ]
    folder.clean(checkpoints)
    found, _ = latest_of(checkpoints, peers)
    first = 0
    if found is not None:
        restore(trainer, peers, *found)
        first = found[1].step
    parts = parts_of(trainer)
    if found is not None and any((part.tensor != first).any() for part in parts):
        os._exit(1)
    saver = Saver(trainer, checkpoints, peers, "none")
    os.write(pipe, (0).to_bytes(8, "little"))
    for step in range(first + 1, LAST):
        saver.wait()
        if step > first + 1:
            os.write(pipe, (step - 1).to_bytes(8, "little"))
        for part in parts:
            part.tensor.fill_(step)
        saver.save(step, PROGRESS)


def is_torn(path):
    try:
        check(path)
        return False
    except Damaged:
        return True


def holds(path, step):
    """Whether every element of a checkpoint is `step`."""
    index = check(path)
    reader = Reader(path, index)
    for (name, _), chunk in reader.chunks.items():
        file = index.files[chunk.file]
        with folder.opened(path, file) as content:
            dtype = index.tensors[name].dtype
            tensor = read_tensor(content, file.name, Lies(chunk.at, chunk.check), dtype, chunk.sizes)
        if (tensor != step).any():
            return False
    return True


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
