"""Breaks one rank of a run. Python loads this by itself in every process that has its folder on PYTHONPATH.

BREAK holds JSON: rank; step and where ("forward", "backward", "save"): the moment, found by counting the model's own
calls, `calls` of them per step, and not by what shoal writes down; call: which of those; how: a function below;
mark: a file to make when it happens.
"""

import json
import os
import signal
import time
from pathlib import Path


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def spin():
    while True:
        pass


def sleep():
    time.sleep(600)


def fail():
    raise ZeroDivisionError("by design")


def install(fault):
    """Makes this process break at its moment."""

    def act():
        Path(fault["mark"]).write_text(str(time.time()))
        globals()[fault["how"]]()

    if fault["where"] == "save":
        from shoal.train.checkpoint import storage

        write = storage.write_tensors

        def write_and_break(path, *arguments):
            if f"step-{fault['step'] + 1:08d}" in str(path):
                act()
            return write(path, *arguments)

        storage.write_tensors = write_and_break
        return

    import torch

    from shoal.model import decoder

    forward, calls = decoder.Block.forward, iter(range(10**9))

    def forward_and_break(block, *arguments):
        moment = torch.is_grad_enabled() and next(calls) == fault["step"] * fault["calls"] + fault["call"]
        if moment and fault["where"] == "forward":
            act()
        y = forward(block, *arguments)
        if moment and fault["where"] == "backward":
            y.register_hook(lambda gradient: act())
        return y

    decoder.Block.forward = forward_and_break


if "BREAK" in os.environ:
    from shoal.launch import cluster

    fault, find = json.loads(os.environ["BREAK"]), cluster.find_place

    def find_place(*arguments):
        place = find(*arguments)
        if place is not None and place.rank == fault["rank"]:
            install(fault)
        return place

    cluster.find_place = find_place
