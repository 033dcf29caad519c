"""Devices cut into slices."""

from dataclasses import replace

import numpy as np
import pytest

from placewise.core.cluster import Cluster, Device, Link
from placewise.core.errors import ClusterError
from placewise.machines.presets import preset
from placewise.machines.slices import format_cut, parse_cut, slice_devices


def test_a_gpu_in_four_slices() -> None:
    whole = preset("2xK80")
    cut = slice_devices(whole, {"gpu:0": 4})
    assert cut.device_names == ("gpu:0", "gpu:1", "gpu:2", "gpu:3", "gpu:4", "cpu:0")
    assert cut.devices[3].memory_bytes == whole.devices[0].memory_bytes // 4
    assert cut.devices[4] == replace(whole.devices[1], name="gpu:4")
    assert cut.bytes_per_second[0, 1] == whole.devices[0].bytes_per_second / 2
    assert cut.bytes_per_second[2, 5] == whole.bytes_per_second[0, 2]
    assert cut.channels[0, 5] == cut.channels[3, 5] != cut.channels[4, 5], "slices share their GPU's channels"
    assert cut.channels[0, 1] != cut.channels[1, 0]


def test_a_slice_has_its_share_of_the_speed_in_every_type() -> None:
    """A quarter of 10 flop/s in float32 and of 80 in float16 is 2.5 and 20."""
    whole = Cluster("", (Device("gpu:0", "gpu", 8, 10.0, 4.0, flops_by_type=(("float16", 80.0),)),), ())
    cut = slice_devices(whole, {"gpu:0": 4})
    assert {(device.flops, device.flops_by_type) for device in cut.devices} == {(2.5, (("float16", 20.0),))}


def test_a_host_that_waits_for_a_device_waits_for_its_slices() -> None:
    """From the CPU to the GPU's slices as from the CPU to the GPU; not between two slices."""
    devices = (Device("gpu:0", "gpu", 8, 1.0, 1.0), Device("cpu:0", "cpu", 8, 1.0, 1.0))
    links = (Link("cpu:0", "gpu:0", 1.0, 0.0, host_waits=True), Link("gpu:0", "cpu:0", 1.0, 0.0))
    cut = slice_devices(Cluster("", devices, links), {"gpu:0": 2})
    assert np.argwhere(cut.host_waits).tolist() == [[2, 0], [2, 1]]


def test_a_device_that_is_not_there_is_not_cut() -> None:
    with pytest.raises(ClusterError, match="there is no device 'gpu:9' to cut"):
        slice_devices(preset("2xK80"), {"gpu:9": 2})


def test_a_gpu_in_two_unequal_slices() -> None:
    """32 and 64 multiprocessors are a third and two thirds of what is used."""
    whole = Cluster("", (Device("gpu:0", "gpu", 9, 30.0, 3.0),), ())
    cut = slice_devices(whole, {"gpu:0": (32, 64)})
    assert [(device.memory_bytes, device.flops, device.bytes_per_second) for device in cut.devices] == [
        (3, 10.0, 1.0),
        (6, 20.0, 2.0),
    ]


@pytest.mark.parametrize(("text", "cut"), [("4", 4), ("32+64", (32, 64)), ("8+8+16", (8, 8, 16))])
def test_cuts_as_text(text: str, cut: int | tuple[int, ...]) -> None:
    assert parse_cut(text) == cut
    assert str(format_cut(cut)) == text


@pytest.mark.parametrize("text", ["", "0", "32+", "+", "32+0", "-1", "4.5", "1000", "32+64k", "\u0664"])
def test_what_is_not_a_cut_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="as in 4 or 32\\+64"):
        parse_cut(text)
