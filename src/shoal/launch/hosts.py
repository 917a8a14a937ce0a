"""Ranks on several hosts: they meet at a store, see that all do the same, and learn where the others can reach them."""

import hashlib
import json
import socket
from datetime import timedelta
from ipaddress import ip_address

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

import shoal
from shoal.launch.cluster import Place
from shoal.spec.build import job_to_tree
from shoal.spec.errors import RequestError
from shoal.spec.job import Job

# What each host may have in its own way. What a rank reads is compared by its content.
OF_A_HOST = ("machine", "data.path", "data.cache", "data.tokenizer", "train.out")


def meet(place: Place, seconds: float) -> dist.TCPStore:
    """The store at which the ranks of `place` meet. Raises RequestError when it cannot be reached for so many seconds."""
    wait = timedelta(seconds=seconds)
    try:
        store, _, _ = next(rendezvous(place.meeting, place.rank, place.world, timeout=wait))
    except dist.DistError as failed:
        reason = str(failed).splitlines()[0]
        raise RequestError(
            "machine.port",
            f"rank {place.rank} of {place.world} did not meet the others within machine.timeout_s = {seconds:g} s ({reason}); "
            "all ranks running, and a port (machine.port) that is open between their hosts, would do",
        ) from None
    store.set_timeout(wait)
    return store


def own_address(place: Place, store: dist.Store, host: str) -> str | None:
    """The IP address at which ranks on other hosts reach this rank; None when all ranks are on one host.

    store: what the ranks share; host: where it is. The address is the one from which this rank reaches that host. On the
    host itself it may be 127.0.0.1, or whatever the host calls itself; there it is the one from which it reaches others.
    """
    address = _towards(host)
    names = [f"shoal/address/{rank}" for rank in range(place.world)]
    store.set(names[place.rank], address)
    if not ip_address(address).is_loopback:
        return address
    others = (value.decode() for value in store.multi_get(names))
    far = next((other for other in others if not ip_address(other).is_loopback), None)
    return None if far is None else _towards(far)


def check_alike(place: Place, store: dist.Store, job: Job, content: str) -> None:
    """Raises RequestError, on every rank, when two ranks were given different jobs, versions or data.

    content: what identifies the tokens that this rank reads. Ranks that differ would wait for each other, or train on
    with other numbers than one process.
    """
    facts = {"data": content, "shoal": shoal.__version__, "torch": torch.__version__}
    for section, fields in job_to_tree(job).items():
        facts |= {f"{section}.{name}": str(value) for name, value in fields.items()}
    own = {name: value for name, value in facts.items() if not name.startswith(OF_A_HOST)}
    text = json.dumps(own, sort_keys=True)
    # A thousand ranks that agree read a thousand marks each, and no text.
    store.set(f"shoal/facts/{place.rank}", text)
    store.set(f"shoal/mark/{place.rank}", hashlib.blake2b(text.encode(), digest_size=8).hexdigest())
    marks = store.multi_get([f"shoal/mark/{rank}" for rank in range(place.world)])
    other = next((rank for rank, mark in enumerate(marks) if mark != marks[0]), None)
    if other is None:
        return
    first, second = (json.loads(store.get(f"shoal/facts/{rank}")) for rank in (0, other))
    store.set(f"shoal/read/{place.rank}", "")
    if place.rank == 0:
        store.wait([f"shoal/read/{rank}" for rank in range(place.world)])  # the store may end with this rank
    field = next(name for name in sorted({*first, *second}) if first.get(name) != second.get(name))
    raise RequestError(
        field,
        f"{field} = {first.get(field)} on rank 0, but {second.get(field)} on rank {other}; the same on all hosts would do",
    )


def _towards(host: str) -> str:
    """The address of this host from which messages to `host` leave. Nothing is sent."""
    for family, kind, protocol, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return probe.getsockname()[0]
        except OSError:
            continue  # such as IPv6 where there is none
    raise AssertionError(f"no way to {host}, at which the ranks have met")
