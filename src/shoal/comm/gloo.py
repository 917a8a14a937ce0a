"""gloo on the address of our choice, where torch would take the one that this host's own name stands for.

Many hosts know their own name as 127.0.0.1 or 127.0.1.1 (/etc/hosts, as Debian writes it): a rank that tells other hosts
to reach it there is never reached. torch offers a variable of the environment against it, and no argument.
"""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

ADDRESSED = "gloo_addressed"  # the name under which torch.distributed knows it


def address_gloo(address: str) -> None:
    """From now on `gloo()` is a back end whose connections use `address`, an IP address of this host."""

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        return ProcessGroupGloo(store, rank, size, options)

    dist.Backend.register_backend(ADDRESSED, make, devices=["cpu"])


def gloo() -> str:
    """The back end for tensors on the CPU, by torch.distributed's name for it."""
    return ADDRESSED if ADDRESSED in dist.Backend.backend_list else dist.Backend.GLOO
