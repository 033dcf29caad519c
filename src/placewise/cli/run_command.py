"""placewise run: a plan on this machine, measured."""

import argparse
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from placewise.cli.inputs import check_busy, check_together, load_profile
from placewise.cli.outputs import check_writable, print_json, warn
from placewise.cli.progress import Line, Shown
from placewise.cli.shared_options import (
    RUN_MODEL_HELP,
    add_cluster_option,
    add_command,
    add_model_argument,
    add_profile_options,
    add_together_option,
    add_virtual_option,
    count_argument,
    positive_argument,
)
from placewise.core.errors import InputError, PlacewiseError

if TYPE_CHECKING:
    from placewise.core.cluster import Cluster
    from placewise.core.plan import Plan
    from placewise.core.profile import Profile
    from placewise.run.devices import RealDevice


def add_run(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "run", _run, "run a plan on this machine and compare measured with predicted times")
    add_model_argument(parser, RUN_MODEL_HELP)
    add_cluster_option(parser)
    parser.add_argument("--plan", metavar="PLAN", required=True, help="the plan.json to run")
    parser.add_argument("--steps", metavar="N", type=positive_argument, default=10, help="steps to measure (default: 10)")
    add_virtual_option(parser)
    parser.add_argument(
        "--cuda-graphs", action="store_true", help="replay sequences of GPU ops as CUDA graphs; uses more memory"
    )
    parser.add_argument("--trace", metavar="TRACE", help="write the measured timeline as a Chrome trace (ui.perfetto.dev)")
    parser.add_argument(
        "--timeout", metavar="S", type=positive_argument, default=60,
        help="over hosts: seconds after which a rank that does not answer ends the others (default: 60)",
    )  # fmt: skip
    add_profile_options(parser)
    add_together_option(parser)
    parser.add_argument(
        "--seed", metavar="N", type=count_argument, default=0, help="random seed of the weights and the batch (default: 0)"
    )


def _run(options: argparse.Namespace) -> None:
    from placewise.core.cluster import Cluster
    from placewise.core.plan import Plan

    check_writable(options.trace, reads=(options.cluster, options.plan, options.profile))
    check_together(options)
    check_busy(options)
    plan, cluster = Plan.load(options.plan), Cluster.load(options.cluster)
    from placewise.measure.random_batch import load_with_weights
    from placewise.report.chrome_trace import write_trace
    from placewise.rewrite.rewritten_steps import step_of_plan
    from placewise.run.devices import real_devices
    from placewise.run.step.compiling import compile_placement

    if len(cluster.host_names) > 1:
        if "RANK" in os.environ:
            _run_over_hosts(options, plan, cluster)
            return
        warn(
            f"cluster {cluster.name!r} has {len(cluster.host_names)} hosts, but all of its devices run on this machine; to "
            f"run it over hosts, start it with torchrun --nnodes {len(cluster.host_names)} --nproc-per-node 1 -m placewise"
        )
    devices = real_devices(cluster, dict(options.virtual))
    has_gpu = any(device.kind == "gpu" for device in devices)
    if options.cuda_graphs and not has_gpu:
        raise InputError(f"--cuda-graphs needs a GPU, cluster {cluster.name!r} has none")
    graphs = options.cuda_graphs or (plan.cuda_graphs and has_gpu)
    step = load_with_weights(options.model, options.seed)
    step = step_of_plan(plan, step)
    predicted = _predict(options, step, cluster, replace(plan, cuda_graphs=graphs), devices)
    problem, placement, order = predicted.whole
    train_step = compile_placement(problem, placement, order, step, devices, graphs)
    found = _measure(options, train_step, predicted, step)
    if options.trace:
        write_trace(found.schedule, options.trace, is_measured=True)
    result = _result(found, predicted, any(device.launches_from_host for device in devices), train_step.num_recorded_ops)
    if options.json:
        print_json(result)
    else:
        _print(result, predicted.problem)


def _run_over_hosts(options: argparse.Namespace, plan: "Plan", cluster: "Cluster") -> None:
    """Runs this rank's part of the plan; rank 0 prints."""
    for option in ("trace", "cuda_graphs"):
        if getattr(options, option):
            raise InputError(f"--{option.replace('_', '-')} can't be used over several hosts")
    from placewise.measure.random_batch import load_with_deferred_weights, random_batch
    from placewise.measure.steps import time_step
    from placewise.rewrite.rewritten_steps import step_of_plan
    from placewise.run.backends.hosts import joined_ranks
    from placewise.run.step.compiling import compile_part
    from placewise.run.step.failures import step_failure

    step, weights = load_with_deferred_weights(options.model, options.seed)
    step = step_of_plan(plan, step)
    predicted = _predict(options, step, cluster, replace(plan, cuda_graphs=False), ())
    with joined_ranks(options.timeout) as rank:
        problem, placement, order = predicted.whole
        train_step = compile_part(problem, placement, order, step, weights, dict(options.virtual))
        try:
            batch, num_warm_up = random_batch(step, options.seed), train_step.warm_up_steps
            seconds = [time_step(train_step, batch)[1] for _ in range(num_warm_up + options.steps)][num_warm_up:]
        except PlacewiseError:
            raise
        except Exception as problem:
            raise step_failure(options.model, problem) from problem
        finally:
            train_step.close()
    if rank == 0:
        result = _result_over_hosts(seconds, predicted)
        print_json(result) if options.json else _print_over_hosts(result, predicted.problem)


def _result_over_hosts(seconds: list[float], predicted: Any) -> dict[str, Any]:
    import numpy as np

    names = predicted.problem.cluster.device_names
    return {
        "step_seconds": float(np.median(seconds)),
        "predicted_seconds": predicted.step_seconds,
        "steps": seconds,
        "fits": predicted.fits,
        "predicted_peak_bytes": dict(zip(names, predicted.peak_bytes.tolist(), strict=True)),
        "ops": {name: int((predicted.devices == i).sum()) for i, name in enumerate(names)},
    }


def _print_over_hosts(result: dict[str, Any], problem: Any) -> None:
    from placewise.core.quantities import format_bytes
    from placewise.report.terminal_text import table

    _print_seconds(result, problem)
    rows = [
        (
            device.name,
            device.host,
            f"{result['ops'][device.name]:,}",
            format_bytes(result["predicted_peak_bytes"][device.name]),
        )
        for device in problem.cluster.devices
    ]
    print("", table(("device", "host", "ops", "predicted peak"), rows, left=2), sep="\n")


def _measure(options: argparse.Namespace, train_step: Any, predicted: Any, step: Any) -> Any:
    """Returns how long some steps took, and closes the step."""
    from placewise.measure.random_batch import random_batch
    from placewise.measure.steps import measure_steps
    from placewise.run.step.failures import step_failure

    with Line(options) as line:

        def report(which: str) -> None:
            if line.is_due:
                line.show(Shown(which))

        try:
            batch = random_batch(step, options.seed)
            return measure_steps(train_step, predicted, batch, options.steps, train_step.warm_up_steps, report)
        except PlacewiseError:
            raise
        except Exception as problem:
            raise step_failure(options.model, problem) from problem
        finally:
            train_step.close()


def _predict(options: argparse.Namespace, step: Any, cluster: Any, plan: Any, devices: "tuple[RealDevice, ...]") -> Any:
    """Returns the simulator's schedule of the plan, with measured times if there is a --profile."""
    from placewise.core.problem import Problem
    from placewise.machines.variants import with_cuda_graphs
    from placewise.simulate.simulator import Simulator

    graph, profile = step.graph, None
    if options.profile is not None:
        from placewise.measure.profiler import apply_profile

        profile = load_profile(options, cluster)
        _compare_hardware(profile, devices, options.profile)
        graph, cluster = apply_profile(step, cluster, profile, options.busy)
    problem = Problem.of(graph, with_cuda_graphs(cluster) if plan.cuda_graphs else cluster)
    placement, order = plan.resolve(problem, options.plan)
    schedule = Simulator(problem, "program").schedule(placement, order)
    if profile is None or not options.together:
        return schedule
    from placewise.measure.contended_schedule import schedule_together

    return schedule_together(problem, profile, placement, schedule.order)


def _compare_hardware(profile: "Profile", devices: "tuple[RealDevice, ...]", source: str) -> None:
    """Warns if a profile was measured on other hardware than this machine's, and names the first device that differs."""
    from placewise.measure.instruments import instrument_of

    measured = {device.name: device.hardware for device in profile.devices}
    for device in devices:
        if measured[device.name] != (here := instrument_of(device).hardware(device)):
            there = f"{device.name} was {measured[device.name]!r}, here it is {here!r}"
            warn(f"{source}: was measured on other hardware: {there}")
            return


def _result(found: Any, predicted: Any, has_gpu: bool, num_recorded_ops: int) -> dict[str, Any]:
    """Returns what was measured as plain data; no host time for CPU devices, whose threads launch their own ops."""
    import numpy as np

    cluster = predicted.problem.cluster
    names, overflow = cluster.device_names, np.maximum(predicted.peak_bytes - cluster.memory_bytes, 0)
    launches = predicted.problem.num_ops + len(predicted.copy_tensors)
    return {
        "step_seconds": float(np.median(found.step_seconds)),
        "predicted_seconds": predicted.step_seconds,
        "steps": found.step_seconds.tolist(),
        "host_seconds_per_launch": float(np.median(found.launch_seconds)) / max(launches, 1) if has_gpu else None,
        "launches": launches,
        "launched_by_graphs": num_recorded_ops,
        "fits": predicted.fits,
        "overflow_bytes": dict(zip(names, overflow.tolist(), strict=True)),
        "predicted_peak_bytes": dict(zip(names, predicted.peak_bytes.tolist(), strict=True)),
        "peak_bytes": dict(zip(names, found.schedule.peak_bytes.tolist(), strict=True)),
        "allocated_bytes": found.allocated_bytes,
        "ops": {name: int((predicted.devices == i).sum()) for i, name in enumerate(names)},
    }


def _print_seconds(result: dict[str, Any], problem: Any) -> None:
    from placewise.core.quantities import format_seconds
    from placewise.report.terminal_text import bold, problem_heading

    step, predicted = result["step_seconds"], result["predicted_seconds"]
    error = f" ({predicted / step - 1:+.0%})" if step else ""
    print(f"{problem_heading(problem)}: {bold(format_seconds(step))} a step, ", end="")
    print(f"median of {len(result['steps'])}; predicted {format_seconds(predicted)}{error}")


def _print(result: dict[str, Any], problem: Any) -> None:
    from placewise.core.quantities import format_bytes, format_seconds
    from placewise.report.terminal_text import printable, table

    _print_seconds(result, problem)
    if not result["fits"]:
        over = [(device, result["overflow_bytes"][device.name]) for device in problem.cluster.devices]
        needs = [
            f"{device.name} needs {format_bytes(n)} more than its {format_bytes(device.memory_bytes)}"
            for device, n in over
            if n
        ]
        print(printable(f"the plan does not fit: {', '.join(needs)}"))
    if result["host_seconds_per_launch"] is not None:
        graphs = f", {result['launched_by_graphs']:,} of them in CUDA graphs" if result["launched_by_graphs"] else ""
        print(
            f"host: {format_seconds(result['host_seconds_per_launch'])} for each of {result['launches']:,} launches{graphs}"
        )
    rows = []
    for name, ops in result["ops"].items():
        allocated = result["allocated_bytes"].get(name)
        sizes = (result["predicted_peak_bytes"][name], result["peak_bytes"][name])
        rows.append((name, f"{ops:,}", *map(format_bytes, sizes), "-" if allocated is None else format_bytes(allocated)))
    print("", table(("device", "ops", "predicted peak", "measured peak", "allocator's peak"), rows), sep="\n")
