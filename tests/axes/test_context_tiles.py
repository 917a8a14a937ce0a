"""Tiles against dense masks: every visible pair once, whatever the shares, windows and documents."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from shoal.axes.context import order, tiles
from shoal.axes.context.mask import hidden
from shoal.axes.context.tiles import Sight

SEQUENCE = 24


def documents_of(name):
    rng = np.random.default_rng(3)
    packed = np.sort(rng.integers(0, 4, (3, SEQUENCE)), 1)
    return {
        "none": None,
        "packed": packed,
        "alike": np.repeat(packed[:1], 3, 0),
        "scattered": rng.integers(0, 3, (3, SEQUENCE)),
    }[name]


def dense(queries, keys, causal, window, documents):
    back = queries[:, None] - keys[None]
    seen = (back >= 0 if causal else np.ones_like(back, bool)) & (np.abs(back) < (window or SEQUENCE))
    if documents is None:
        return np.repeat(seen[None], 3, 0)
    return seen[None] & (documents[:, queries][:, :, None] == documents[:, keys][:, None])


def counted(found, queries, keys):
    """How often each pair (3, queries, keys) is in a tile."""
    counts = np.zeros((3, len(queries), len(keys)), int)
    for tile in found:
        part = counts[tile.samples, tile.queries, tile.keys]
        if tile.seen == "some":
            part += ~hidden(tile, torch.device("cpu"))[:, 0].numpy()
        elif tile.seen == "causal":
            assert part.shape[1] == part.shape[2]
            part += np.tri(part.shape[1], dtype=int)
        else:
            part += 1
    return counts


@pytest.mark.parametrize("least", [1, 3, 128])
@pytest.mark.parametrize("kind", ["ring", "zigzag", "striped"])
@pytest.mark.parametrize("documents", ["none", "packed", "alike", "scattered"])
@pytest.mark.parametrize("causal", [True, False])
def test_every_visible_pair_is_in_one_tile(monkeypatch, least, kind, documents, causal):
    monkeypatch.setattr(tiles, "LEAST", least)
    monkeypatch.setattr(tiles, "MOST", 5)
    numbers = documents_of(documents)
    for window in (None, 1, 2, 5, 7, 30):
        sight = Sight(SEQUENCE, causal, window, numbers)
        for ranks in (1, 2, 3, 4):
            shares = [order.places(kind, SEQUENCE, ranks, rank) for rank in range(ranks)]
            for queries in shares:
                for keys in shares:
                    expected = dense(queries, keys, causal, window, numbers)
                    found = sight.tiles(queries, keys)
                    np.testing.assert_array_equal(counted(found, queries, keys), expected)
                    if documents != "scattered":
                        assert expected.any() or not found, "nothing is computed where nothing is seen"


def shapes(kind, ranks, rank, owner, **sight):
    sequence = 1024 * ranks
    queries, keys = (order.places(kind, sequence, ranks, place) for place in (rank, owner))
    return [
        (t.seen, t.queries.stop - t.queries.start, t.keys.stop - t.keys.start)
        for t in Sight(sequence, **sight).tiles(queries, keys)
    ]


def test_causal_shares_need_no_mask():
    for kind in ("ring", "zigzag", "striped"):
        assert shapes(kind, 4, 2, 2) == [("causal", 1024, 1024)]
    assert shapes("ring", 4, 2, 1) == [("all", 1024, 1024)] and shapes("ring", 4, 1, 2) == []
    assert shapes("zigzag", 4, 2, 1) == [("all", 1024, 512)] and shapes("zigzag", 4, 1, 2) == [("all", 512, 1024)]
    assert shapes("striped", 4, 2, 1) == [("causal", 1024, 1024)]
    assert shapes("striped", 4, 1, 2) == [("causal", 1023, 1023)]  # a stripe's own place is not before it


def test_packed_documents_need_no_mask_where_they_are_long():
    documents = np.repeat([0, 1, 2], [1000, 400, 648])[None]
    found = shapes("ring", 2, 0, 0, documents=documents), shapes("ring", 2, 1, 0, documents=documents)
    # the first share ends with 24 tokens of the second document, of which the second share sees 376 rows of
    assert found == ([("causal", 1000, 1000), ("causal", 24, 24)], [("all", 376, 24)])


def test_masks_are_as_small_as_the_window():
    found = shapes("ring", 2, 1, 1, window=200)
    assert found[0] == ("causal", 200, 200) and {name for name, _, _ in found[1:]} == {"some"}
    assert max(rows * keys for _, rows, keys in found[1:]) <= 200 * 400
    assert sum(rows for _, rows, _ in found) == 1024


def test_tiles_never_load_torch():
    program = "import sys, shoal.axes.context.tiles, shoal.axes.context.card; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
