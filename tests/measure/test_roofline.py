"""The roofline: what the times of a matrix product and of additions say about a device."""

import pytest
from measuring import ScriptedClock

from placewise.measure.roofline import measure_roofline
from placewise.run.devices import RealDevice


def test_the_roofline_of_a_cpu() -> None:
    """A product of 1,024 rows has 2 * 1024^3 flops, an addition of 2^24 floats reads and writes 2^27 bytes; all take 2 s."""
    flops, bytes_per_second, overhead_seconds = measure_roofline(RealDevice("cpu:0", "cpu", "cpu"), ScriptedClock([2.0]))
    assert flops == pytest.approx(2**30)
    assert bytes_per_second == pytest.approx(2**26)
    assert overhead_seconds == 2.0
