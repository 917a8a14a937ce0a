"""What every test may use: one pool of warm ranks for the whole session."""

from collections.abc import Iterator

import pytest

from shoal.launch.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight ranks; pool.run(function, world, ...) takes as many of them as a test needs."""
    with Pool(8) as ranks:
        yield ranks
