"""The engine: every schedule on toy stages against one process, its order, its memory and its transfers."""

from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.axes.pipeline.check import check
from shoal.axes.pipeline.cost import activation_bytes, evaluation_transfers, step_transfers
from shoal.axes.pipeline.evaluation import forward_only
from shoal.axes.pipeline.live import peaks
from shoal.axes.pipeline.mail import UNDER_WAY
from shoal.axes.pipeline.run import Engine
from shoal.axes.pipeline.schedules.files import from_csv
from shoal.axes.pipeline.schedules.registry import make
from shoal.axes.pipeline.stash import Versions
from shoal.axes.recompute.run import Cheap, recomputed, remade
from shoal.comm.exchange import exchange
from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.kernels.linear import Linear
from shoal.kernels.norm import RMSNorm
from shoal.mesh import Mesh

B, S, H = 2, 3, 5  # of a micro-batch
SIZE = B * S * H * 8  # bytes of a message
SEED = 1 / 7


class Stage(nn.Module):
    """x + W2 tanh(W1 norm(x) + b1): linear layers whose gradients can wait, and a norm and biases whose cannot.

    The last stage answers with the loss against a target that depends on the micro-batch. recompute: what is made again.
    """

    def __init__(self, stage: int, stages: int, recompute: str = "none"):
        super().__init__()
        self.recompute = recompute
        self.norm, self.up, self.down = RMSNorm(H, 1e-6), Linear(H, 2 * H), Linear(2 * H, H, bias=False)
        self.is_last = stage == stages - 1
        random = np.random.default_rng(stage)
        for parameter in self.parameters():
            parameter.data = torch.from_numpy(random.normal(size=parameter.shape) / 2)

    def forward(self, x, micro_batch):
        x = data(micro_batch) if x is None else x
        x = recomputed(self.block, x, Ledger()) if self.recompute == "full" else self.block(x)
        return (x - data(micro_batch, 1)).square().sum() if self.is_last else x

    def block(self, x):
        wanted = self.recompute == "selective"
        up = remade(self.up, Cheap(self.norm, (x,)), wanted=wanted)
        return x + remade(self.down, Cheap(torch.tanh, (up,)), wanted=wanted)


def data(micro_batch, which=0):
    return torch.from_numpy(np.random.default_rng((micro_batch, which)).normal(size=(B, S, H)))


@cache
def one_process(stages, m):
    """(losses, gradients by stage and parameter) of the whole model, by plain autograd."""
    model = [Stage(stage, stages) for stage in range(stages)]
    losses = []
    for i in range(m):
        x = None
        for stage in model:
            x = stage(x, i)
        (x * SEED).backward()
        losses.append(float(x.detach()))
    gradients = {(at, name): q.grad.numpy() for at, stage in enumerate(model) for name, q in stage.named_parameters()}
    return losses, gradients


def build(rank, name, p, m, v=None, recompute="none", **options):
    """(engine, this rank's stages) of a schedule on toy stages."""
    schedule = make(name, p, m, v)
    group = World(Mesh({"pp": p}, ("pp",)), rank, Ledger()).group("pp")
    held = [schedule.stage_of(rank, chunk) for chunk in range(schedule.chunks(rank))]
    chunks = [Stage(stage, schedule.stages, recompute) for stage in held]
    return Engine(schedule, group, chunks, (B, S, H), torch.float64, **options), chunks


def trained(rank, p, name, m, v=None, recompute="none"):
    engine, chunks = build(rank, name, p, m, v, recompute)
    schedule, group = engine.schedule, engine.group
    ran = engine.step(range(m), SEED)
    transfers = group.ledger.transfers()
    twins = zip(*schedule.routes, strict=True) if len(schedule.routes) == 2 else ()
    for one, other in twins:  # of a stage that exists twice
        for place, peer in ((one, other), (other, one)):
            if place.rank == rank:
                for parameter in chunks[place.chunk].parameters():
                    theirs = torch.empty_like(parameter)
                    exchange([(parameter.grad, peer.rank)], [(theirs, peer.rank)], group).wait()
                    parameter.grad += theirs
    gradients = {
        (schedule.stage_of(rank, chunk), name): parameter.grad
        for chunk, stage in enumerate(chunks)
        for name, parameter in stage.named_parameters()
    }
    return ran.losses, gradients, [done.instruction for done in ran.log], ran.peak, transfers


CASES = [
    (name, p, m, None)
    for name in ("naive", "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v")
    for p, m in ((2, 1), (2, 5), (4, 1), (4, 3), (4, 16))
]
CASES += [(name, p, m, None) for name in ("dualpipe", "dualpipe-v") for p, m in ((2, 4), (4, 8), (4, 16))]
CASES += [("interleaved", 2, 4, 3), ("breadth-first", 4, 3, 1), ("1f1b", 1, 3, None), ("zb-v", 1, 2, None)]
CASES += [("1f1b", 8, 16, None), ("dualpipe", 8, 16, None)]


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_every_schedule_computes_what_one_process_computes_as_planned(pool, name, p, m, v):
    """Losses and gradients to 1e-10; the order, the peak of live activations and every transfer are the schedule's."""
    schedule = make(name, p, m, v)
    losses, gradients = one_process(schedule.stages, m)
    results = pool.run(trained, p, name, m, v, timeout=60)
    assert_losses(results, losses)
    found = [item for result in results for item in result[1].items()]
    assert {key for key, _ in found} == set(gradients)
    for key, gradient in found:
        assert np.linalg.norm(gradient - gradients[key]) <= 1e-10 * np.linalg.norm(gradients[key]), key
    for rank, (_, _, order, peak, transfers) in enumerate(results):
        assert order == list(schedule.instructions(rank))
        assert peak == peaks(schedule)[rank]
        assert sorted(transfers, key=str) == sorted(step_transfers(schedule, rank, SIZE), key=str)


def assert_losses(results, wanted):
    """Every loss comes from exactly one rank."""
    reported = [(i, float(loss)) for result in results for i, loss in result[0].items()]
    assert sorted(i for i, _ in reported) == list(range(len(wanted)))
    np.testing.assert_allclose([loss for _, loss in sorted(reported)], wanted, rtol=1e-12)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe"])
def test_recomputation_changes_nothing(pool, name, recompute):
    """Not a bit of any loss or gradient, also where weight gradients are put off."""
    plain, again = (pool.run(trained, 2, name, 4, None, mode, timeout=60) for mode in ("none", recompute))
    for (losses, gradients, *_), (losses_again, gradients_again, *_) in zip(plain, again, strict=True):
        assert losses == losses_again
        assert all(np.array_equal(gradients[key], gradients_again[key]) for key in gradients)


def hooked(rank, p, name, m):
    """(instruction, whether it was said to be the chunk's last) of every call of `around`, and what it wrapped."""
    seen = []

    @contextmanager
    def around(instruction, last):
        seen.append((instruction, last, engine.group.ledger.place[::2]))
        yield

    engine, _ = build(rank, name, p, m, around=around)
    engine.step(range(m), SEED)
    return seen


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "dualpipe"])
def test_every_instruction_is_announced(pool, name):
    """With its phase and micro-batch in the ledger; the last weight gradient of each chunk is called the last."""
    schedule = make(name, 2, 4)
    phases = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
    for rank, seen in enumerate(pool.run(hooked, 2, name, 4, timeout=60)):
        assert [x for x, _, _ in seen] == list(schedule.instructions(rank))
        assert [place for _, _, place in seen] == [(phases[x.kind], x.micro_batch) for x, _, _ in seen]
        for chunk in range(schedule.chunks(rank)):
            makers = [last for x, last, _ in seen if x.chunk == chunk and x.kind in "BW"]
            assert makers == [False] * (len(makers) - 1) + [True]
        assert not any(last for x, last, _ in seen if x.kind in "FI")


def two_copies(rank, p, name, m):
    engine, chunks = build(rank, name, p, m)
    engine.step(range(m), SEED)
    return [parameter.grad.clone() for chunk in chunks for parameter in chunk.parameters()]


def test_copies_that_are_not_added_are_caught(pool):
    """Each of DualPipe's two copies has the gradients of half the micro-batches; their sum alone is the whole."""
    _, gradients = one_process(2, 4)
    mine, theirs = pool.run(two_copies, 2, "dualpipe", 4, timeout=60)  # stages 0, 1 here are stages 1, 0 there
    theirs = theirs[len(theirs) // 2 :] + theirs[: len(theirs) // 2]
    for one, other, wanted in zip(mine, theirs, gradients.values(), strict=True):
        assert np.linalg.norm(one + other - wanted) < 1e-10 * np.linalg.norm(wanted)
        assert np.linalg.norm(one - wanted) > 1e-3 * np.linalg.norm(wanted)


def test_what_does_not_fit_is_refused():
    engine, chunks = build(0, "zb-v", 1, 2)
    with pytest.raises(AssertionError, match="takes 2 micro-batches, not 3"):
        engine.step(range(3), SEED)
    engine.chunks = [lambda x, batch: chunks[0](x, batch)[:1], chunks[1]]
    with pytest.raises(AssertionError, match=r"a stage gave torch.float64 \(1, 3, 5\), not torch.float64 \(2, 3, 5\)"):
        engine.step(range(2), SEED)
    engine.chunks = [lambda x, batch: chunks[0](x, batch), lambda x, batch: chunks[1](x.detach(), batch)]
    with pytest.raises(AssertionError, match="the output does not depend on the input"):
        engine.step(range(2), SEED)
    with pytest.raises(AssertionError, match="rank 0 holds 2 chunks, not 1"):
        Engine(make("zb-v", 1, 2), engine.group, chunks[:1], (B, S, H), torch.float64)


def evaluated(rank, p, name, m, count):
    engine, _ = build(rank, name, p, m)
    with engine.group.ledger.at(phase="evaluate"):
        ran = engine.evaluate(range(count))
    return ran.losses, engine.group.ledger.transfers()


@pytest.mark.parametrize("count", [1, 5, 8])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "dualpipe"])
def test_evaluation_runs_forwards_alone(pool, name, count):
    """Any number of micro-batches, whatever the schedule's; no deadlock even where nothing is buffered."""
    schedule = make(name, 4, 8)
    forwards = forward_only(schedule, count)
    check(forwards, forward_only=True)
    results = pool.run(evaluated, 4, name, 8, count, timeout=60)
    assert_losses(results, one_process(schedule.stages, count)[0])
    for rank, (_, transfers) in enumerate(results):
        assert transfers == list(evaluation_transfers(forwards, rank, SIZE))


# ---- memory


def measured(rank, p, name, m):
    """(most bytes of activations alive, most outputs for others alive) at the ends of forwards, each storage once."""
    engine, chunks = build(rank, name, p, m)
    weights = {parameter.data_ptr() for chunk in chunks for parameter in chunk.parameters()}
    saved, outputs = {}, []
    most = Counter()

    def alive(storages):
        return [size for storage, size in storages if not storage.expired()]

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[StorageWeakRef(storage)] = storage.nbytes()
        return x

    def watched(number, chunk):
        def forward(x, micro_batch):
            with saved_tensors_hooks(pack, lambda x: x):
                y = chunk(x, micro_batch)
            after = engine.schedule.next(rank, number, micro_batch)
            if after is not None and after.rank != rank:
                outputs.append((StorageWeakRef(y.untyped_storage()), 1))
            for ref in [ref for ref in saved if ref.expired()]:  # its address may be used again
                del saved[ref]
            most["bytes"] = max(most["bytes"], sum(saved.values()))
            most["outputs"] = max(most["outputs"], len(alive(outputs)))
            return y

        return forward

    engine.chunks = [watched(number, chunk) for number, chunk in enumerate(chunks)]
    engine.step(range(m), SEED)
    return most["bytes"], most["outputs"]


WHOLE = SIZE * (1 + 1 / H + 1 + 2)  # a stage's input, the norm's scale, its output and that of tanh
WAITING = SIZE * 3  # the inputs of its linear layers


@pytest.mark.parametrize(
    ("name", "p", "m"),
    [("gpipe", 2, 5), ("1f1b", 4, 8), ("interleaved", 4, 8), ("zb-h2", 4, 8), ("zb-v", 4, 8), ("dualpipe", 4, 8)],
)
def test_bytes_of_activations_are_those_of_the_plan(pool, name, p, m):
    """Storages that autograd keeps are gone as soon as the plan says; outputs are gone once they have been sent."""
    schedule = make(name, p, m)
    last = SIZE  # the loss keeps the difference from its target
    whole = [WHOLE + last * (stage == schedule.stages - 1) for stage in range(schedule.stages)]
    results = pool.run(measured, p, name, m, timeout=60)
    for rank, (size, outputs) in enumerate(results):
        assert size == activation_bytes(schedule, rank, whole, [WAITING] * schedule.stages), rank
        assert outputs <= UNDER_WAY + 1, "outputs pile up"


# ---- PipeDream: updates between, and every backward with the weights of its forward

RATE = 0.05


def pipedream(rank, p, name, m, stash=True, recompute="none"):
    """(losses, weights, versions alive) after asynchronous SGD; without the stash, forward and backward take the newest."""

    def update(chunk, micro_batch):
        for parameter in chunks[chunk].parameters():
            parameter.data.add_(parameter.grad, alpha=-RATE)
            parameter.grad = None

    engine, chunks = build(rank, name, p, m, recompute=recompute, update=update)
    if not stash:
        Versions.of, of = lambda self, micro_batch: nullcontext(), Versions.of
    try:
        ran = engine.step(range(m), SEED)
    finally:
        if not stash:
            Versions.of = of  # the pool's ranks live on
    return ran.losses, {name: parameter.data for name, parameter in chunks[0].named_parameters()}, ran.versions[0]


def delayed(p, m, version, every):
    """(losses, weights by stage) of one process whose stages keep all their versions.

    version(stage, micro_batch): how many updates forward and backward have seen; every: micro-batches per update.
    """
    model = [Stage(stage, p) for stage in range(p)]
    history = [[{name: q.data.clone() for name, q in stage.named_parameters()}] for stage in model]
    losses = []
    for i in range(m):
        for stage, (module, versions) in enumerate(zip(model, history, strict=True)):
            for name, parameter in module.named_parameters():
                parameter.data = versions[version(stage, i)][name]
        x = None
        for module in model:
            x = module(x, i)
        (x * SEED).backward()
        losses.append(float(x.detach()))
        if (i + 1) % every == 0 or i + 1 == m:
            for module, versions in zip(model, history, strict=True):
                versions.append({name: versions[-1][name] - RATE * q.grad for name, q in module.named_parameters()})
                module.zero_grad()
    return losses, [{name: weight.numpy() for name, weight in versions[-1].items()} for versions in history]


def error(results, weights):
    """Largest relative difference of a weight."""
    return max(
        np.linalg.norm(found[name] - wanted) / np.linalg.norm(wanted)
        for (_, found, _), truth in zip(results, weights, strict=True)
        for name, wanted in truth.items()
    )


RULES = {  # updates seen by micro-batch i in stage s of p, from the spec's own words; versions alive in stage s
    "pipedream": (lambda p, s, i: max(0, i - (p - 1 - s)), 1, lambda p, s: p - s),
    "pipedream-vertical": (lambda p, s, i: max(0, i - (p - 1)), 1, lambda p, s: p),
    "pipedream-2bw": (lambda p, s, i: max(0, i // p - 1), None, lambda p, s: 2),
}


@pytest.mark.parametrize(("p", "recompute"), [(2, "none"), (4, "none"), (3, "selective"), (3, "full")])
@pytest.mark.parametrize("name", RULES)
def test_pipedream_is_sgd_with_delayed_weights(pool, name, p, recompute):
    rule, every, alive = RULES[name]
    m = 4 * p
    losses, weights = delayed(p, m, lambda s, i: rule(p, s, i), every or p)
    results = pool.run(pipedream, p, name, m, True, recompute, timeout=60)
    assert_losses(results, losses)
    assert error(results, weights) < 1e-10
    assert [result[2] for result in results] == [alive(p, stage) for stage in range(p)]


def test_pipedream_without_its_stash_is_caught(pool):
    p, m = 4, 16
    _, weights = delayed(p, m, lambda s, i: RULES["pipedream"][0](p, s, i), 1)
    results = pool.run(pipedream, p, "pipedream", m, False, timeout=60)
    assert error(results, weights) > 1e-6
    assert error(results[-1:], weights[-1:]) > 1e-6, "the last stage has no delay of its own, yet its inputs differ"


@pytest.mark.parametrize(
    ("steps", "fault"),
    [
        ("F0", "rank 0 has no B, and no I, for micro-batch 0"),
        ("F0,B0,B0", "rank 0, position 2, B0: it stands at position 1 already"),
        ("B0,F0", "rank 0, position 0, B0 waits for rank 0, position 1, F0"),
        ("F0,B0,W0", "rank 0, position 2, W0 repeats a part of its B"),
        ("F0,B0,F1", "rank 0, position 2, F1: there is no micro-batch 1"),
    ],
)
def test_the_engine_refuses_a_schedule_that_is_not_sound(steps, fault):
    """Before anything runs, whoever made it: no rank waits for what never comes."""
    schedule = from_csv(f"schedule,mine\nversions,flush\nroute,0.0\nmicro-batches,0\nrank,{steps}\n")
    with pytest.raises(ValueError, match=fault):
        Engine(schedule, World.single().group("pp"), [Stage(0, 1)], (B, S, H), torch.float64)
