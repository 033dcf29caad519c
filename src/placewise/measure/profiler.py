"""Measures ops, links, launches and contention on real devices: what a profile holds."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from placewise.core.cluster import Cluster, Device
from placewise.core.graph import Graph
from placewise.core.profile import Profile, ProfiledDevice, Timing
from placewise.core.quantities import format_count
from placewise.graph_capture.capture import CapturedStep
from placewise.machines.detect import cpu_name
from placewise.measure.clocks import Clock, alike, run_on, time_work
from placewise.measure.contention import measure_contention
from placewise.measure.links import measure_links
from placewise.measure.ops import OpCall, RunnableOp, op_calls
from placewise.measure.whole_steps import launch_in_a_step, times_in_a_step
from placewise.run.devices import RealDevice, real_devices


@dataclass(frozen=True, eq=False)
class Measurements:
    """A profile, and what making it was like."""

    profile: Profile
    num_signatures: int
    failures: tuple[tuple[str, str, str], ...]  # (device, signature, why): these keep the roofline's time
    seconds: float


def measure_profile(
    captured: CapturedStep,
    cluster: Cluster,
    virtual: Mapping[str, int] | None = None,
    *,
    runs_step: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Measurements:
    """Returns what a step's ops, and the links between all devices, take on this machine.

    With `runs_step` the times of ops on CPU devices, and the host's time for a launch on a GPU, are those in whole steps:
    the model is trained for some steps on a device of each kind. Otherwise they are those of one op again and again, which
    is faster, for all that it touches is in the processor's caches. `report` is told what is measured next.
    """
    begun = time.perf_counter()
    devices = real_devices(cluster, virtual)
    described = {device.name: device for device in cluster.devices}
    calls = op_calls(captured.program, len(captured.graph.ops))
    found = _Found({}, {}, [])
    first = _first_of_each(devices)
    for device in dict.fromkeys(first.values()):
        times = _whole_steps(captured, described[device.name], device, calls, report) if runs_step else {}
        chosen = _distinct(calls, captured.graph, described[device.name].kind)
        others = {signature: call for signature, call in chosen.items() if signature not in times}
        found.add(device, times, _measure_ops(device, others, report))
    launches = [found.launches[call.signature] for call in calls if call.signature in found.launches]
    dispatch_seconds = float(np.mean(launches)) if launches else 0.0
    if runs_step and launches:
        gpu = next(device for device in devices if device.launches_from_host)
        report(f"whole steps on {gpu.name}")
        dispatch_seconds = launch_in_a_step(captured, described[gpu.name], gpu) or dispatch_seconds
    report("links")
    links = measure_links(devices)
    report("devices that are busy together")
    contention = measure_contention(devices)
    profiled = tuple(
        ProfiledDevice(d.name, described[d.name].kind, hardware_of(d), first[d].name, _num_alike(d, devices))
        for d in devices
    )
    profile = Profile(profiled, found.timings, links, dispatch_seconds, contention)
    return Measurements(profile, len(found.timings), tuple(found.failures), time.perf_counter() - begun)


@dataclass(frozen=True, eq=False)
class _Found:
    """What has been measured so far."""

    timings: dict[str, dict[str, Timing]]  # signature -> device -> time
    launches: dict[str, float]  # signature -> the host's seconds on a GPU
    failures: list[tuple[str, str, str]]

    def add(
        self, device: RealDevice, in_steps: Mapping[str, Timing], alone: Mapping[str, tuple[Timing, float] | str]
    ) -> None:
        """Adds what ops took on a device: in whole steps, and those that were timed alone or why they could not be."""
        for signature, timing in in_steps.items():
            self.timings.setdefault(signature, {})[device.name] = timing
        for signature, found in alone.items():
            if isinstance(found, str):
                self.failures.append((device.name, signature, found))
                continue
            self.timings.setdefault(signature, {})[device.name] = found[0]
            if device.launches_from_host:
                self.launches.setdefault(signature, found[1])


def _whole_steps(
    captured: CapturedStep, described: Device, device: RealDevice, calls: Sequence[OpCall], report: Callable[[str], None]
) -> dict[str, Timing]:
    """Returns the times of ops in whole steps, on a CPU device that can run them all; else none."""
    if device.launches_from_host or any(
        kinds is not None and described.kind not in kinds for kinds in captured.graph.ops.devices
    ):
        return {}
    report(f"whole steps on {device.name}")
    return times_in_a_step(captured, described, device, [call.signature for call in calls])


def apply_profile(captured: CapturedStep, cluster: Cluster, profile: Profile, busy: float = 0.0) -> tuple[Graph, Cluster]:
    """Returns the step's graph with measured op times, and the cluster with measured links and launches."""
    signatures = [call.signature for call in op_calls(captured.program, len(captured.graph.ops))]
    return profile.measured_graph(captured.graph, signatures, cluster, busy), profile.measured_cluster(cluster, busy)


def _first_of_each(devices: Sequence[RealDevice]) -> dict[RealDevice, RealDevice]:
    """Returns the device that is measured in the place of each: slices of a GPU, and equal shares of cores, are alike."""
    first: dict[object, RealDevice] = {}
    return {device: first.setdefault(alike(device), device) for device in devices}


def _distinct(calls: Sequence[OpCall], graph: Graph, kind: str) -> dict[str, OpCall]:
    """Returns one call for each signature that a kind of device can run."""
    found: dict[str, OpCall] = {}
    for call, kinds in zip(calls, graph.ops.devices, strict=True):
        if kinds is None or kind in kinds:
            found.setdefault(call.signature, call)
    return found


def _measure_ops(
    device: RealDevice, calls: Mapping[str, OpCall], report: Callable[[str], None]
) -> dict[str, tuple[Timing, float] | str]:
    """Returns the time of each signature on a device and the host's time to launch it, or why there is none."""

    def measure(clock: Clock) -> dict[str, tuple[Timing, float] | str]:
        found: dict[str, tuple[Timing, float] | str] = {}
        with torch.no_grad():
            for signature, call in calls.items():
                report(f"{len(found):,} of {len(calls):,} signatures on {device.name}")
                try:
                    found[signature] = (time_work(RunnableOp(call, device.torch_device), clock), clock.launch_seconds)
                except (RuntimeError, IndexError, TypeError, ValueError) as problem:  # no kernel here, or no memory
                    found[signature] = f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}"
        return found

    return run_on(device, measure)


def hardware_of(device: RealDevice) -> str:
    """Returns what this machine calls a device."""
    if device.kind == "gpu":
        name = torch.cuda.get_device_name(device.torch_device)
        return name if device.slice is None else f"{name}, one of {device.slice[1]} slices"
    return f"{format_count(device.threads, 'thread')} of {cpu_name()}"


def _num_alike(device: RealDevice, devices: Sequence[RealDevice]) -> int:
    """Returns how many devices there are on the same hardware."""
    return sum(other.torch_device == device.torch_device for other in devices)
