"""Compares what several ranks hold, bit for bit, by 64-bit hashes: weights, states of the optimizer, buffers.

Replicas are equal because all begin alike and add the same gradients. A bit that flips in memory, a sum that came out
differently, a rank that went on from another file: nothing else would show them, since the loss goes on falling.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.comm.collectives import all_gather, all_reduce, broadcast
from shoal.plan.copies import Copy, copies_of, everyone
from shoal.spec.inventory import buffers
from shoal.train.optimizer import located
from shoal.train.summary import ReplicasDiffer
from shoal.train.trainer import Trainer

CHUNK = 1 << 20  # elements hashed at once, which bounds the memory that it takes
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # by bytes of an element
KINDS = {
    "weight": "weights",
    "master": "master weights",
    "moment1": "first moments",
    "moment2": "second moments",
    "buffer": "buffer",
}


@dataclass(frozen=True)
class Difference:
    """A copy that is not the same on all of `ranks`; apart: those that differ from the most of them, or all."""

    copy: Copy
    apart: tuple[int, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        what = f"{self.copy.name} ({KINDS[self.copy.kind]})"
        others = [rank for rank in self.ranks if rank not in self.apart]
        if others:
            return f"{what} on {_ranks(self.apart)} differs from that on {_ranks(others)}"
        return f"{what} differs between {_ranks(self.apart)}, of which none has the most on its side"


class Consistency:
    """The checks of a run, every train.check_every steps and at its end. Every rank makes one and calls the same.

    made: how many there were.
    """

    def __init__(self, trainer: Trainer):
        self.trainer, self.world, self.train = trainer, trainer.world, trainer.job.train
        self.made = 0
        self.agreed: int | None = None  # after how many steps all were last seen to be equal
        if self.train.check_every:
            copies = copies_of(trainer.job, self.world.rank)
            self.copies = [(self.world.group(axes), held) for axes, held in copies.items()]
            self.all = self.world.group(everyone(trainer.job))

    def due(self, step: int) -> bool:
        """Whether a check is wanted after `step` steps."""
        every = self.train.check_every
        return every > 0 and (step % every == 0 or step == self.train.steps)

    def check(self, step: int) -> None:
        """Compares what stands after `step` steps. Raises ReplicasDiffer, on every rank and with the same words."""
        with self.world.ledger.at(phase="check"):
            found = self._differences()
            seen = torch.tensor([self.world.rank if found else self.world.size], device=self.world.device)
            teller = int(all_reduce(seen, self.all, "min"))
        self.made += 1
        if teller < self.world.size:
            raise ReplicasDiffer(f"after {step} steps {self._told(found, teller)}")
        self.agreed = step

    @torch.no_grad()
    def _differences(self) -> list[Difference]:
        """Those that this rank can see."""
        held, found = self._held(), []
        for group, copies in self.copies:
            if not copies:
                continue
            own = torch.stack([hash_bits(_part(held, copy)).to(self.world.device) for copy in copies])
            hashes = all_gather(own[None], group).cpu().numpy()
            for place in np.flatnonzero((hashes != hashes[0]).any(0)):
                found.append(Difference(copies[place], minority(group.ranks, hashes[:, place].tolist()), group.ranks))
        return found

    def _held(self) -> dict[tuple[str, str], tuple[int, Tensor]]:
        """By kind and name: a flat view of what this rank holds, and which element of the flattened piece comes first."""
        states, optimizer = self.trainer.states, self.trainer.optimizer
        held: dict[tuple[str, str], tuple[int, Tensor]] = {}
        runs = (
            {"weight": weights, **kept} for (weights, _, _), kept in zip(optimizer.runs, optimizer.states, strict=True)
        )
        for span, kept in located(states.held(), runs):
            for kind, run in kept.items():
                held[kind, span.name] = span.first, run[span.start : span.stop]
        if self.trainer.job.layout.zero < 3:  # where the optimizer has a shard of weights that this rank has whole
            held |= {("weight", name): (0, weight.detach().view(-1)) for name, weight in states.weights()}
        named = dict(self.trainer.model.named_buffers())
        held |= {
            ("buffer", name): (0, named[name].view(-1)) for name in buffers(self.trainer.job.model) if name in named
        }
        return held

    def _told(self, found: Sequence[Difference], teller: int) -> str:
        """What rank `teller` found, in words, on every rank."""
        said = bytearray(self._words(found).encode()) if self.world.rank == teller else bytearray()
        with self.world.ledger.off():
            length = broadcast(torch.tensor([len(said)], device=self.world.device), self.all, teller)
            text = torch.zeros(int(length), dtype=torch.uint8, device=self.world.device)
            if said:
                text.copy_(torch.frombuffer(said, dtype=torch.uint8))
            broadcast(text, self.all, teller)
        return bytes(text.tolist()).decode()

    def _words(self, found: Sequence[Difference]) -> str:
        others = {difference.copy.name for difference in found} - {found[0].copy.name}
        more = f" (and {len(others)} more parameters)" if others else ""
        before = "this run had not compared them before"
        if self.agreed is not None:
            before = f"all were equal after {self.agreed} steps, so a checkpoint up to there would do"
        return f"{found[0]}{more}; {before}"


@torch.no_grad()
def hash_bits(values: Tensor) -> Tensor:
    """64 bits, int64 (), that stand for the bits of `values`, flat: any one element that changes, changes them.

    The sum, modulo 2^64, of a bijection of each element's bits plus its place times an odd number: SplitMix64 (Steele, Lea
    and Flood 2014). What is different in several elements, or swapped, is missed once in 2^64.
    """
    words = values.view(WORDS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    places = torch.arange(min(CHUNK, len(words)), device=values.device) * _signed(0x9E3779B97F4A7C15)
    for start in range(0, len(words), CHUNK):
        chunk = words[start : start + CHUNK]
        mixed = chunk + places[: len(chunk)]
        mixed += _signed(start * 0x9E3779B97F4A7C15)
        mixed ^= _shifted(mixed, 30)
        mixed *= _signed(0xBF58476D1CE4E5B9)
        mixed ^= _shifted(mixed, 27)
        mixed *= _signed(0x94D049BB133111EB)
        mixed ^= _shifted(mixed, 31)
        total += mixed.sum()
    return total


def minority(ranks: Sequence[int], hashes: Sequence[int]) -> tuple[int, ...]:
    """The ranks whose hash is not the one that most have; all, where no hash is alone in being the most common."""
    (most, count), *others = Counter(hashes).most_common(2)
    tie = bool(others) and others[0][1] == count
    return tuple(rank for rank, hashed in zip(ranks, hashes, strict=True) if tie or hashed != most)


def _part(held: dict[tuple[str, str], tuple[int, Tensor]], copy: Copy) -> Tensor:
    first, values = held[copy.kind, copy.name]
    return values[copy.start - first : copy.stop - first]


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shifted right, with zeros from the left, which int64 does not do by itself."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """A number modulo 2^64, as int64 writes it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _ranks(ranks: Sequence[int]) -> str:
    """In words, the first few."""
    first = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        return f"ranks {', '.join(first)} and {len(ranks) - 8:,} more"
    return f"rank {first[0]}" if len(first) == 1 else f"ranks {', '.join(first[:-1])} and {first[-1]}"
