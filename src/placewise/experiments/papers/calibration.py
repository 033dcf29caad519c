"""The papers' machines from their own single-device columns, in the open: `placewise reproduce calibrate`.

A step on one device takes the sum of its ops' times, so a paper's single-GPU and CPU-only columns say something about
that device's reachable flops, memory bandwidth and overhead. Nothing is fitted to any other column, and the links can't be
fitted at all: a step on one device copies nothing.
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

PULL = 0.1  # how strongly a figure is held to the preset's: what the columns do not say stays as it was

LEAST = 1e-3  # of the preset's figure

OUTLIER = 0.1  # a distance from which on a model counts by its distance, not by its square: it may be of another size

MOST_OVERHEAD = 100.0  # times the preset's overhead


@dataclass(frozen=True)
class Figures:
    """What a device of a kind reaches."""

    flops: float
    bytes_per_second: float
    overhead_seconds: float


@dataclass(frozen=True)
class Fit:
    """A figure of a paper, and what the preset and the fitted device say."""

    kind: str  # of the device
    model: str
    reported_seconds: float
    preset_seconds: float
    fitted_seconds: float


@dataclass(frozen=True)
class Calibration:
    """Figures by kind of device, and how well they fit."""

    paper: str
    presets: Mapping[str, Figures]
    figures: Mapping[str, Figures]
    fits: tuple[Fit, ...]


@dataclass(frozen=True)
class StepWork:
    """What a step asks of a device."""

    model: str
    flops: Floats  # [ops that do something]
    bytes_moved: Floats  # [ops that do something]
    reported_seconds: float

    def seconds(self, figures: Figures) -> float:
        """Returns how long a device takes, one op after the other."""
        times = np.maximum(self.flops / figures.flops, self.bytes_moved / figures.bytes_per_second)
        return float(times.sum() + len(times) * figures.overhead_seconds)


def calibrate(paper: Paper) -> Calibration:
    """Returns the figures with which a paper's single-device columns come out best; the same on every machine."""
    if not paper.fitted:
        raise InputError(f"{paper.name}: has no column of a single GPU or of the CPU alone to calibrate with")
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
    """Returns what the models ask for that a column has seconds of; several rows of one model count as their mean."""
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
    """Returns the figures for which the logarithms of the models' times are nearest to the reported ones', rounded.

    Neither flops nor bandwidth can pass the data sheet's. Where the reported times leave a figure open, it is the preset's.
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
    """Returns three digits, so that machines that round differently agree."""
    return float(f"{figure:.2e}")


def calibrated(cluster: Cluster, calibration: Calibration) -> Cluster:
    """Returns the cluster with fitted devices; links and memory stay as they are."""
    devices = tuple(
        replace(device, **asdict(calibration.figures[device.kind])) if device.kind in calibration.figures else device
        for device in cluster.devices
    )
    return replace(cluster, name=f"{cluster.name}, as {calibration.paper} has it", devices=devices)
