"""Links: a line through the times of copies."""

import pytest

from placewise.measure.links import fit_line


def test_a_line_is_fitted_through_copies() -> None:
    """10 µs and 1 GB/s: exactly on the line; a line that begins below zero has no latency."""
    sizes = (1000, 10_000, 1_000_000)
    latency, bandwidth = fit_line(sizes, [1e-5 + size / 1e9 for size in sizes])
    assert latency == pytest.approx(1e-5)
    assert bandwidth == pytest.approx(1e9)
    assert fit_line(sizes, [1e-7, 1e-5, 1e-2])[0] == 0.0
    assert fit_line(sizes, [2e-5, 2e-5, 1e-5]) == pytest.approx((1e-5, 1e11))
