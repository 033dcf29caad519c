"""From a plan to a step that runs."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster, as_cluster
from placewise.core.errors import ExecutionError
from placewise.core.plan import Plan
from placewise.core.problem import Problem
from placewise.graph_capture.capture import CapturedStep
from placewise.machines.presets import PRESETS
from placewise.run.devices import RealDevice, real_devices
from placewise.run.lower.lowering import lower, tensor_devices
from placewise.run.lower.placed_step import PlacedStep
from placewise.run.lower.slots import Slots
from placewise.run.step.train_step import TrainStep


def compile_plan(
    plan: Plan,
    step: CapturedStep,
    cluster: Cluster | str | Path | None = None,
    virtual: Mapping[str, int] | None = None,
    cuda_graphs: bool = False,
) -> TrainStep:
    """Returns the step as the plan places it, ready to run on this machine.

    Without a cluster it is the preset that the plan names, or this machine as `placewise detect` describes it.
    """
    if not isinstance(step, CapturedStep):
        raise ExecutionError(f"step must be a captured step (placewise.capture), got a {type(step).__name__}")
    if virtual is not None and not (isinstance(virtual, Mapping) and all(type(n) is int for n in virtual.values())):
        raise ExecutionError(f'virtual must be a table of GPUs and numbers of slices, {{"cuda:0": 4}}, it is {virtual!r}')
    source = "plan"
    if cluster is None and plan.cluster in PRESETS:
        cluster = plan.cluster
    elif cluster is None:
        cluster, source = Cluster.detect(), "plan (no cluster was given, so it is this machine as detected)"
    cluster = as_cluster(cluster)
    if cuda_graphs and all(device.kind != "gpu" for device in cluster.devices):
        raise ExecutionError(f"cuda_graphs: cluster {cluster.name!r} has no GPU")
    problem = Problem.of(step.graph, cluster)
    placement, order = plan.resolve(problem, source)
    return compile_placement(problem, placement, order, step, real_devices(cluster, virtual), cuda_graphs)


def compile_placement(
    problem: Problem,
    placement: Ints,
    order: Ints | None,
    step: CapturedStep,
    devices: tuple[RealDevice, ...],
    cuda_graphs: bool = False,
) -> TrainStep:
    """Returns the step with a placement [groups], launched in an order [ops] or in program order."""
    instructions = lower(problem, placement, order)
    placed = PlacedStep(Slots.of(step), instructions, tensor_devices(problem, placement), devices)
    if not any(device.is_gpu for device in devices):
        return TrainStep(step, placed)
    from placewise.run.backends.cuda import CudaStreams
    from placewise.run.backends.cuda_graphs import CudaGraphs

    return TrainStep(step, placed, CudaStreams(devices), partial(CudaGraphs, devices) if cuda_graphs else None)
