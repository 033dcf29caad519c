"""What a step launches on its device, by name: kernels on a GPU, ATen's ops on a CPU; and where two ways differ."""

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from placewise.experiments.bench import Rows

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # the profiler's words for what a GPU runs

VIEWS = (
    "view|_unsafe_view|reshape|_reshape_alias|t|transpose|permute|expand|detach|alias|select|slice|narrow|unbind|split.*|"
    "chunk|squeeze|unsqueeze|unfold|flatten|as_strided_?|resize_|resize_as_"
)

PREPARES = re.compile(rf"aten::(empty.*|new_empty.*|to|lift_fresh|item|resolve_.*|_nnpack_available|{VIEWS})")  # no numbers

NOISE = re.compile(r"^void |at::native::|\(anonymous namespace\)::|at::")

LONGEST = 90  # characters of a kernel's name that are shown


class Launched(NamedTuple):
    """How often a kernel was launched in a step, and for how long all of its launches ran."""

    launches: int
    seconds: float


Kernels = Mapping[str, Launched]  # by name


def kernels_of(run: Callable[[], Any], synchronize: Callable[[], None], device: str) -> dict[str, Launched]:
    """Runs a step under PyTorch's profiler, and returns what it launches on its device, by name."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device == "gpu"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    all_threads = _ExperimentalConfig(profile_all_threads=True)  # a CPU device has its own
    with profile(activities=activities, experimental_config=all_threads) as profiler:
        run()
        synchronize()
    found: dict[str, Launched] = {}
    for name, seconds in _on_gpu(profiler) if on_gpu else _on_cpu(profiler):
        count, before = found.get(name, (0, 0.0))
        found[name] = Launched(count + 1, before + seconds)
    return found


def _on_gpu(profiler: Any) -> list[tuple[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return [(NOISE.sub("", event["name"]), event["dur"] / 1e6) for event in events if event.get("cat") in ON_GPU]


def _on_cpu(profiler: Any) -> list[tuple[str, float]]:
    """Returns the ops that are made of no others; one that only prepares memory, or a view, does not count."""

    def is_op(event: Any) -> bool:
        return event.name.startswith("aten::") and PREPARES.fullmatch(event.name) is None

    events = [event for event in profiler.events() if is_op(event) and not any(map(is_op, event.cpu_children))]
    return [(event.name, event.cpu_time_total / 1e6) for event in events]


def differences(model: str, first: Kernels, second: Kernels, names: tuple[str, str]) -> Rows:
    """Returns a row for all kernels together, and one for each that the second way launches more or less often.

    Those whose times differ most come first.
    """
    none = Launched(0, 0.0)

    def row(label: str, pair: tuple[Launched, Launched]) -> dict[str, Any]:
        counts = {f"{name}: launches": launched.launches for name, launched in zip(names, pair, strict=True)}
        return {"model": model, "kernel": label} | counts | {
            f"{name}: ms": launched.seconds * 1e3 for name, launched in zip(names, pair, strict=True)
        }  # fmt: skip

    pairs = {name: (first.get(name, none), second.get(name, none)) for name in (*first, *second)}
    total = tuple(
        Launched(sum(k.launches for k in way.values()), sum(k.seconds for k in way.values())) for way in (first, second)
    )
    found = [(name, pair) for name, pair in pairs.items() if pair[0].launches != pair[1].launches]
    found.sort(key=lambda entry: (-abs(entry[1][0].seconds - entry[1][1].seconds), entry[0]))
    return [row("all", (total[0], total[1])), *[row(name[:LONGEST], pair) for name, pair in found]]
