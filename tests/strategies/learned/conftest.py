"""What all tests of learned strategies share."""

from collections.abc import Iterator

import pytest

from placewise.strategies.learned import training


@pytest.fixture(autouse=True)
def small_sums_on_one_thread() -> Iterator[None]:
    """Small networks are faster on one thread, and much faster on a busy machine."""
    with training.one_thread():
        yield
