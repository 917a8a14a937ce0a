"""What lies in a checkpoint's folder: refused when a byte is wrong, never run, and readable by others."""

import hashlib
import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from checkpoints import PROGRESS, continued, run, small
from shoal.comm.world import World
from shoal.spec.errors import RequestError
from shoal.train.checkpoint.folder import CHECKPOINTS, check, latest, path_of, prune, set_aside, steps
from shoal.train.checkpoint.index import INDEX, Damaged, read_index, write_index
from shoal.train.checkpoint.run import Checkpoints
from shoal.train.trainer import Trainer
from shoal.verify.trial import MadeUpBatches


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run of four steps in one process that keeps its checkpoints after 2, 3 and 4."""
    job = small("dp=1", tmp_path_factory.mktemp("run"), save_every=1, keep=3)
    run(0, 1, job, 4)
    return job


@pytest.fixture
def job(original, tmp_path):
    """The same in a folder that a test may damage."""
    shutil.copytree(original.train.out, tmp_path / "run")
    return replace(original, train=replace(original.train, out=str(tmp_path / "run")))


def at(job, step):
    return path_of(Path(job.train.out) / CHECKPOINTS, step)


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def rewritten(path, change):
    """Changes the body of an index and gives it the checksum that fits."""
    body = json.loads((path / INDEX).read_text())["body"]
    change(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    head = {"format": "shoal checkpoint", "version": 1, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (path / INDEX).write_text(f'{json.dumps(head)[:-1]}, "body": {text}}}')


DAMAGES = {
    "a weight's bit": (lambda path: flip(path / "rank-00000.safetensors", -5), "checksums of its rank-00000"),
    "a header's bit": (lambda path: flip(path / "rank-00000.safetensors", 40), "checksums of its rank-00000"),
    "a torn file": (lambda path: os.truncate(path / "rank-00000.safetensors", 1000), "has 1,000 bytes and should"),
    "a longer file": (lambda path: os.truncate(path / "rank-00000.safetensors", 10**6), "bytes and should have"),
    "no file": (lambda path: (path / "rank-00000.safetensors").unlink(), "rank-00000.safetensors is missing"),
    "no index": (lambda path: (path / INDEX).unlink(), "it has no index.json"),
    "a torn index": (lambda path: os.truncate(path / INDEX, 500), "index.json is torn"),
    "an index's bit": (lambda path: flip(path / INDEX, -20), "index.json"),
    "an empty index": (lambda path: (path / INDEX).write_text(""), "index.json is torn"),
    "another's index": (lambda path: (path / INDEX).write_text('{"weight_map": {}}'), "is not one of shoal's"),
    "a folder as index": (lambda path: ((path / INDEX).unlink(), (path / INDEX).mkdir()), "cannot be read"),
    "a later format": (
        lambda path: (path / INDEX).write_text((path / INDEX).read_text().replace('"version": 1', '"version": 2')),
        "its format is version 2, not 1",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_checkpoint_before_is_found(job, damage):
    do, said = DAMAGES[damage]
    do(at(job, 4))
    with pytest.raises(Damaged, match=said):
        check(at(job, 4))
    warnings = []
    assert latest(at(job, 4).parent, warnings.append) == at(job, 3)
    assert len(warnings) == 1 and said in warnings[0] and "step-00000004 is passed over" in warnings[0]
    with pytest.raises(RequestError, match=r"^train.resume = .* holds no checkpoint.*; auto would do") as refused:
        run(0, 1, replace(job, train=replace(job.train, resume=str(at(job, 4)), save_every=0)), 4)
    assert refused.value.field == "train.resume" and "\n" not in str(refused.value)
    assert said in str(refused.value)
    resumed = run(0, 1, replace(job, train=replace(job.train, resume="auto", save_every=0)), 4)
    assert resumed.started == 3


def test_every_bit_of_every_file_counts(job):
    """A flipped bit anywhere, one place in a hundred, is found."""
    for name in (INDEX, "rank-00000.safetensors"):
        file = at(job, 4) / name
        whole = file.read_bytes()
        for place in range(0, len(whole) - 1, len(whole) // 100):  # but for the line's end
            flip(file, place)
            with pytest.raises(Damaged):
                check(at(job, 4))
            file.write_bytes(whole)
    check(at(job, 4))


class Trap:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_hostile_checkpoint_runs_nothing(job, tmp_path):
    """Pickles, torch's own formats among them, in the place of every file and beside them."""
    trap, kept = tmp_path / "it ran", tmp_path / "kept"
    pickled = pickle.dumps(Trap(str(trap)))
    torch.save({"weight": Trap(str(trap))}, tmp_path / "torch.pt")
    shutil.copytree(job.train.out, kept)
    for content in (pickled, (tmp_path / "torch.pt").read_bytes()):
        for name in (INDEX, "rank-00000.safetensors", ".metadata", "__0_0.distcp"):
            shutil.rmtree(job.train.out)
            shutil.copytree(kept, job.train.out)
            (at(job, 4) / name).write_bytes(content)
            latest(at(job, 4).parent, warn=lambda line: None)
            started = run(0, 1, replace(job, train=replace(job.train, resume="auto", save_every=0)), 4).started
            assert started == (4 if name.startswith((".", "_")) else 3)
    assert not trap.exists()
    pickle.loads(pickled)
    assert trap.exists(), "the trap works"


def half_twice(tensors):
    """Halves of a matrix that one chunk had: the first one two times, and the second never."""
    _, (rows, columns), chunks = tensors["weight/blocks.0.mlp.down.weight"]
    [[offsets, _, *rest]] = chunks
    assert columns % 2 == 0
    chunks[:] = [[offsets, [rows, columns // 2], *rest]] * 2


LIES = {
    "a path out of the folder": lambda body: body["files"][0].update(name="../../other/rank-00000.safetensors"),
    "an absolute path": lambda body: body["files"][0].update(name="/etc/passwd"),
    "a chunk beyond its file": lambda body: body["tensors"]["weight/embedding.weight"][2][0].__setitem__(3, 10**9),
    "a chunk beyond its tensor": lambda body: body["tensors"]["weight/embedding.weight"][2][0].__setitem__(0, [9, 9]),
    "a negative place": lambda body: body["tensors"]["weight/embedding.weight"][2][0].__setitem__(3, -8),
    "an element type that is none": lambda body: body["tensors"]["weight/embedding.weight"].__setitem__(0, "object"),
    "a file that is not there": lambda body: body["tensors"]["weight/embedding.weight"][2][0].__setitem__(2, 7),
    "a step that is text": lambda body: body.update(step="4"),
    "progress that is a list": lambda body: body.update(progress=[]),
    "a loss that is text": lambda body: body["progress"].update(loss="__import__('os')"),
    "tensors that are a number": lambda body: body.update(tensors=3),
    "a hole": lambda body: body["tensors"]["weight/embedding.weight"][2].pop(),
    "as many elements as there should be, half of them twice": lambda body: half_twice(body["tensors"]),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused(job, lie):
    rewritten(at(job, 4), LIES[lie])
    with pytest.raises(Damaged, match="describes no checkpoint"):
        read_index(at(job, 4))


def test_a_tensor_that_is_missing_is_named(job):
    def wants_more(trainer):
        trainer.model.register_buffer("load", torch.zeros(3))

    with pytest.raises(RequestError, match=r"cannot be continued: it holds no buffer/load") as refused:
        run(0, 1, replace(job, train=replace(job.train, resume=str(at(job, 3)))), 4, None, wants_more)
    assert refused.value.field == "train.resume" and "\n" not in str(refused.value)


def test_the_index_comes_back_as_it_was(job):
    index = read_index(at(job, 4))
    assert index.progress == replace(PROGRESS, eval_loss=index.progress.eval_loss) and index.progress.eval_loss != 0
    written = json.loads(write_index(index))["body"]
    assert written == json.loads((at(job, 4) / INDEX).read_text())["body"]


def test_the_files_are_safetensors_that_anyone_reads(job):
    tensors = load_file(at(job, 4) / "rank-00000.safetensors")
    index = read_index(at(job, 4))
    assert len(tensors) == sum(len(stored.chunks) for stored in index.tensors.values())
    assert any(name.startswith("weight/embedding.weight [0:61, 0:16]") for name in tensors)
    assert all(np.isfinite(values).all() for values in tensors.values())


REFUSED = {
    "model.hidden": ({"model": {"hidden": 32}}, "model.hidden = 32 is not that of the checkpoint"),
    "model.layers": ({"model": {"layers": 2}}, "model.layers = 2"),
    "model.tied": ({"model": {"tied": False}}, "model.tied = false"),
    "model.rope.theta": ({"model": {"rope": {"theta": 77.0}}}, "model.rope.theta = 77"),
    "train.seed": ({"seed": 1}, "train.seed = 1"),
    "train.batch": ({"batch": 16}, "train.batch = 16"),
    "train.steps": ({"steps": 3}, "train.steps = 3 is less than the 4 steps of the checkpoint"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_checkpoint_of_another_run_is_refused_with_the_field(job, tmp_path, field):
    change, said = REFUSED[field]
    other = small("dp=1", tmp_path / "other", **{"resume": job.train.out, **change})
    with pytest.raises(RequestError) as refused:
        run(0, 1, other, 4)
    assert refused.value.field == field and said in str(refused.value) and "\n" not in str(refused.value)


def test_other_data_is_refused(job, tmp_path):
    again = continued(job, "dp=1", tmp_path / "other", save_every=0)
    trainer = Trainer(again, World.single(), MadeUpBatches(again, 0))
    with pytest.raises(RequestError, match=r"^data.path = nothing gives other tokens \(5 tokens\)") as refused:
        Checkpoints(trainer, "5 tokens", warn=lambda line: None).start()
    assert refused.value.field == "data.path"


@pytest.mark.parametrize("path", ["nowhere", "", "step-00000009"])
def test_a_path_without_a_checkpoint_is_one_line(tmp_path, path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match=r"^train.resume = .* holds no checkpoint"):
        run(0, 1, small("dp=1", tmp_path / "out", resume=str(tmp_path / "empty" / path)), 1)


def test_auto_without_a_checkpoint_starts_afresh(tmp_path):
    assert run(0, 1, small("dp=1", tmp_path / "out", resume="auto"), 1).started == 0


def test_what_a_run_does_not_go_on_from_is_moved_aside(job):
    root = at(job, 4).parent
    assert run(0, 1, replace(job, train=replace(job.train, resume=str(at(job, 3)))), 5).started == 3
    assert steps(root) == [3, 4, 5] and steps(root.with_name("checkpoints.1")) == [4]
    run(0, 1, replace(job, train=replace(job.train, resume="never", save_every=0)), 1)
    assert steps(root) == [] and steps(root.with_name("checkpoints.2")) == [3, 4, 5]


def test_the_newest_stay(tmp_path):
    for step in (1, 5, 20, 100_000_000):
        path_of(tmp_path, step).mkdir()
    (tmp_path / "step-late").mkdir()
    prune(tmp_path, 2)
    assert steps(tmp_path) == [20, 100_000_000]
    set_aside(tmp_path, 20)
    assert steps(tmp_path) == [20]
