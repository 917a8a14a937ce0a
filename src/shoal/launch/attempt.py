"""Ranks that torchrun starts again meet at the store of the attempt before, and must not take what that one left for theirs.

torchrun's agent keeps its store over restarts. Gloo's ranks leave their addresses in it, and those of the next attempt would
call ranks that are gone. Nothing that torchrun tells its processes numbers the attempts alike on all hosts: its count of
restarts leaves out those that another host was the cause of. So rank 0 names the attempt, and shows the others that it lives.
"""

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from shoal.launch.cluster import Place
from shoal.spec.errors import RequestError

ATTEMPT = "shoal/attempt"  # the name that the latest rank 0 gave
LONGEST_PAUSE = 0.2  # seconds between two looks at whether rank 0 has answered


def of_this_attempt(store: dist.Store, place: Place, seconds: float) -> dist.Store:
    """The part of a store that the ranks which are there now share, and no earlier ones. Every rank calls it.

    Raises RequestError when they are not all there within so many seconds.
    """
    own = uuid.uuid4().hex
    try:
        name = _lead(store, place, own, seconds) if place.rank == 0 else _follow(store, place, own, seconds)
    except (dist.DistError, TimeoutError):
        raise RequestError(
            "machine.timeout_s",
            f"rank {place.rank} of {place.world} met not all of the others within machine.timeout_s = {seconds:g} s; "
            f"{2 * seconds:g} would wait for slower ones",
        ) from None
    return dist.PrefixStore(f"shoal/{name}", store)


def _lead(store: dist.Store, place: Place, name: str, seconds: float) -> str:
    """Names the attempt, and answers each of the others' words: a rank 0 that is gone answers none."""
    store.set(ATTEMPT, name)
    if came := [f"shoal/{name}/came/{rank}" for rank in range(1, place.world)]:
        store.wait(came, timedelta(seconds=seconds))
        for word in store.multi_get(came):
            store.set(f"shoal/{name}/welcome/{word.decode()}", "")
    return name


def _follow(store: dist.Store, place: Place, word: str, seconds: float) -> str:
    """The name of the attempt whose rank 0 answers a word that was never said before."""
    told, pause, until = "", 0.01, time.monotonic() + seconds
    while time.monotonic() < until:
        name = store.get(ATTEMPT).decode()
        if name != told:
            store.set(f"shoal/{name}/came/{place.rank}", word)
            told = name
        elif store.check([f"shoal/{name}/welcome/{word}"]):
            return name
        else:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
    raise TimeoutError
