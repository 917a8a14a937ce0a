"""Dropout whose mask is a function of global numbers, so that every layout drops the same elements.

An element is kept or dropped by a hash of (seed, step, site, global sample, position, feature). A rank that holds a
part of the batch, the sequence or the features computes exactly its part of the whole mask, and sends nothing for it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

Noise = tuple[Tensor, Tensor]  # keys of rows (..., b, s) and of features (h,), int64

# SplitMix64 (Steele et al. 2014): its increment and its two multipliers, as signed numbers since torch has int64 only.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


@dataclass(frozen=True)
class DropoutKey:
    """What selects a step's masks on one rank.

    samples: global numbers of the samples here, int64 (b,); positions: places in the sample of the tokens here, int64
    (s,); first_feature: the global number of the first feature here.
    """

    seed: int
    step: int
    samples: Tensor
    positions: Tensor
    first_feature: int = 0

    def noise(self, sites: int, width: int) -> Noise:
        """Keys of the sites 0 to sites - 1 over `width` features: rows (sites, b, s) and features (width,)."""
        device = self.samples.device
        key = torch.tensor((self.seed + 2**63) % 2**64 - 2**63, device=device)
        key = _absorb(_mixed(key + _STEP), torch.tensor(self.step, device=device))
        key = _absorb(key, torch.arange(sites, device=device)[:, None, None])
        key = _absorb(key, self.samples[:, None])
        rows = _absorb(key, self.positions)
        features = torch.arange(self.first_feature, self.first_feature + width, device=device)
        return rows, _mixed((features + 1) * _STEP)


def dropped(x: Tensor, rate: float, rows: Tensor, features: Tensor) -> Tensor:
    """x (b, s, h) with about a `rate`-th of its elements zero and the others divided by 1 - rate.

    rows (b, s), features (h,): keys of one site from DropoutKey.noise.
    """
    # Two rounds of multiplication suffice here, as both keys are mixed already; only the highest bits are compared.
    bits = (rows[..., None] ^ features) * _FIRST
    bits = (bits ^ _shifted(bits, 32)) * _SECOND
    keep = bits >= int(rate * 2**64) - 2**63
    return torch.where(keep, x / (1 - rate), 0)


def _absorb(key: Tensor, number: Tensor) -> Tensor:
    """A key that depends on `key` and `number`; different numbers give different keys."""
    return _mixed((key + _STEP) ^ number)


def _mixed(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of 64 bits in which every input bit changes about half the output bits."""
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Logical shift to the right; torch's own copies the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
