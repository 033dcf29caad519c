"""Compiles a plan: from a placement to a step that runs on this machine."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from placewise import __version__
from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster, as_cluster
from placewise.core.errors import ExecutionError, RandomOnSeveralHosts
from placewise.core.graph import digest_of
from placewise.core.plan import Plan, digest_of_graph
from placewise.core.problem import NOWHERE, Problem
from placewise.graph_capture.capture import CapturedStep
from placewise.graph_capture.program import Gate
from placewise.graph_capture.recurrent_layers import ForwardLayers
from placewise.graph_capture.resolved_program import ResolvedProgram
from placewise.machines.presets import PRESETS
from placewise.machines.slices import Cut
from placewise.rewrite.augmented_program import AugmentedProgram, leave_out_calls
from placewise.rewrite.piece import Piece
from placewise.rewrite.rewritten_steps import step_of_plan
from placewise.run.backends.protocol import StreamBackend
from placewise.run.deferred_weights import DeferredWeights
from placewise.run.devices import RealDevice, group_by_backend, real_devices
from placewise.run.lower.instructions import RunOp
from placewise.run.lower.lowering import lower, tensor_devices
from placewise.run.lower.neighbours import lower_side_by_side
from placewise.run.lower.placed_step import PlacedStep
from placewise.run.piece_kernels import Wanted, compile_all, print_progress
from placewise.run.step.own_weights import fill_own
from placewise.run.step.train_step import TrainStep


def compile_plan(
    plan: Plan,
    step: CapturedStep,
    cluster: Cluster | str | Path | None = None,
    virtual: Mapping[str, Cut] | None = None,
    cuda_graphs: bool | None = None,
    weights: DeferredWeights | str | None = None,
) -> TrainStep:
    """Returns the step as the plan places it, ready to run on this machine.

    Without `cuda_graphs`, CUDA graphs are used if the plan was made for them and there is a GPU.
    `weights` are those of a model on the meta device, see `fill_own`.

    If no cluster is given, it is the plan's own, or the preset that it names, or this machine as `placewise detect`
    describes it.
    """
    if not isinstance(step, CapturedStep):
        raise ExecutionError(f"step must be a captured step (placewise.capture), got a {type(step).__name__}")
    if virtual is not None and not (isinstance(virtual, Mapping) and all(map(_is_cut, virtual.values()))):
        raise ExecutionError(
            'virtual must be a dict from GPUs to numbers of slices, as in {"cuda:0": 4}, or to the multiprocessors of each, '
            f'as in {{"cuda:0": (32, 64)}}, got {virtual!r}'
        )
    source = "plan"
    if cluster is None and plan.machine is not None:
        cluster = plan.machine
    elif cluster is None and plan.cluster in PRESETS:
        cluster = plan.cluster
    elif cluster is None:
        cluster, source = Cluster.detect(), "plan (no cluster was given, so this machine was detected)"
    cluster = as_cluster(cluster)
    step = step_of_plan(plan, step)
    has_gpu = any(device.kind == "gpu" for device in cluster.devices)
    if cuda_graphs and not has_gpu:
        raise ExecutionError(f"cuda_graphs: cluster {cluster.name!r} has no GPU")
    problem = Problem.of(step.graph, cluster)
    placement, order = plan.resolve(problem, source)
    if len(cluster.host_names) > 1 and is_distributed():
        return compile_part(problem, placement, order, step, weights, virtual)
    graphs = plan.cuda_graphs and has_gpu if cuda_graphs is None else cuda_graphs
    return compile_placement(problem, placement, order, step, real_devices(cluster, virtual), graphs, weights)


def _is_cut(value: object) -> bool:
    sizes = value if isinstance(value, tuple) and value else (value,)
    return all(type(size) is int and size > 0 for size in sizes)


def compile_placement(
    problem: Problem,
    placement: Ints,
    order: Ints | None,
    step: CapturedStep,
    devices: tuple[RealDevice, ...],
    cuda_graphs: bool = False,
    weights: DeferredWeights | str | None = None,
) -> TrainStep:
    """Returns the step in a placement [groups], launched in an order [ops] or in program order.

    With `cuda_graphs`, any backend that can record launches replays them; without one all steps are plain.
    """
    _refuse_whole_layers_with_options(problem, placement, step)
    problem, placement, order, step = _without_absent(problem, placement, order, step)
    resolved, has_thread = ResolvedProgram.of(step), [not device.launches_from_host for device in devices]
    order = _with_gated_ops_last(order, step.program.gate)
    instructions = lower_side_by_side(problem, placement, order, resolved, has_thread)
    placed = PlacedStep(resolved, instructions, tensor_devices(problem, placement), devices)
    compile_all(_pieces(placed), print_progress)
    if weights is not None:
        fill_own(step.step.model, placed.far, weights)
    backend = _stream_backend(devices)
    if backend is None:
        return TrainStep(step, placed)
    return TrainStep(step, placed, backend.open_streams(devices), backend.recorder_factory(devices) if cuda_graphs else None)


def _refuse_whole_layers_with_options(problem: Problem, placement: Ints, step: CapturedStep) -> None:
    """Refuses to let wait, or to repeat, what recurrent layers as one op keep for their backward pass."""
    if not any(isinstance(call.function, ForwardLayers) for call in step.program.calls):
        return
    if (problem.optional & (placement != NOWHERE)).any():
        raise ExecutionError(
            "recurrent layers as one op can't run in a plan that recomputes tensors or lets them wait: place with "
            "--no-recompute --no-park, or capture without whole_layers"
        )


def _without_absent(
    problem: Problem, placement: Ints, order: Ints | None, step: CapturedStep
) -> tuple[Problem, Ints, Ints | None, CapturedStep]:
    """Returns the same without the optional ops that are nowhere; nothing in it is optional."""
    if not isinstance(step.program, AugmentedProgram):
        return problem, placement, order, step
    present = problem.present(placement)
    left = replace(step, graph=present.problem.graph, program=leave_out_calls(step.program, present))
    return present.problem, placement[present.groups], None if order is None else present.reduce_order(order), left


def _pieces(placed: PlacedStep) -> Iterator[Wanted]:
    """Yields the pieces of a step, with the devices that they run on."""
    for run in placed.instructions.sequence:
        if isinstance(run, RunOp) and isinstance(piece := placed.resolved.op_calls[run.op].function, Piece):
            device = placed.devices[run.device]
            yield Wanted(piece, device.torch_device, device.threads)


def is_distributed() -> bool:
    """Returns whether this process is one of several ranks of torch.distributed."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def compile_part(
    problem: Problem,
    placement: Ints,
    order: Ints | None,
    step: CapturedStep,
    weights: DeferredWeights | str | None = None,
    virtual: Mapping[str, Cut] | None = None,
) -> TrainStep:
    """Returns this rank's part of the step: rank i runs the devices of the cluster's i-th host.

    All ranks call it with the same step, placement and order, which they compare first. `virtual` cuts GPUs into slices,
    which ranks on one machine share.
    """
    from placewise.run.backends.hosts import Hosts  # loads torch.distributed

    hosts = Hosts(problem.cluster)
    order = np.arange(problem.num_ops) if order is None else order
    hosts.agree({
        "version of placewise": __version__, "version of PyTorch": str(torch.__version__),
        "graph": digest_of_graph(step.graph), "cluster": problem.cluster.digest,
        "plan": digest_of([], placement, order),
    })  # fmt: skip
    problem, placement, order, step = _without_absent(problem, placement, order, step)
    if step.program.gate is not None:
        raise ExecutionError("a step with a GradScaler can't run over several hosts: use bfloat16, which needs none")
    whole = lower(problem, placement, order)
    devices = hosts.real_devices(problem.cluster, virtual)
    part = hosts.part_of(whole)
    placed = PlacedStep(ResolvedProgram.of(step), part, tensor_devices(problem, placement), devices, whole)
    compile_all(_pieces(placed), print_progress)
    drawing = sorted(
        {hosts.ranks[run.device] for run in whole.sequence if isinstance(run, RunOp) and run.op in placed.random_ops}
    )
    if len(drawing) > 1:
        names = " and ".join(hosts.names[rank] for rank in drawing)
        raise RandomOnSeveralHosts(f"the step draws random numbers on the hosts {names}: place all such ops on one host")
    if weights is not None:
        fill_own(step.step.model, placed.far, weights)
    backend = _stream_backend(devices)
    return TrainStep(step, placed, None if backend is None else backend.open_streams(devices), network=hosts)


def _with_gated_ops_last(order: Ints | None, gate: Gate | None) -> Ints | None:
    """Returns an order in which no other op follows those that may be skipped; program order is one."""
    if order is None or gate is None:
        return order
    return order[np.argsort(order >= gate.first_op, kind="stable")]


def _stream_backend(devices: tuple[RealDevice, ...]) -> StreamBackend | None:
    """Returns the backend of the devices that the host launches on; None if there are none."""
    launched = [device for device in devices if device.launches_from_host]
    backends = [backend for backend, _ in group_by_backend(launched)]
    if len(backends) > 1:
        kinds = " and ".join(dict.fromkeys(device.kind for device in launched))
        raise ExecutionError(f"devices of kind {kinds} can't run in one step: use only one kind of accelerator")
    return cast(StreamBackend, backends[0]) if backends else None
