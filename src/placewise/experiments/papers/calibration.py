"""The papers' machines, fitted to their single-device columns: `placewise reproduce calibrate`.

A step on one device takes the sum of its ops' times, so a paper's single-GPU and CPU-only columns depend on that device's
reachable flops, memory bandwidth and overhead. Nothing is fitted to any other column. Links can't be fitted at all: a step
on one device copies nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from placewise.core.arrays import Floats
from placewise.core.cluster import Cluster, Device
from placewise.core.errors import InputError
from placewise.experiments.papers.reported_results import Paper
from placewise.machines.presets import CPU_FLOPS_FRACTION, GPU_FLOPS_FRACTION, MEMORY_FRACTION
from placewise.models import load_graph

PULL = 0.1  # weight of a figure's distance from the preset's: what the columns don't determine stays as it is

LEAST = 1e-3  # times the preset's figure

OUTLIER = 0.1  # distance beyond which a model counts linearly, not squared: its size may differ from the paper's

MOST_OVERHEAD = 100.0  # times the preset's overhead


@dataclass(frozen=True)
class Figures:
    """What a kind of device reaches."""

    flops: float
    bytes_per_second: float
    overhead_seconds: float


@dataclass(frozen=True)
class Fit:
    """A time that a paper reports, and those of the preset and of the fitted device."""

    kind: str  # of the device
    model: str
    reported_seconds: float
    preset_seconds: float
    fitted_seconds: float


@dataclass(frozen=True)
class Calibration:
    """Fitted figures by kind of device, and how well they fit."""

    paper: str
    presets: Mapping[str, Figures]
    figures: Mapping[str, Figures]
    fits: tuple[Fit, ...]


@dataclass(frozen=True)
class StepWork:
    """The work of a step on one device."""

    model: str
    flops: Floats  # [ops that do work]
    bytes_moved: Floats  # [ops that do work]
    reported_seconds: float

    def seconds(self, figures: Figures) -> float:
        """Returns how long a device takes for all ops, one after the other."""
        times = np.maximum(self.flops / figures.flops, self.bytes_moved / figures.bytes_per_second)
        return float(times.sum() + len(times) * figures.overhead_seconds)


def calibrate(paper: Paper) -> Calibration:
    """Returns the figures that fit a paper's single-device columns best; the same on every computer."""
    if not paper.fitted:
        raise InputError(f"{paper.name}: has no single-GPU or CPU-only column to calibrate with")
    presets: dict[str, Figures] = {}
    figures: dict[str, Figures] = {}
    fits: list[Fit] = []
    for kind, column in paper.fitted.items():
        works = works_of(paper, column)
        device = next(device for device in Cluster.load(paper.rows[0].cluster).devices if device.kind == kind)
        presets[kind] = Figures(device.flops, device.bytes_per_second, device.overhead_seconds)
        figures[kind] = fit_device(works, device)
        fits += [
            Fit(kind, work.model, work.reported_seconds, work.seconds(presets[kind]), work.seconds(figures[kind]))
            for work in works
        ]
    return Calibration(paper.name, presets, figures, tuple(fits))


def works_of(paper: Paper, column: str) -> list[StepWork]:
    """Returns the work of each model in a column; if a model has several rows, their mean is what was reported."""
    reported: dict[str, list[float]] = {}
    for row in paper.rows:
        if (seconds := row.reported.get(column)) is not None:
            reported.setdefault(row.model, []).append(seconds)
    works = []
    for model, times in reported.items():
        ops = load_graph(model).ops
        works_at = (ops.flops > 0) | (ops.bytes_moved > 0)  # a view takes no time
        works.append(StepWork(model, ops.flops[works_at], ops.bytes_moved[works_at], sum(times) / len(times)))
    return works


def fit_device(works: Sequence[StepWork], device: Device) -> Figures:
    """Returns the figures that bring the logarithms of the models' times closest to those of the reported times, rounded.

    Neither flops nor bandwidth can exceed the data sheet's. A figure that the times don't determine stays the preset's.
    """
    from scipy.optimize import least_squares

    start = np.array([device.flops, device.bytes_per_second, device.overhead_seconds])

    def residuals(logs: Floats) -> Floats:
        figures = Figures(*(start * np.exp(logs)).tolist())
        misses = [np.log(work.seconds(figures) / work.reported_seconds) for work in works]
        return np.array([*misses, *(PULL * logs)])

    peak = GPU_FLOPS_FRACTION if device.kind == "gpu" else CPU_FLOPS_FRACTION
    upper = np.log([1 / peak, 1 / MEMORY_FRACTION, MOST_OVERHEAD])
    bounds = (np.full(3, np.log(LEAST)), upper)
    solution = least_squares(residuals, np.zeros(3), bounds=bounds, loss="soft_l1", f_scale=OUTLIER)
    return Figures(*(_rounded(figure) for figure in (start * np.exp(solution.x)).tolist()))


def _rounded(figure: float) -> float:
    """Returns a figure with three digits: computers that round differently agree on these."""
    return float(f"{figure:.2e}")


def calibrated(cluster: Cluster, calibration: Calibration) -> Cluster:
    """Returns the cluster with fitted devices; links and memory stay the same."""
    devices = tuple(
        replace(device, **asdict(calibration.figures[device.kind])) if device.kind in calibration.figures else device
        for device in cluster.devices
    )
    name = f"{cluster.name}, as {calibration.paper} has it"  # run files hold it: with another name they would not resume
    return replace(cluster, name=name, devices=devices)
