"""Ranks that meet: the address that others reach, and a job, data and versions that are the same everywhere."""

import threading
from dataclasses import replace

import pytest
import torch.distributed as dist

from shoal.launch.cluster import Place
from shoal.launch.hosts import check_alike, meet, own_address
from shoal.spec.build import job_from_tree
from shoal.spec.errors import RequestError

JOB = job_from_tree({"model": {"preset": "tiny"}, "layout": {"dp": 3}})


def place(rank, world=3, port=1):
    return Place(rank, world, 0, 1, f"tcp://localhost:{port}")


def check_together(jobs, contents):
    """What each of several ranks is told by check_alike; None for nothing."""
    store, told = dist.HashStore(), [None] * len(jobs)

    def check(rank):
        try:
            check_alike(place(rank, len(jobs)), store, jobs[rank], contents[rank])
        except RequestError as refused:
            told[rank] = refused

    threads = [threading.Thread(target=check, args=(rank,)) for rank in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return told


def test_ranks_that_were_given_the_same_go_on():
    """Where a host keeps its files, and its device, are its own affair."""
    elsewhere = replace(JOB, data=replace(JOB.data, path="/other", cache="/c"), machine=replace(JOB.machine, threads=3))
    assert check_together([JOB, elsewhere, JOB], ["9 tokens"] * 3) == [None] * 3


@pytest.mark.parametrize("field, change", [("steps", 7), ("learning_rate", 0.5), ("seed", 3)])
def test_a_rank_with_another_job_is_named_on_every_rank(field, change):
    other = replace(JOB, train=replace(JOB.train, **{field: change}))
    for error in check_together([JOB, JOB, other], ["9 tokens"] * 3):
        assert error.field == f"train.{field}"
        assert str(error).endswith(f"on rank 0, but {change} on rank 2; the same on all hosts would do")


def test_a_rank_that_reads_other_data_is_named_on_every_rank():
    for error in check_together([JOB] * 3, ["9 tokens", "8 tokens", "9 tokens"]):
        assert str(error) == "data = 9 tokens on rank 0, but 8 tokens on rank 1; the same on all hosts would do"


def test_a_field_that_one_rank_does_not_have():
    other = replace(JOB, model=replace(JOB.model, window=8))
    assert "model.window = None on rank 0, but 8 on rank 1" in str(check_together([JOB, other], ["", ""])[0])


def test_whoever_does_not_meet_the_others_says_so():
    with pytest.raises(RequestError, match=r"rank 1 of 3 did not meet the others within machine.timeout_s = 0.5 s"):
        meet(place(1), 0.5)


def test_on_one_host_there_is_no_address_to_choose():
    store = dist.HashStore()
    for rank in (1, 2):
        store.set(f"shoal/address/{rank}", "127.0.0.1")
    assert own_address(place(0), store, "localhost") is None


def test_a_rank_that_meets_the_others_by_loopback_takes_its_way_to_another_host():
    store = dist.HashStore()
    store.set("shoal/address/1", "127.0.1.1")
    store.set("shoal/address/2", "192.0.2.7")  # an address for documents (RFC 5737)
    try:
        chosen = own_address(place(0), store, "localhost")
    except AssertionError:
        pytest.skip("this machine has no way out, so no address of its own")
    assert chosen and not chosen.startswith("127.")
