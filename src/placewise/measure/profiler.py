"""Makes a profile of this machine: measures a step's ops, the links, launches and contention; and applies one."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from placewise.core.cluster import Cluster, Device
from placewise.core.graph import Graph
from placewise.core.profile import Contention, Profile, ProfiledDevice, Timing
from placewise.graph_capture.capture import CapturedStep
from placewise.machines.slices import Cut
from placewise.measure.clocks import Clock, time_work
from placewise.measure.contention import measure_contention
from placewise.measure.instruments import instrument_of, speed_key
from placewise.measure.links import measure_links
from placewise.measure.ops import OpCall, RunnableOp, op_calls
from placewise.measure.ops_in_steps import launched_timings, op_timings_in_steps
from placewise.run.devices import RealDevice, real_devices


@dataclass(frozen=True, eq=False)
class Profiling:
    """A new profile, and how it was made."""

    profile: Profile
    num_signatures: int
    failures: tuple[tuple[str, str, str], ...]  # (device, signature, why): these keep the roofline's time
    seconds: float


def measure_profile(
    captured: CapturedStep,
    cluster: Cluster,
    virtual: Mapping[str, Cut] | None = None,
    *,
    devices: Sequence[RealDevice] | None = None,
    runs_step: bool = False,
    known: Profile | None = None,
    alone: AbstractContextManager[Any] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Profiling:
    """Returns a profile of this machine with the times of a step's ops.

    With `runs_step`, the model is trained for some steps on each device that is not like another one, and the times of ops
    and launches are those in whole steps. Otherwise, and where a device can't hold or run the whole step, each op is
    repeated alone, which is faster than in a step: its tensors are in caches. What does not depend on the step (links,
    contention, launches of copies) is taken over from a `known` profile of the same machine. What uses a GPU happens inside
    of `alone`. `report` gets a line before each measurement. `devices` are the real ones, if the caller knows them.
    """
    begun = time.perf_counter()
    devices = real_devices(cluster, virtual) if devices is None else devices
    described = {device.name: device for device in cluster.devices}
    calls = op_calls(captured.program, len(captured.graph.ops))
    found = _Found({}, {}, [])
    measured = _measured_devices(devices)
    launches: list[float] = []  # of an op, in whole steps on each GPU
    for device in dict.fromkeys(measured.values()):
        times, launch_seconds = (
            _times_in_steps(captured, described[device.name], device, calls, report, alone) if runs_step else ({}, None)
        )
        launches += [] if launch_seconds is None else [launch_seconds]
        chosen = _distinct(calls, captured.graph, device.kind)
        others = {signature: call for signature, call in chosen.items() if signature not in times}
        with nullcontext() if alone is None else alone:
            found.add(device, times, _measure_ops(device, others, report))
    one_by_one = [found.launches[call.signature] for call in calls if call.signature in found.launches]
    dispatch_seconds = launches[0] if launches else float(np.mean(one_by_one)) if one_by_one else 0.0
    if known is None:
        with nullcontext() if alone is None else alone:
            report("links")
            links, copy_dispatch_seconds = measure_links(devices), _copy_dispatch_seconds(devices)
            report("contention")
            contention: Mapping[str, Contention] = measure_contention(devices)
    else:
        links, contention, copy_dispatch_seconds = known.links, known.contention, known.copy_dispatch_seconds
    profiled = tuple(
        ProfiledDevice(
            device.name,
            device.kind,
            instrument_of(device).hardware(device),
            measured[device].name,
            sum(other.torch_device == device.torch_device for other in devices),
            device.torch_device,
        )
        for device in devices
    )
    profile = Profile(
        profiled, found.timings, links, dispatch_seconds, contention, copy_dispatch_seconds=copy_dispatch_seconds
    )
    return Profiling(profile, len(found.timings), tuple(found.failures), time.perf_counter() - begun)


def apply_profile(captured: CapturedStep, cluster: Cluster, profile: Profile, busy: float = 0.0) -> tuple[Graph, Cluster]:
    """Returns the step's graph with measured op times, and the cluster with measured links and launches."""
    signatures = [call.signature for call in op_calls(captured.program, len(captured.graph.ops))]
    return profile.measured_graph(captured.graph, signatures, cluster, busy), profile.measured_cluster(cluster, busy)


@dataclass(frozen=True, eq=False)
class _Found:
    """What has been measured so far."""

    timings: dict[str, dict[str, Timing]]  # signature -> device -> time
    launches: dict[str, float]  # signature -> the host's seconds
    failures: list[tuple[str, str, str]]

    def add(
        self, device: RealDevice, in_steps: Mapping[str, Timing], alone: Mapping[str, tuple[Timing, float] | str]
    ) -> None:
        """Adds the times of ops on a device: in whole steps, and alone (or why an op could not be timed)."""
        for signature, timing in in_steps.items():
            self.timings.setdefault(signature, {})[device.name] = timing
        for signature, found in alone.items():
            if isinstance(found, str):
                self.failures.append((device.name, signature, found))
                continue
            self.timings.setdefault(signature, {})[device.name] = found[0]
            if device.launches_from_host:
                self.launches.setdefault(signature, found[1])


def _measured_devices(devices: Sequence[RealDevice]) -> dict[RealDevice, RealDevice]:
    """Returns for each device the one that is measured: itself, or the first that is equally fast."""
    first: dict[object, RealDevice] = {}
    return {device: first.setdefault(speed_key(device), device) for device in devices}


def _times_in_steps(
    captured: CapturedStep,
    described: Device,
    device: RealDevice,
    calls: Sequence[OpCall],
    report: Callable[[str], None],
    alone: AbstractContextManager[Any] | None,
) -> tuple[dict[str, Timing], float | None]:
    """Returns the times of ops in whole steps, on a device that can run them all, and of a launch, if the host launches."""
    if any(kinds is not None and described.kind not in kinds for kinds in captured.graph.ops.devices):
        return {}, None
    report(f"whole steps on {device.name}")
    signatures = [call.signature for call in calls]
    if device.launches_from_host:
        return launched_timings(captured, described, device, signatures, alone)
    return op_timings_in_steps(captured, described, device, signatures), None


def _copy_dispatch_seconds(devices: Sequence[RealDevice]) -> float | None:
    """Returns the host's time to launch a copy between the first GPU and another device, a GPU if there is one."""
    gpus = [device for device in devices if device.launches_from_host]
    others = [device for device in [*gpus[1:], *devices] if device is not gpus[0]] if gpus else []
    return instrument_of(gpus[0]).copy_launch_seconds(gpus[0], others[0]) if others else None


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
    """Returns for each signature its time on a device and the host's time to launch it, or why it could not be run."""

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

    return instrument_of(device).run(device, measure)
