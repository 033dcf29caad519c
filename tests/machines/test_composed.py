"""Composed cluster names: what they mean, and what is wrong with others."""

import numpy as np
import pytest

from placewise.core.cluster import Cluster
from placewise.core.errors import ClusterError
from placewise.machines.composed import CATALOGUE, compose
from placewise.machines.presets import LINK_FRACTION, PCIE_4_X8, preset


def test_two_hosts_by_hand() -> None:
    """Six devices on two hosts; 10 Gbit/s are 1.25 GB/s, of which 0.9 are reached; a copy needs both cards."""
    cluster = Cluster.load("2x(4090+3060)@10GbE")
    assert cluster.device_names == ("a/gpu:0", "a/gpu:1", "a/cpu:0", "b/gpu:0", "b/gpu:1", "b/cpu:0")
    assert cluster.host_names == ("a", "b")
    assert cluster.hosts.tolist() == [0, 0, 0, 1, 1, 1]
    assert cluster.bytes_per_second[0, 3] == pytest.approx(1.125e9)
    assert cluster.latency_seconds[0, 3] == pytest.approx(7e-5)
    assert cluster.latency_seconds[2, 5] == pytest.approx(5e-5)
    assert cluster.link(0, 3).channels == ("a sends", "b receives")
    assert cluster.bytes_per_second[0, 2] == pytest.approx(PCIE_4_X8 * LINK_FRACTION)


def test_a_fast_network_is_no_faster_than_the_way_to_the_card() -> None:
    """From a CPU to the other host's GPU, 8 lanes of PCIe 4 are slower than 400 Gbit/s; both ways are alike."""
    rates = Cluster.load("2x(4090)@400GbE").bytes_per_second
    assert rates[1, 2] == rates[2, 1] == pytest.approx(rates[0, 1])
    assert rates[1, 3] == pytest.approx(400e9 / 8 * 0.9)


def test_a_host_alone_is_the_preset_of_the_same_parts() -> None:
    """Speeds and links of `4090+3060`; NVLink only where it is asked for."""
    alone, known = compose("4090+3060"), preset("4090+3060")
    assert np.array_equal(alone.bytes_per_second, known.bytes_per_second)
    assert alone.devices == known.devices
    with_nvlink, without = compose("4xA100-nvlink"), compose("4xA100")
    assert with_nvlink.bytes_per_second[0, 1] > 5 * without.bytes_per_second[0, 1]
    assert np.array_equal(
        with_nvlink.bytes_per_second, preset("8xA100-nvlink").bytes_per_second[[0, 1, 2, 3, 8]][:, [0, 1, 2, 3, 8]]
    )


def test_unequal_hosts_and_every_gpu_of_the_catalogue() -> None:
    assert compose("(4090)+2x(cpu)@100GbE").device_names == ("a/gpu:0", "a/cpu:0", "b/cpu:0", "c/cpu:0")
    for key in CATALOGUE:
        assert Cluster.load(f"{key}+3060").num_devices == 3


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("4091+3060", "there is no GPU '4091' in the catalogue: did you mean '4090'?"),
        ("2x(4090+3060)", r"several hosts need a network: 2x\(4090\+3060\)@10GbE"),
        ("2x(4090)@10", "the network must be like 10GbE, got '10'"),
        ("2x(4090)@0GbE", "the network must be like 10GbE, got '0GbE'"),
        ("4090@10GbE", r"hosts, which stand in parentheses: 2x\(4090\)@10GbE"),
        ("2x(4090", "expected hosts like"),
        ("2x(4090)(3060)@1GbE", "expected '\\+' and another host"),
        ("2x(4090)+@1GbE", "expected '\\+' and another host"),
        ("4090++3060", "expected a GPU like 4090"),
        ("2x()@1GbE", "expected a GPU like 4090"),
        ("0x4090+3060", "must be from 1 to 512, got 0"),
        ("999x4090+3060", "at most 512 devices"),
        ("300x(2x4090)@1GbE", "at most 512 devices"),
        ("99999999999x4090+3060", "must be from 1 to 512"),
        ("2x4090-nvlink", "'2x4090-nvlink' can't have NVLink: 4090 has none"),
        ("A100-nvlink+4090", "it links at least two GPUs"),
        ("2x((4090))@1GbE", "expected"),
    ],
)
def test_wrong_names(name: str, rule: str) -> None:
    with pytest.raises(ClusterError, match=rule):
        Cluster.load(name)
