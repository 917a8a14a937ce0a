"""What every test may use: one pool of warm ranks for the whole session."""

from collections.abc import Iterator

import pytest

from shoal.launch.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Nine ranks (a 3 x 3 grid); pool.run(function, world, ...) takes as many of them as a test needs."""
    with Pool(9) as ranks:
        yield ranks
