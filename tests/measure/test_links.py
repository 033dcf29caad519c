"""Links: a line through the times of copies."""

from types import SimpleNamespace

import pytest

from placewise.measure import links
from placewise.measure.links import fit_line, measure_links
from placewise.run.devices import RealDevice


def test_the_host_waits_for_what_a_cpu_device_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it launches the copy to a GPU; a copy between GPUs, or to a CPU device, holds nobody up."""
    monkeypatch.setattr(links, "instrument_of", lambda device: SimpleNamespace(copy_seconds=lambda *ends: {1: 1.0, 9: 2.0}))
    devices = [RealDevice("gpu:0", "gpu", "cuda:0", True), RealDevice("gpu:1", "gpu", "cuda:1", True)]
    found = measure_links([*devices, RealDevice("cpu:0", "cpu", "cpu")])
    assert {(link.source, link.target) for link in found if link.host_waits} == {("cpu:0", "gpu:0"), ("cpu:0", "gpu:1")}


def test_a_line_is_fitted_through_copies() -> None:
    """10 µs and 1 GB/s: exactly on the line; a line that begins below zero has no latency."""
    sizes = (1000, 10_000, 1_000_000)
    latency, bandwidth = fit_line(sizes, [1e-5 + size / 1e9 for size in sizes])
    assert latency == pytest.approx(1e-5)
    assert bandwidth == pytest.approx(1e9)
    assert fit_line(sizes, [1e-7, 1e-5, 1e-2])[0] == 0.0
    assert fit_line(sizes, [2e-5, 2e-5, 1e-5]) == pytest.approx((1e-5, 1e11))
