"""A save that is killed at any moment leaves what was there before, whole; so does a disk that is full."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import killed_saves
from checkpoints import PROGRESS, small
from shoal.comm.world import World
from shoal.spec.errors import RequestError
from shoal.train.checkpoint.folder import CHECKPOINTS, check, steps
from shoal.train.checkpoint.run import Checkpoints
from shoal.train.trainer import Trainer
from shoal.verify.trial import MadeUpBatches


def killed(folder, rounds, *broken):
    command = [sys.executable, killed_saves.__file__, str(folder), str(rounds), "1", *broken]
    tests = str(Path(killed_saves.__file__).parent)
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": tests, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_200_kills_lose_no_completed_checkpoint_and_leave_none_torn(tmp_path):
    seen = killed(tmp_path, 200)
    assert seen["kills"] == 200 and seen["completed"] > 5 and seen["left_unfinished"] > 5, "kills met saves"
    assert (seen["lost"], seen["torn"], seen["wrong"]) == (0, 0, 0)


@pytest.mark.parametrize("broken", [None, "in-place", "delete-in-place"])
def test_a_kill_before_every_call_that_touches_the_disk(tmp_path, broken):
    """It would show a writer, or a deletion, that does not use a hidden folder."""
    seen = killed(tmp_path, 0, *filter(None, [broken]))
    assert seen["kills"] == 32 and (seen["lost"], seen["wrong"]) == (0, 0)
    assert (seen["torn"] > 0) == (broken is not None)


def saving(out, asynchronous):
    """A trainer of one process and its checkpoints, one of them complete."""
    job = small("dp=1", out, save_every=1, async_save=asynchronous, steps=100)
    trainer = Trainer(job, World.single(), MadeUpBatches(job, 0))
    checkpoints = Checkpoints(trainer, "none", warn=lambda line: None)
    checkpoints.start()
    checkpoints.save(1, PROGRESS)
    checkpoints.saver.wait()
    return checkpoints


def only_the_first_is_there(out):
    folder = Path(out) / CHECKPOINTS
    assert steps(folder) == [1] and check(folder / "step-00000001").step == 1
    assert [entry.name for entry in folder.iterdir()] == ["step-00000001"], "the unfinished one frees its room"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_file_that_may_not_grow_is_one_line_and_the_old_checkpoint_stays(tmp_path, asynchronous):
    checkpoints = saving(tmp_path, asynchronous)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(RequestError) as refused:
            checkpoints.save(2, PROGRESS)
            checkpoints.saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.value.field == "train.out" and "takes no checkpoint" in str(refused.value)
    assert "\n" not in str(refused.value)
    only_the_first_is_there(tmp_path)
    checkpoints.save(3, PROGRESS)  # room again
    checkpoints.saver.wait()
    assert steps(tmp_path / CHECKPOINTS) == [1, 3]


def test_a_full_disk_is_one_line_and_the_old_checkpoint_stays(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    try:
        checkpoints = saving(disk, True)
        (disk / "ballast").write_bytes(bytes(600_000))
        checkpoints.save(2, PROGRESS)
        checkpoints.saver.finish()
        with pytest.raises(RequestError) as refused:
            checkpoints.poll()  # as the next step does
        assert refused.value.field == "train.out" and "no space left" in str(refused.value)
        only_the_first_is_there(disk)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_folder_that_takes_no_files_is_one_line(tmp_path):
    checkpoints = saving(tmp_path, True)
    folder = tmp_path / CHECKPOINTS
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("a file in its place")
    with pytest.raises(RequestError, match=r"train.out = .* takes no checkpoint"):
        checkpoints.save(2, PROGRESS)
        checkpoints.saver.wait()


def test_one_save_is_in_flight_at_most_and_training_does_not_change_what_it_writes(tmp_path, monkeypatch):
    """Weights that change right after `save` returns are not in the checkpoint."""
    import threading

    from shoal.train.checkpoint import storage

    checkpoints = saving(tmp_path, True)
    go_on, write = threading.Event(), storage.write_tensors
    writing = []

    def slow(*arguments):
        writing.append(threading.active_count())
        go_on.wait(30)
        return write(*arguments)

    monkeypatch.setattr(storage, "write_tensors", slow)
    parts = checkpoints.saver.parts
    for part in parts:
        part.tensor.fill_(2.0)
    checkpoints.save(2, PROGRESS)
    for part in parts:
        part.tensor.fill_(3.0)
    threading.Timer(0.2, go_on.set).start()
    checkpoints.save(3, PROGRESS)
    assert steps(tmp_path / CHECKPOINTS)[-1] >= 2, "the second save waited for the first"
    checkpoints.saver.wait()
    for step in (2, 3):
        assert killed_saves.holds(tmp_path / CHECKPOINTS / f"step-0000000{step}", step)
