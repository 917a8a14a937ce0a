"""A process finds its place from torchrun's or Slurm's variables, and only from a whole set of them."""

import pytest

from shoal.launch.cluster import find_place
from shoal.spec.errors import RequestError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}
SRUN = {
    "SLURM_PROCID": "9",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "alpha,beta",
    "SLURM_JOB_ID": "123456",
}


def test_started_by_hand_there_is_no_place():
    assert find_place({"PATH": "/bin", "RANK": "0"}) is None


def test_torchrun():
    place = find_place(TORCHRUN)
    assert (place.rank, place.world, place.local_rank, place.local_world, place.meeting) == (5, 16, 1, 4, "env://")


def test_srun_meets_at_the_first_host_and_every_rank_derives_the_same_port():
    place, other = find_place(SRUN), find_place(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert (place.rank, place.world, place.local_rank, place.local_world) == (9, 16, 1, 8)
    assert place.meeting == other.meeting == "tcp://alpha:23456"
    assert find_place(SRUN, port=4321).meeting == "tcp://alpha:4321"


def test_a_batch_script_outside_srun_is_not_a_rank():
    assert find_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "1"}) is None


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(RequestError, match="WORLD_SIZE = 'many'"):
        find_place(TORCHRUN | {"WORLD_SIZE": "many"})
