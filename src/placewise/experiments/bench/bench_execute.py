"""What two CPU devices gain, and what a launch costs the host: `placewise bench execute`."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from placewise.experiments.bench import Benchmark, Findings, Rows

if TYPE_CHECKING:
    import torch

    from placewise.core.arrays import Ints
    from placewise.core.cluster import Cluster
    from placewise.core.problem import Problem
    from placewise.graph_capture.capture import CapturedStep
    from placewise.graph_capture.program import Program
    from placewise.run.step.train_step import TrainStep

LAYERS, WIDTH, ROWS = 4, 512, 512  # of a branch: matrix products of a few milliseconds on one core

CELLS = 60  # of the step with tiny tensors


@dataclass(frozen=True)
class Execution(Benchmark):
    """Two CPU devices compared with one, and the host time of a launch compared with a plain loop."""

    def run(self) -> Findings:
        """Compares times that are measured in turns, in one process."""
        return self.findings(compare_executions())


def compare_executions() -> Rows:
    """Returns pairs of times, each with its ratio."""
    import torch

    rows = [two_branches(), launches("cpu"), hand_overs()]
    return [*rows, launches("gpu"), launches("gpu", cuda_graphs=True)] if torch.cuda.is_available() else rows


def two_branches(rounds: int = 40) -> dict[str, Any]:
    """Compares a step with two equal branches on two one-core devices with the same step on one of them.

    The fastest of several rounds counts on both sides: other work on the machine can only slow a step down.
    """
    import numpy as np

    from placewise.core.grouping import module_path
    from placewise.core.problem import Problem

    step, cluster = _branches(), _cluster("cpu", 2)
    problem = Problem.of(step.graph, cluster)
    both = np.zeros(problem.num_groups, np.int64)
    for op in reversed(range(len(step.graph.ops))):
        both[problem.op_groups[op]] = int(module_path(step.graph, op).startswith("right"))
    apart, alone = (_compile(step, problem, placement) for placement in (both, np.zeros_like(both)))
    times: dict[TrainStep, list[float]] = {apart: [], alone: []}
    for _ in range(rounds):  # in turns, so that other work on the machine slows both down
        for train_step, found in times.items():
            found.append(_seconds(lambda run=train_step: run(step.step.batch)))  # type: ignore[misc]
    return _row("two branches on two one-core devices, against one", *(min(found) for found in times.values()))


def launches(kind: str, rounds: int = 30, cuda_graphs: bool = False) -> dict[str, Any]:
    """Compares a launch in a compiled step, including views and frees, with calling the same op in a loop."""
    import numpy as np
    import torch

    from placewise.core.problem import Problem

    step, cluster = _cells(), _cluster(kind, 1)
    problem = Problem.of(step.graph, cluster)
    train_step = _compile(step, problem, np.zeros(problem.num_groups, np.int64), cuda_graphs)
    calls = _bare_calls(train_step, step)
    batch = train_step.bring_home(step.step.batch)

    def loop() -> None:
        for function, args, kwargs in calls:
            function(*args, **kwargs)

    compiled, plain = [], []
    with torch.no_grad():
        for _ in range(rounds):
            compiled.append(_seconds(lambda: train_step(batch)))
            train_step.synchronize()
            plain.append(_seconds(loop))
            train_step.synchronize()
    how = ", CUDA graphs" if cuda_graphs else ""
    what = f"host time of a launch ({kind}{how}, {len(calls):,} ops), against a plain loop"
    return _row(what, *(float(np.median(times)) / len(calls) for times in (compiled, plain)))


def hand_overs(rounds: int = 30) -> dict[str, Any]:
    """Compares a chain of tiny ops that alternates between two CPU devices with the same chain on one of them."""
    import numpy as np

    from placewise.core.problem import Problem

    step, cluster = _chain(), _cluster("cpu", 2)
    problem = Problem.of(step.graph, cluster)
    alternating, staying = np.arange(problem.num_groups) % 2, np.zeros(problem.num_groups, np.int64)
    times = []
    for placement in (alternating, staying):
        train_step = _compile(step, problem, placement)
        times.append(float(np.median([_seconds(lambda run=train_step: run(step.step.batch)) for _ in range(rounds)])))  # type: ignore[misc]
    return _row(
        "an op that reads from the other CPU device, against one that reads from its own",
        *(t / problem.num_ops for t in times),
    )


def _row(what: str, seconds: float, others: float) -> dict[str, Any]:
    return {"what": what, "microseconds": seconds * 1e6, "against": others * 1e6, "ratio": seconds / others}


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _compile(step: "CapturedStep", problem: "Problem", placement: "Ints", cuda_graphs: bool = False) -> "TrainStep":
    from placewise.run.devices import real_devices
    from placewise.run.step.compiling import compile_placement

    devices = real_devices(problem.cluster)
    one_core_each = tuple(d if d.launches_from_host else replace(d, threads=1, cores=d.cores[:1]) for d in devices)
    return compile_placement(problem, placement, None, step, one_core_each, cuda_graphs)


def _cluster(kind: str, count: int) -> "Cluster":
    from placewise.core.cluster import Cluster, Device, Link

    names = [f"{kind}:{i}" for i in range(count)]
    links = tuple(Link(a, b, 1e10, 1e-5) for a in names for b in names if a != b)
    return Cluster("bench", tuple(Device(name, kind, 2**40, 1e11, 1e10) for name in names), links)


def _branches() -> "CapturedStep":
    import torch
    from torch import Tensor, nn

    from placewise.graph_capture.capture import capture_step
    from placewise.graph_capture.training_step import TrainingStep

    class Branches(nn.Module):
        """Two equal stacks of layers with the same input; their outputs are added."""

        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            """Returns the sum of both: [rows, width]."""
            added: Tensor = self.left(x) + self.right(x)
            return added

    model = Branches()
    batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    return capture_step(TrainingStep(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 1e-3), batch))


def _cells() -> "CapturedStep":
    import torch
    from torch import Tensor, nn

    from placewise.graph_capture.capture import capture_step
    from placewise.graph_capture.training_step import TrainingStep

    class Cells(nn.Module):
        """A chain of LSTM cells with shared weights, on tensors so small that only the launches count."""

        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            """Returns the last output: [rows, 4]."""
            state = (x, x)
            for _ in range(CELLS):
                state = self.cell(x, state)
            return state[0]

    model = Cells()
    batch = (torch.randn(2, 4), torch.randn(2, 4))
    return capture_step(TrainingStep(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 1e-3), batch))


def _chain() -> "CapturedStep":
    import torch
    from torch import Tensor, nn

    from placewise.graph_capture.capture import capture_step
    from placewise.graph_capture.training_step import TrainingStep

    class Chain(nn.Module):
        """Tiny ops, each of which reads the result of the one before."""

        def forward(self, x: Tensor) -> Tensor:
            """Returns the last result: [4]."""
            for _ in range(200):
                x = torch.tanh(x)
            return x

    return capture_step(TrainingStep(Chain(), None, None, torch.randn(4)))


def _bare_calls(train_step: "TrainStep", step: "CapturedStep") -> list[tuple[Any, Any, Any]]:
    """Returns the ops of a step as calls, with the arguments that they have when the program is run once."""
    import torch

    from placewise.run.step.residents import Residents

    placed = train_step.placed
    residents = Residents(placed, step.step).gather(step.step.batch)
    values: list[Any] = [None] * step.program.num_slots
    for resident, value in zip(step.program.residents, residents, strict=True):
        values[resident.slot] = value
    device = torch.device(placed.devices[0].torch_device)
    with torch.no_grad():
        return _run_once(step.program, values, device)


def _run_once(program: "Program", values: list[Any], device: "torch.device") -> list[tuple[Any, Any, Any]]:
    from torch import Tensor

    from placewise.graph_capture.program import HERE, fill_slots
    from placewise.graph_capture.whole_passes import SavedPass

    found = []
    for call in program.calls:
        filled = fill_slots(call.args, values)
        kwargs = {key: device if value is HERE else fill_slots(value, values) for key, value in call.kwargs.items()}
        result = call.function(*filled, **kwargs)
        made = [r for r in result if isinstance(r, (Tensor, SavedPass))] if isinstance(result, (tuple, list)) else [result]
        for slot, value in zip(call.results, made, strict=False):
            values[slot] = value
        if call.op >= 0:
            found.append((call.function, filled, kwargs))
    return found
