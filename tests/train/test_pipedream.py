"""PipeDream through the trainer: against one process with delayed weights, its versions as they really are, refusals."""

import math
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import reference
from shoal.axes.pipeline import stash
from shoal.axes.pipeline.live import live_versions, uses
from shoal.axes.pipeline.schedules.instruction import Place
from shoal.axes.pipeline.schedules.registry import make
from shoal.axes.pipeline.stash import Versions
from shoal.axes.shares import Shares
from shoal.cli.main import main
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.plan.pieces import mesh_of, pieces_of
from shoal.spec.build import job_from_tree
from shoal.train.trainer import Trainer
from shoal.verify.assemble import disagreement
from shoal.verify.compare import compare
from shoal.verify.delayed import delayed
from shoal.verify.trial import MadeUpBatches, trial
from shoal.verify.verify import small_job, verify

NAMES = ("pipedream", "pipedream-vertical", "pipedream-2bw")


def asked(layout, **train):
    return small_job(job_from_tree({"model": {"preset": "tiny"}, "layout": layout, "train": train}))


def job_of(name, p, m, more=""):
    return asked(f"pp={p},schedule={name},micro_batches={m}{more}")


CASES = [(name, p, m, "") for name in NAMES for p in (2, 4) for m in (1, 4, 8)]
CASES += [(name, 2, 3, ",dp=2,tp=2,sp") for name in NAMES]
CASES += [
    ("pipedream", 2, 3, ",tp=2x2"),
    ("pipedream", 4, 5, ",dp=2"),
    ("pipedream", 2, 3, ",dp=2,zero=1"),
    ("pipedream-vertical", 2, 3, ",cp=2,zero=1,zero1=ar+ag"),
    ("pipedream-2bw", 4, 5, ",tp=2,sp"),
    ("pipedream-2bw", 2, 5, ",dp=4,hsdp=2,zero=2"),
]


@pytest.mark.parametrize(("name", "p", "m", "more"), CASES)
def test_is_training_with_delayed_weights(pool, name, p, m, more):
    """Losses, last gradients, norms and weights after 3 steps to 1e-10; every transfer as planned."""
    verdict = verify(job_of(name, p, m, more), pool=pool)
    assert verdict.failures == []
    assert max(error.value for error in verdict.errors.values()) < 1e-10


@pytest.mark.parametrize("tree", [{"offload": "host"}, {"offload": "disk"}])
def test_states_may_lie_elsewhere(pool, tree):
    assert verify(asked("pp=2,dp=2,zero=1,schedule=pipedream", **tree), pool=pool).failures == []


def test_the_command_proves_it(capsys):
    assert main(["verify", "--layout", "pp=2,schedule=pipedream", "--steps", "2"]) == 0
    assert "ok: the same numbers, the planned bytes" in capsys.readouterr().out


def test_the_truth_is_plain_training_where_nothing_is_delayed():
    """One mini-batch per step: the emulation against plain torch, which shares no code with it but the model."""
    job = reference.job("pp=2,schedule=pipedream,micro_batches=1", reference.MODELS["llama-like"])
    job = replace(job, train=replace(job.train, clip=1e9))
    errors = compare(delayed(0, 1, job, reference.STEPS), reference.plain_torch(job))
    assert max(error.value for error in errors.values()) < 1e-12


@pytest.mark.parametrize(("name", "other"), [(a, b) for a in NAMES for b in NAMES if a != b])
def test_the_truth_tells_the_delays_apart(name, other):
    one, another = (delayed(0, 1, job_of(schedule, 4, 8), 1) for schedule in (name, other))
    assert compare(one, another)["weights"].value > 1e-4


# ---- what must not pass


def without_stash(rank, world, job, steps):
    """Forward and backward with whatever weights are there."""
    of = Versions.of
    Versions.of = lambda self, micro_batch: saved_tensors_hooks(lambda x: x, lambda x: x)
    try:
        return trial(rank, world, job, steps)
    finally:
        Versions.of = of  # the pool's ranks live on


def with_one_mean(rank, world, job, steps):
    """Every micro-batch's loss divided by the valid tokens of the step, as where weights are updated once."""
    valid = Trainer._valid
    Trainer._valid = lambda self, batches: [sum(found := valid(self, batches))] * len(found)
    try:
        return trial(rank, world, job, steps)
    finally:
        Trainer._valid = valid


def with_parts_of_gradients(rank, world, job, steps):
    """Nothing summed over the tensor ranks."""
    total = Shares.sum
    Shares.sum = lambda self: None
    try:
        return trial(rank, world, job, steps)
    finally:
        Shares.sum = total


@pytest.mark.parametrize(
    ("name", "layout", "run"),
    [
        ("pipedream", (2, 4), without_stash),
        ("pipedream", (4, 8), without_stash),
        ("pipedream-vertical", (4, 8), without_stash),
        ("pipedream-2bw", (4, 12), without_stash),
        ("pipedream", (2, 4), with_one_mean),
        ("pipedream", (2, 4, ",tp=2,sp"), with_parts_of_gradients),
    ],
)
def test_what_is_wrong_is_caught(pool, name, layout, run):
    verdict = verify(job_of(name, *layout), pool=pool, run=run)
    assert verdict.errors["weights"].value > 1e-6
    assert any(line.startswith("weights: ") for line in verdict.failures)


# ---- the versions, told by their contents


class Seen:
    """Which version of its weights a stage's forwards and backwards really compute with, in one step.

    snapshots: by version, all storages of the weights by address, as they were when the version was the newest.
    """

    def __init__(self, trainer):
        self.chunk, self.engine = trainer.pipeline.chunks[0], trainer.pipeline.engine
        self.by_kind = {"F": {}, "B": {}}  # by micro-batch, versions
        self.snapshots = [self.snapshot()]
        update, forward = self.engine.update, self.chunk.forward

        def updated(*arguments):
            update(*arguments)
            self.snapshots.append(self.snapshot())

        def forwarded(x, batch):
            for parameter, original in zip(self.chunk.parameters(), self.originals, strict=True):
                self.note("F", parameter.data, original)
            return forward(x, batch)

        self.originals = [stash._place(p.data, p.untyped_storage()._cdata) for p in self.chunk.parameters()]
        self.engine.update, self.chunk.forward = updated, forwarded

    def snapshot(self):
        storages = {p.untyped_storage()._cdata: p.untyped_storage() for p in self.chunk.parameters()}
        return {address: storage.clone() for address, storage in storages.items()}

    def note(self, kind, x, place):
        """x, which lies at a place of the newest version's storages, is used now."""
        for version, storages in enumerate(self.snapshots):
            view = torch.empty(0, dtype=x.dtype).set_(storages[place.original], *place[1:])
            if torch.equal(view, x):
                self.by_kind[kind].setdefault(self.engine.group.ledger.place.micro_batch, set()).add(version)
                return
        raise AssertionError("no version has these weights")

    @contextmanager
    def kept(self):
        """Inside, Versions keeps no version, so autograd has what is there."""
        addresses = set(self.snapshots[0])

        def pack(x):
            address = x.untyped_storage()._cdata
            return x, stash._place(x, address) if address in addresses else None

        def unpack(packed):
            x, place = packed
            if place is not None:
                self.note("B", x, place)
            return x

        with saved_tensors_hooks(pack, unpack):
            yield


def watched(rank, world, job, stashing):
    """(log of (stage, micro-batch, version at F, version at B), most versions alive as the engine counted) of one step."""
    here = World(mesh_of(job), rank, Ledger())
    trainer = Trainer(job, here, MadeUpBatches(job, 0))
    seen, counted = Seen(trainer), []
    step, of, unpack = seen.engine.step, Versions.of, Versions._unpack

    def unpacked(self, packed):
        x = unpack(self, packed)
        if isinstance(packed, stash._Saved):
            seen.note("B", x, packed.place)
        return x

    def stepped(*arguments):
        ran = step(*arguments)
        counted.append(ran.versions[0])
        return ran

    seen.engine.step, Versions._unpack = stepped, unpacked
    if not stashing:
        Versions.of = lambda self, micro_batch: seen.kept()
    try:
        trainer.step(0)
    finally:
        Versions.of, Versions._unpack = of, unpack
        here.close()
    log = [(rank, i, seen.by_kind["F"][i], seen.by_kind["B"][i]) for i in range(job.layout.micro_batches)]
    return log, counted[0]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 1), (4, 8)])
@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward_meet_the_version_of_the_plan(pool, name, p, m):
    results = pool.run(watched, p, job_of(name, p, m), True, timeout=60)
    planned = [(use.stage, use.micro_batch, {use.forward}, {use.backward}) for use in uses(make(name, p, m))]
    assert [line for log, _ in results for line in log] == planned
    alive = [max(live_versions(make(name, p, m), Place(stage, 0))) for stage in range(p)]
    assert [count for _, count in results] == alive
    if m >= p and name == "pipedream":
        assert alive == [p - stage for stage in range(p)]


def test_without_stashing_backward_is_ahead(pool):
    """By p - 1 - s updates, once the pipeline is full."""
    p, m = 4, 8
    results = pool.run(watched, p, job_of("pipedream", p, m), False, timeout=60)
    log = [line for log, _ in results for line in log]
    expected = [(use.stage, use.micro_batch, {use.forward}, {use.latest}) for use in uses(make("pipedream", p, m))]
    assert log == expected
    full = [(stage, max(late) - max(early)) for stage, i, early, late in log if i >= p - 1]
    assert all(ahead == p - 1 - stage for stage, ahead in full)


# ---- what is not finite


def with_a_bad_gradient(rank, world, job):
    """The gradient of the first stage is not finite in micro-batch 1, on one data rank of two."""
    here = World(mesh_of(job), rank, Ledger())
    trainer = Trainer(job, here, MadeUpBatches(job, here.group("dp").index))
    if here.group("pp").index == 0 and here.group("dp").index == 0:
        spoil(next(trainer.model.parameters()), here.ledger)
    results = [trainer.step(step) for step in range(2)]
    weights = {name: weight.numpy().copy() for name, weight in trainer.states.weights()}
    here.close()
    return results, weights, int(trainer.optimizer.steps)


def spoil(parameter, ledger):
    """Makes one element of its gradient infinite, once."""
    spoiled = []

    def hook(gradient):
        if ledger.place.micro_batch == 1 and not spoiled:
            spoiled.append(True)
            return gradient.index_fill(0, torch.zeros(1, dtype=torch.long), math.inf)
        return None

    parameter.register_hook(hook)


@pytest.mark.parametrize("zero", [0, 1])
def test_an_update_that_is_not_finite_falls_out_alone(pool, zero):
    job = job_of("pipedream", 2, 4, f",dp=2,zero={zero}")
    results = pool.run(with_a_bad_gradient, 4, job, timeout=60)
    for steps, weights, updates in results:
        assert [step.skipped for step in steps] == [True, False]
        assert not math.isfinite(steps[0].grad_norm) and math.isfinite(steps[1].grad_norm)
        assert updates == (7 if "embedding.weight" in weights else 8)
        assert all(np.isfinite(weight).all() for weight in weights.values())
    held = [pieces_of(job, rank) for rank in range(4)]
    assert disagreement([weights for _, weights, _ in results], held) is None


# ---- training and refusing


def test_it_trains_evaluates_and_writes(tmp_path, capsys):
    """A whole run of the command: the measured transfers are the planned ones, the loss falls."""
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 2000)
    options = {
        "model.preset": "tiny", "layout": "pp=2,schedule=pipedream", "train.clip": 0, "train.steps": 8, "train.warmup": 0,
        "train.batch": 8, "data.sequence": 16, "data.path": text, "data.cache": tmp_path / "cache", "out": tmp_path / "out",
        "train.sample": 0, "train.eval_every": 4,
    }  # fmt: skip
    assert main(["train", *(word for key, value in options.items() for word in (f"--{key}", str(value)))]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert "DIFFERS" not in capsys.readouterr().out
    losses = [line.split('"loss": ')[1].split(",")[0] for line in (tmp_path / "out" / "metrics.jsonl").open()]
    assert float(losses[-1]) < float(losses[0]) - 0.5


REFUSED = {
    "clipping": (
        ["--layout", "pp=2,schedule=pipedream", "--model", "tiny"],
        "train.clip = 1.0 with a schedule that updates weights between micro-batches: a stage updates before",
    ),
    "tied": (
        ["--layout", "pp=2,schedule=pipedream-2bw", "--train.clip", "0"],
        "model.tied = true with a schedule that updates",
    ),
    "ZeRO-3": (
        ["--layout", "pp=2,dp=2,zero=3,schedule=pipedream-vertical", "--model", "tiny"],
        "layout.zero = 3 with a schedule that updates weights between micro-batches",
    ),
    "a file's": (
        ["--layout", "pp=2,schedule={file}", "--model", "tiny"],
        "schedule=pipedream-vertical or schedule=pipedream-2bw would do",
    ),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_stage_can_do_by_itself_is_refused(tmp_path, capsys, words, message):
    from shoal.axes.pipeline.schedules.files import to_csv

    (tmp_path / "mine.csv").write_text(to_csv(make("pipedream", 2, 4)))
    words = [word.replace("{file}", str(tmp_path / "mine.csv")) for word in words]
    assert main(["train", *words, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
