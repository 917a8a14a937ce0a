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
    """Sixteen ranks; pool.run(function, world, ...) takes as many of them as a test needs."""
    with Pool(16) as ranks:
        yield ranks
