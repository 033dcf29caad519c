"""Autocast on a GPU: the losses of placed steps against PyTorch's own autocast: `placewise bench autocast`."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from placewise.core.errors import InputError
from placewise.core.suggestions import did_you_mean
from placewise.experiments.bench import Benchmark, Findings, Rows, option

if TYPE_CHECKING:
    import numpy as np

    from placewise.core.arrays import Ints
    from placewise.core.cluster import Cluster
    from placewise.experiments.training_setups.training_setup import Setup


ALONE, TOGETHER = 1, 2  # devices of a placement


@dataclass(frozen=True)
class Autocast(Benchmark):
    """Losses with autocast in bfloat16, on a GPU and on a GPU with a CPU, compared with eager code."""

    names: tuple[str, ...] = option("names", "only these: llama, resnet50, vit", "MODEL", default=())
    steps: int = option("positive", "training steps", default=20)
    mixed_steps: int = option("count", "training steps where a GPU and a CPU work together; 0: leave them out", default=5)
    device: str = option(
        "choice", "cpu: a rehearsal without a GPU, small models on CPU devices", default="gpu", choices=("gpu", "cpu")
    )

    def run(self) -> Findings:
        """Trains each model eagerly and in each placement, and compares the losses step by step."""
        import torch

        from placewise.experiments.training_setups.agreement import DIFFERENT
        from placewise.experiments.training_setups.autocast_setups import autocast_setups
        from placewise.experiments.training_setups.torchvision_ops import declare_missing_ops

        if self.device == "gpu" and not torch.cuda.is_available():
            raise InputError("there is no GPU that PyTorch can use: --device cpu rehearses the same on CPU devices")
        setups, mixed = (autocast_setups(n, is_small=self.device == "cpu") for n in (self.steps, self.mixed_steps))
        for name in self.names:
            if name not in setups:
                raise InputError(f"there is no model {name!r}: {did_you_mean(name, list(setups))}")
        declare_missing_ops()
        rows: Rows = []
        is_complete = True
        try:
            for name in self.names or tuple(setups):
                rows += compare_losses(setups[name], self.device, ALONE)
                if self.mixed_steps:
                    rows += compare_losses(mixed[name], self.device, TOGETHER)
        except KeyboardInterrupt:
            is_complete = False
        found = self.findings(rows) if rows else Findings({self.name(): []}, "")
        bad = [f"{row['model']} ({row['placement']})" for row in rows if row["result"] == DIFFERENT]
        failure = f"these losses are not those of eager code: {', '.join(bad)}" if bad else ""
        return Findings(found.data, found.text, is_complete=is_complete, failure=failure)


def compare_losses(setup: "Setup", device: str, num_devices: int) -> Rows:
    """Returns a row for each placement on this many devices: a loss's largest difference, and what rounding makes of it."""
    from importlib.util import find_spec

    from placewise.experiments.training_setups.agreement import NOT_INSTALLED, measure_noise
    from placewise.experiments.training_setups.trajectories import train_eagerly, train_placed

    if find_spec(setup.library) is None:
        return [_row(setup.name, setup.library, NOT_INSTALLED)]
    where = "cuda:0" if device == "gpu" else "cpu"
    expected = train_eagerly(setup, where).values
    noise = measure_noise(lambda: train_eagerly(setup, where), expected)
    rows = []
    for placement, (kinds, choose) in _placements(device).items():
        if len(kinds) != num_devices:
            continue
        found = train_placed(setup, _cluster(kinds), choose).values
        rows.append(_compared(setup.name, placement, _losses(found), _losses(expected), noise))
    return rows


def _compared(
    model: str, placement: str, found: dict[str, float], expected: dict[str, float], noise: Mapping[str, float]
) -> dict[str, Any]:
    """Returns the row of a placement; noise adds up from step to step, so the largest so far counts."""
    from placewise.experiments.training_setups.agreement import DIFFERENT, EQUAL_BITS, EQUAL_TO_ROUNDING, MARGIN

    differences = [abs(found[name] - loss) for name, loss in expected.items()]
    least = [2**-23 * abs(loss) for loss in expected.values()]
    rounding = list(accumulate(map(max, (noise.get(name, 0.0) for name in expected), least), max))
    ratios = [difference / size for difference, size in zip(differences, rounding, strict=True)]
    is_rounding = all(ratio <= MARGIN for ratio in ratios)  # False for NaN
    result = EQUAL_BITS if found == expected else EQUAL_TO_ROUNDING if is_rounding else DIFFERENT
    losses = list(expected.values())
    return _row(model, placement, result, losses[0], losses[-1], max(differences), max(rounding), max(ratios))


def _row(
    model: str, placement: str, result: str, first: float = 0.0, last: float = 0.0, difference: float = 0.0,
    rounding: float = 0.0, ratio: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    losses = {"first loss": first, "last loss": last, "largest difference": difference}
    return {"model": model, "placement": placement, **losses, "rounding": rounding, "ratio": ratio, "result": result}


def _losses(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if name.startswith("loss of step")}


def _placements(device: str) -> dict[str, tuple[tuple[str, ...], Any]]:
    """Returns the kinds of devices and how groups are placed on them, by what is said about it in the table."""
    from placewise.experiments.training_setups.trajectories import at_random

    def in_two_parts(rng: "np.random.Generator", num_groups: int, num_devices: int) -> "Ints":
        import numpy as np

        return np.arange(num_groups) * num_devices // num_groups

    both = (device, "cpu")
    names = {"gpu": "a GPU and a CPU", "cpu": "two CPUs"}
    return {
        f"one {device.upper()}": ((device,), in_two_parts),
        f"{names[device]}, in two parts": (both, in_two_parts),
        f"{names[device]}, at random": (both, at_random),
    }


def _cluster(kinds: tuple[str, ...]) -> "Cluster":
    from placewise.core.cluster import Cluster, Device, Link

    names = [f"{kind}:{kinds[:i].count(kind)}" for i, kind in enumerate(kinds)]
    devices = tuple(Device(name, kind, 2**40, 1e12, 1e11) for name, kind in zip(names, kinds, strict=True))
    return Cluster("autocast", devices, tuple(Link(a, b, 1e10, 1e-5) for a in names for b in names if a != b))
