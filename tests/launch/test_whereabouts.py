"""Where every rank is: what is written down, and what a person is told of it. Records made by hand, and real ones."""

import dataclasses
import os
import re
import signal
import subprocess
import time

import pytest
import torch

from shoal.comm import collectives
from shoal.comm.exchange import exchange
from shoal.comm.faults import explain
from shoal.comm.ledger import Ledger, Place
from shoal.comm.ring_run import ring_all_reduce
from shoal.comm.whereabouts import SAVE, TOLD, LastCall, Record, Whereabouts, clear, read
from shoal.comm.world import World
from shoal.launch.local import Stopped
from shoal.launch.report import RankDied, dead_by_records, kind_of, telling
from shoal.mesh import Mesh


def rank(number, call=None, *, world=4, step=4, phase="backward", called=(), **more):
    """A record; `call` is one that it waits in, and which counts as called."""
    if call is not None and call.peer is None:
        called = (*called, (call.axis, call.ranks, call.number))
    return Record(number, world, step=step, phase=phase, call=call, called=called, host="one", process=1, **more)


def over(axis, *ranks, op="all_reduce", number=17, peer=None):
    return LastCall(op, number, axis, ranks, peer)


def headline(records, dead=()):
    return explain(records, dict(dead)).splitlines()[0]


KILLED = {2: "was killed by SIGKILL"}


def test_the_first_line_says_who_was_lost_where_and_who_waited_in_what():
    four = (0, 1, 2, 3)
    records = [rank(n, over("dp", *four)) for n in (0, 1, 3)]
    records.append(rank(2, layer=1, called=(("dp", four, 16),)))
    assert headline(records, KILLED) == (
        "rank 2 was killed by SIGKILL in step 4, backward, layer 1; ranks 0, 1 and 3 waited for it in all_reduce 17 over dp"
    )


def test_a_rank_that_is_killed_inside_a_call_leaves_the_others_in_it():
    records = [rank(n, over("dp", 0, 1, 2), world=3) for n in range(3)]
    assert headline(records, KILLED) == (
        "rank 2 was killed by SIGKILL in step 4, backward, in all_reduce 17 over dp; "
        "ranks 0 and 1 waited for it in all_reduce 17 over dp"
    )


def test_a_rank_without_a_record_is_not_forgotten():
    records = [rank(n, over("dp", 0, 1, 2, 3, number=1), step=None, phase="setup") for n in (0, 1)]
    said = explain(records, KILLED)
    assert said.startswith(
        "rank 2 was killed by SIGKILL before it wrote down where it was; ranks 0 and 1 waited for it"
    )
    assert "rank 2: was killed by SIGKILL, and left no record" in said and "rank 3: left no record" in said
    assert (
        "rank 0: at the start of the run; in all_reduce 1 over dp among ranks 0 to 3; ranks 2 and 3 had not come"
        in said
    )


def test_a_rank_that_hangs_is_found_by_way_of_those_that_wait_for_waiting_ones():
    """dp=2,tp=2: rank 1 hangs, its tensor peer 0 waits for it, and 2 waits for 0 over dp; 3 waits for 1 over dp."""
    records = [
        rank(0, over("tp", 0, 1, number=30), phase="forward", called=(("dp", (0, 2), 7),)),
        rank(1, phase="forward", layer=1, called=(("tp", (0, 1), 29), ("dp", (1, 3), 7))),
        rank(2, over("dp", 0, 2, number=8), called=(("tp", (2, 3), 40),)),
        rank(3, over("dp", 1, 3, number=8), called=(("tp", (2, 3), 40),)),
    ]
    assert headline(records) == (
        "rank 1 did not come: it was in step 4, forward, layer 1, in no call to others; "
        "rank 0 waited for it in all_reduce 30 over tp, rank 3 waited for it in all_reduce 8 over dp"
    )


def test_a_pipeline_names_the_peer_of_a_message():
    records = [
        rank(0, over("pp", 0, 1, 2, op="receive", number=3, peer=1), world=3, micro_batch=2),
        rank(1, over("pp", 0, 1, 2, op="receive", number=3, peer=2), world=3, micro_batch=2),
        rank(2, world=3, micro_batch=2),
    ]
    said = explain(records, {})
    assert said.startswith(
        "rank 2 did not come: it was in step 4, backward, micro-batch 2, in no call to others; "
        "rank 1 waited for it in receive 3 from rank 2 over pp"
    )
    assert "  rank 0: in step 4, backward, micro-batch 2; in receive 3 from rank 1 over pp\n" in said


def test_different_orders_wait_for_each_other():
    pair = (0, 1)
    records = [
        rank(0, over("dp", *pair, number=3), world=2, called=(("tp", pair, 7),)),
        rank(1, over("tp", *pair, op="all_gather", number=8), world=2, called=(("dp", pair, 2),)),
    ]
    assert headline(records) == (
        "ranks wait for each other: rank 0 in all_reduce 3 over dp for rank 1; rank 1 in all_gather 8 over tp for rank 0"
    )


def test_messages_in_a_circle_wait_for_each_other():
    records = [rank(n, over("cp", 0, 1, 2, op="receive", peer=(n + 1) % 3), world=3) for n in range(3)]
    assert headline(records).count("over cp for rank") == 3


def test_different_operations_at_the_same_call_are_told_apart():
    records = [rank(0, over("dp", 0, 1), world=2), rank(1, over("dp", 0, 1, op="broadcast"), world=2)]
    assert (
        headline(records)
        == "ranks called different things: call 17 over dp was all_reduce on rank 0 and broadcast on rank 1"
    )


def test_a_call_to_which_all_came_is_said_to_be_one():
    records = [rank(n, over("dp", 0, 1), world=2) for n in range(2)]
    assert headline(records) == "all had come to all_reduce 17 over dp, which did not end in time: ranks 0 and 1"


def test_the_others_wait_for_the_rank_that_still_writes_its_part_of_a_checkpoint():
    save = over("world", 0, 1, op=SAVE, number=2)
    records = [rank(n, save, world=2, phase="save", saving=5, writing=n == 1) for n in range(2)]
    assert headline(records) == (
        "rank 1 did not come: it was in step 4, save, writing its part of the checkpoint after 5 steps, "
        "in no call to others; rank 0 waited for it in save 2 over world"
    )
    assert "rank 1 had not done its part" in explain(records, {})


def test_nobody_who_waits_is_no_accusation():
    assert headline([rank(n, world=2) for n in range(2)]) == "no rank waited for another"


def test_a_large_world_is_a_few_lines_and_those_to_look_at_come_first():
    everyone = tuple(range(1000))
    records = [rank(n, over("dp", *everyone), world=1000) for n in everyone if n != 700]
    records.append(rank(700, world=1000, phase="forward"))
    lines = explain(records, {}).splitlines()
    assert lines[0].startswith("rank 700 did not come: it was in step 4, forward") and len(lines[0]) < 300
    assert lines[1].startswith("  rank 700: in step 4, forward; in no call to others")
    assert lines[2].startswith("  rank 0: ") and lines[2].endswith("(and 998 more like rank 0)") and len(lines) == 3


def test_a_large_world_in_which_all_differ_is_cut_off():
    records = [rank(n, world=100, step=n) for n in range(100)]
    lines = explain(records, {}).splitlines()
    assert len(lines) == 18 and lines[-1] == "  and 84 more ranks elsewhere"


def test_how_long_a_wait_was_and_what_python_did():
    records = [
        rank(0, over("dp", 0, 1), world=2, since=100.0, ended="late", ended_at=105.0),
        rank(1, world=2, since=99.0),
    ]
    lines = explain(records, {}, stacks={0: ["not this"], 1: ["File a.py, line 3 in spin"]}).splitlines()
    assert lines[1].endswith("in all_reduce 17 over dp among ranks 0 and 1 for 5.0 s; rank 1 had not come")
    assert lines[2].endswith("in no call to others for 6.0 s") and lines[3] == "      File a.py, line 3 in spin"
    assert not any("not this" in line for line in lines)


# ---- the files


def note_and_read(folder, *places):
    noted = Whereabouts(folder, 3, 8)
    for place in places:
        noted.at(place)
    return noted, lambda: read(folder)[0]


def test_what_is_written_is_read(tmp_path):
    noted, record = note_and_read(tmp_path, Place("forward", 5, None))
    noted.step(12)
    calls = noted.calls("dp+cp", (1, 3, 6, 7))
    calls.begin("all_gather").done()
    call = calls.begin("all_reduce", waits=False)
    noted.at(Place("backward", None, 2))
    now = record()
    assert (now.rank, now.world, now.step, now.phase, now.layer, now.micro_batch) == (3, 8, 12, "backward", None, 2)
    assert now.waits is None and now.called == (("dp+cp", (1, 3, 6, 7), 2),) and now.call.op == "all_gather"
    call.wait()
    assert record().waits == LastCall("all_reduce", 2, "dp+cp", (1, 3, 6, 7)) and abs(record().since - time.time()) < 60
    call.done()
    assert record().waits is None
    calls.begin("receive", peer=2, spot=Place("forward", None, 9))
    now = record()
    assert now.waits == LastCall("receive", 1, "dp+cp", (1, 3, 6, 7), peer=6)
    assert (now.phase, now.micro_batch) == ("forward", 9), "a message belongs where it was asked for"
    assert now.called[0][2] == 2, "messages are no collectives"
    noted.step(None)
    noted.ended("late", "gloo: Timed out" + "." * 1000)
    assert record().at_the_end and record().step is None and record().ended == "late" and record().said[:5] == "gloo:"


def test_a_save_is_seen_on_whatever_thread(tmp_path):
    noted, record = note_and_read(tmp_path)
    with noted.saving(7):
        with noted.writing():
            assert (record().saving, record().writing) == (7, True)
        assert (record().saving, record().writing) == (7, False)
    assert (record().saving, record().writing) == (None, False)


def test_a_place_stays_where_an_error_came_from(tmp_path):
    noted, record = note_and_read(tmp_path)
    ledger = Ledger(whereabouts=noted)
    with ledger.at(phase="forward"):
        with ledger.at(layer=1):
            assert record().layer == 1
        assert record().layer is None
    assert record().phase == "setup"
    with pytest.raises(ZeroDivisionError), ledger.at(phase="forward"), ledger.at(layer=2):
        raise ZeroDivisionError
    assert (record().phase, record().layer) == ("forward", 2) and ledger.place == Place("setup", None, None)


def test_what_is_no_record_is_passed_over_and_a_new_attempt_starts_clean(tmp_path):
    (tmp_path / "rank0.at").write_bytes(b"half")
    (tmp_path / "rank1.at").write_bytes(bytes(5000))
    note_and_read(tmp_path)
    assert [record.rank for record in read(tmp_path)] == [3]
    clear(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_rank_that_others_lost_is_known_by_its_process_or_by_its_silence():
    call = over("dp", 0, 1)
    lost = dataclasses.replace(rank(0, call, world=2), host="far", ended="lost")
    silent = dataclasses.replace(rank(1, call, world=2), host="further")
    elsewhere = dataclasses.replace(rank(2, over("dp", 2, 3), world=4), host="further")
    assert dead_by_records([lost, silent, elsewhere], own=0) == {1: "was lost"}
    failed = dataclasses.replace(silent, ended="failed", said="ZeroDivisionError: x")
    assert dead_by_records([lost, failed, elsewhere], own=0) == {1: "failed (ZeroDivisionError: x)"}


def test_an_error_of_ones_own_is_told_from_one_that_others_caused():
    gloo = "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete"
    assert kind_of(RuntimeError(gloo)) == "late"
    assert kind_of(RuntimeError("[pair.cc] Connection closed by peer [127.0.0.1]:1")) == "lost"
    assert kind_of(RuntimeError("shapes differ")) == kind_of(ValueError(gloo)) == "failed"
    assert kind_of(Stopped(signal.SIGTERM)) == kind_of(KeyboardInterrupt()) == "stopped"


def test_a_rank_that_is_told_to_end_speaks_for_a_peer_that_is_gone_and_only_then(tmp_path, monkeypatch):
    """torchrun ends the others as soon as a rank is gone, which they may not have noticed; a person ends all of them."""
    monkeypatch.setattr("shoal.launch.report.GRACE", 0.01)
    gone = subprocess.Popen(["true"])
    gone.wait()
    for number, process in ((0, os.getpid()), (1, os.getpid())):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        Whereabouts(tmp_path, number, 2).step(3)
    with pytest.raises(Stopped), telling(tmp_path, 0):
        raise Stopped(signal.SIGTERM)
    monkeypatch.setattr(os, "getpid", lambda: gone.pid)
    peer = Whereabouts(tmp_path, 1, 2)
    peer.step(3)
    with pytest.raises(RankDied, match=r"^rank 1 died in step 3"), telling(tmp_path, 0):
        raise Stopped(signal.SIGTERM)
    with pytest.raises(SystemExit), telling(tmp_path, 0):  # it has been told
        raise Stopped(signal.SIGTERM)
    (tmp_path / TOLD).unlink()
    peer.ended("stopped", "stopped by SIGTERM")
    with pytest.raises(Stopped), telling(tmp_path, 0):
        raise Stopped(signal.SIGTERM)


# ---- real collectives

X = torch.ones(4)

# On rank 0, which comes first and stands still; rank 1 does the same once it has seen that.
CALLS = {
    "all_reduce": lambda group, here: collectives.all_reduce(X.clone(), group),
    "all_gather": lambda group, here: collectives.all_gather(X, group),
    "reduce_scatter": lambda group, here: collectives.reduce_scatter(X, group),
    "broadcast": lambda group, here: collectives.broadcast(X.clone(), group, root=1),
    "reduce": lambda group, here: collectives.reduce(X.clone(), group, root=0),
    "scatter": lambda group, here: collectives.scatter(X if here else X[:0], group, root=1, sizes=[2, 2]),
    "gather": lambda group, here: collectives.gather(X, group, root=0),
    "all_to_all": lambda group, here: collectives.all_to_all(X, group),
    "barrier": lambda group, here: collectives.barrier(group),
    "later all_reduce": lambda group, here: collectives.all_reduce(X.clone(), group, asynchronous=True).wait(),
    "receive": lambda group, here: (
        collectives.send(X, group, to=0) if here else collectives.receive(X.clone(), group, source=1)
    ),
    "receive of an exchange": lambda group, here: (
        exchange([(X, 0)], [], group).wait() if here else exchange([], [(X.clone(), 1)], group).take()
    ),
    "receive of a ring": lambda group, here: ring_all_reduce(X.clone(), group),
}


def seen(number, world, folder):
    """What rank 1 sees of rank 0 in each of CALLS, and what rank 0's record says after each."""
    from pathlib import Path

    noted = Whereabouts(Path(folder), number, world)
    group = World(Mesh({"dp": world}, ("dp",)), number, Ledger(whereabouts=noted)).group("dp")
    torch.distributed.barrier()
    found = {}
    for name, call in CALLS.items():
        deadline = time.monotonic() + 30
        while number == 1:
            record = read(Path(folder))[0]
            if record.waits and (record.waits.op, record.waits.number) not in found.values():
                found[name] = record.waits.op, record.waits.number
                break
            assert time.monotonic() < deadline, f"rank 0 is not seen to wait in {name}"
        call(group, number)
        if number == 0:
            found[name] = read(Path(folder))[0].waits
        torch.distributed.barrier()  # not through shoal: it is not noted
    return found


def test_every_call_is_seen_while_a_rank_waits_in_it_and_not_after(pool, tmp_path):
    after, during = pool.run(seen, 2, str(tmp_path))
    assert after == dict.fromkeys(CALLS)
    assert {name: op for name, (op, _) in during.items()} == {
        name: re.search("[a-z_]+$", name.split(" of ")[0])[0] for name in CALLS
    }
    collective = [number for op, number in during.values() if op != "receive"]
    assert collective == list(range(1, len(collective) + 1)), "collectives of a group are counted together"
    assert [number for op, number in during.values() if op == "receive"] == [1, 2, 3]
