"""The roofline: what the times of a matrix product and of additions say about a device."""

import pytest
from measuring import ScriptedClock

from placewise.measure.roofline import measure_roofline
from placewise.run.devices import RealDevice


def test_the_roofline_of_a_cpu() -> None:
    """A product of 1,024 rows has 2 * 1024^3 flops, an addition of 2^24 floats reads and writes 2^27 bytes; all take 2 s."""
    found = measure_roofline(RealDevice("cpu:0", "cpu", "cpu"), ScriptedClock([2.0]))
    assert found.flops == pytest.approx(2**30)
    assert dict(found.flops_by_type) == pytest.approx(dict.fromkeys(("bfloat16", "float16", "float64"), 2**30))
    assert found.bytes_per_second == pytest.approx(2**26)
    assert found.overhead_seconds == 2.0


def test_each_type_has_the_time_of_its_own_product() -> None:
    """A call takes 1 s, which is too long to repeat it after the warm-up; the product in float16 takes 4 s, say."""
    clock = ScriptedClock([1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 1.0])  # float32, bfloat16, float16, and what comes after them
    found = measure_roofline(RealDevice("cpu:0", "cpu", "cpu"), clock)
    assert (found.flops, found.flops_by_type[:2]) == (2**31, (("bfloat16", 2**30), ("float16", 2**29)))
