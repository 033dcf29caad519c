"""The pages of the docs that `placewise bench speed -o` writes."""

import os
from collections.abc import Iterator
from typing import Any

from placewise.experiments.bench import Rows
from placewise.report.markdown_tables import markdown_table

PACKAGE = "placewise.experiments.outside_models:"  # whose models go without it in a table

COMPARED = (  # columns of a way over another one
    ("placewise", "eager"),
    ("placewise-fused", "torch.compile"),
)

SPEED = """\
# Whole steps: placewise, eager PyTorch and torch.compile
    placewise bench speed --device {device} -o {page}

writes this page. Each cell is the median of {rounds} steps, and the peak memory. Ratios are of medians, and of peaks. Each
way has a process of its own, and they take turns ([more](../run.md#against-eager-pytorch-and-torchcompile)).

{machine}
"""

MOST_KERNELS = 8  # of a model that are shown

KERNELS = """\
# What placewise launches more or less often than eager PyTorch
    placewise bench speed --kernels --device gpu -o docs/results/kernels.md

writes this page. For each model it has all kernels of one step, and up to {most} of those that are launched more or less
often, with the milliseconds that they ran. {machine}

What was found so, and what was done about it:

| eager code | was recorded as | now |
|---|---|---|
| flash, memory-efficient or cuDNN's attention | products and a softmax | one op each way, with dropout too |
| `is_causal` in transformers | attention with a mask | as eager code: it may read what is the same in every step |
| attention over `[length, batch]` (layers of torch) | results in another order, 11 copies each | in the query's order |
| cuDNN's batch norm | the plain kernel | one op, with each device's kernel |
| `_foreach_` updates | eight ops for each parameter | rows of one call, in place where eager code is |
| cuDNN's recurrent layers | cells, which can be placed apart | the same; one op each way with `whole_layers=True` |
| dropout by one kernel | a draw, a division, a product | left: it would be another op than on a CPU |
| `nn.RMSNorm` by one kernel | six small ops | left |
"""


def speed_page(rows: Rows, device: str, rounds: int) -> Iterator[str]:
    """Yields the lines of the page with times and peaks: a line for each model, a column for each way."""
    yield SPEED.format(
        device=device,
        page="docs/results/speed.md" if device == "gpu" else "docs/results/speed-cpu.md",
        rounds=rounds,
        machine=machine_words(device),
    )
    ways = list(dict.fromkeys(row["way"] for row in rows))
    compared = [pair for pair in COMPARED if set(pair) <= set(ways)]
    by_model: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_model.setdefault(row["model"], {})[row["way"]] = row
    lines = [
        [
            f"`{model.removeprefix(PACKAGE)}`",
            *[_time_and_peak(found.get(way)) for way in ways],
            *[_ratio(found.get(first), found.get(second)) for first, second in compared],
        ]
        for model, found in by_model.items()
    ]
    yield from markdown_table(["step", *ways, *[f"{first} / {second}" for first, second in compared]], lines)


def _time_and_peak(row: dict[str, Any] | None) -> str:
    if row is None or isinstance(row["ms"], str):
        return "-"
    return f"{_short(row['ms'])} ms, {_short(row['peak MiB'] / 1024)} GiB"


def _ratio(row: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    """Returns the ratio of times, and of peaks."""
    if row is None or other is None or isinstance(row["ms"], str) or isinstance(other["ms"], str):
        return "-"
    peaks = f", {row['peak MiB'] / other['peak MiB']:.2f}" if other["peak MiB"] else ""
    return f"{row['ms'] / other['ms']:.2f}{peaks}"


def kernels_page(rows: Rows) -> Iterator[str]:
    """Yields the lines of the page with kernels: a table for each model."""
    yield KERNELS.format(machine=machine_words("gpu"), most=MOST_KERNELS)
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model][: MOST_KERNELS + 1]
        yield f"**`{model.removeprefix(PACKAGE)}`**"
        yield ""
        header = list(mine[0])[1:]
        yield from markdown_table(header, [[_cell(row[name]) for name in header] for row in mine])
        yield ""


def machine_words(device: str) -> str:
    """Returns what was measured on, as a sentence."""
    import torch

    if device == "gpu" and torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}."
    return f"A CPU of {len(os.sched_getaffinity(0))} cores, PyTorch {torch.__version__}."


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else _short(value)
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
