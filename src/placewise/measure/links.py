"""Latency and bandwidth of the links between devices, measured by copies of several sizes."""

from collections.abc import Sequence

import numpy as np

from placewise.core.arrays import Floats
from placewise.core.cluster import Link
from placewise.measure.instruments import instrument_of, speed_key
from placewise.run.devices import RealDevice


def measure_links(devices: Sequence[RealDevice]) -> tuple[Link, ...]:
    """Returns the link of every ordered pair of devices; pairs of equally fast devices are measured once."""
    known: dict[tuple[object, object], tuple[float, float]] = {}
    links = []
    for source in devices:
        for target in devices:
            if source.name == target.name:
                continue
            pair = (speed_key(source), speed_key(target))
            if pair not in known:
                instrument = instrument_of(target if target.launches_from_host else source)
                seconds = instrument.copy_seconds(source, target)
                known[pair] = fit_line(list(seconds), list(seconds.values()))
            latency_seconds, bytes_per_second = known[pair]
            host_waits = target.launches_from_host and not source.launches_from_host  # for what a CPU device makes
            links.append(Link(source.name, target.name, bytes_per_second, latency_seconds, host_waits=host_waits))
    return tuple(links)


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Returns (latency seconds, bytes per second) of the line with the least squares of relative errors.

    If the line starts below zero, the latency is 0; if it does not rise, the largest copy gives the bandwidth.
    """
    times: Floats = np.asarray(seconds, np.float64)
    design = np.stack([np.ones(len(sizes)), np.asarray(sizes, np.float64)], axis=1) / times[:, None]
    latency, slope = np.linalg.lstsq(design, np.ones(len(sizes)), rcond=None)[0].tolist()
    if slope <= 0:
        return float(times.min()), max(sizes) / float(times[-1])
    return max(latency, 0.0), 1.0 / slope
