"""What every test may use: one pool of warm ranks for the whole session."""

from collections.abc import Iterator

import hypothesis
import pytest

from shoal.launch.pool import Pool

# A slow machine is no failure.
hypothesis.settings.register_profile("shoal", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("shoal")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Nine ranks (a 3 x 3 grid); pool.run(function, world, ...) takes as many of them as a test needs."""
    with Pool(9) as ranks:
        yield ranks
