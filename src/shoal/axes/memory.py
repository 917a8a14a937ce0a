"""What a rank holds, by category, now and at most: bytes that axes/*/run.py reports and cost.py predicts. No torch."""

from collections import Counter

CATEGORIES = ("weights", "gradients", "optimizer", "gathered", "buckets")


class Memory:
    """Running totals. weights, gradients, optimizer: held between steps; gathered: whole units that stage 3 has put
    together for a while; buckets: whole gradients on their way to their shards.
    """

    def __init__(self) -> None:
        self.now: Counter[str] = Counter({category: 0 for category in CATEGORIES})
        self.peak: Counter[str] = Counter(self.now)
        self.peak_total = 0

    def take(self, category: str, size: int) -> None:
        """`size` more bytes are held."""
        assert category in CATEGORIES
        self.now[category] += size
        self.peak[category] = max(self.peak[category], self.now[category])
        self.peak_total = max(self.peak_total, self.now.total())

    def release(self, category: str, size: int) -> None:
        """`size` bytes fewer are held."""
        self.now[category] -= size
        assert self.now[category] >= 0, f"more {category} released than taken"
