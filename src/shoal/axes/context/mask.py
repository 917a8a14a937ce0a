"""The mask of a tile, on the device that computes it."""

import torch
from torch import Tensor

from shoal.axes.context.tiles import Tile


def hidden(tile: Tile, device: torch.device) -> Tensor:
    """Which pairs of a tile that sees "some" must not count: bool (1 or samples, 1, queries, keys)."""
    assert tile.low is not None and tile.high is not None
    low, high = torch.from_numpy(tile.low).to(device)[:, None], torch.from_numpy(tile.high).to(device)[:, None]
    key = torch.arange(tile.keys.stop - tile.keys.start, device=device)
    unseen = ((key < low) | (key >= high))[None, None]
    if tile.documents is not None:
        queries, keys = (torch.from_numpy(numbers).to(device) for numbers in tile.documents)
        unseen = unseen | (queries[:, None, :, None] != keys[:, None, None, :])
    return unseen
