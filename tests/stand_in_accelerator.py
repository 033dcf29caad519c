"""A stand-in for an accelerator, on the CPU: streams and a recorder that check what the lanes do.

InstantStreams check that an event is recorded before anything waits for it, and that each op starts in its own device's
stream. RecordedCalls are the calls of a segment with their arguments, as they were. A replay makes those calls again and
writes over the tensors that the first ones returned. So a scalar that was taken as fixed, an address that has changed, or a
value that was not kept shows as another result.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
from compiled_steps import cpu_cluster, one_thread_each
from simulated import leave_some_out, random_order, random_placements
from torch import Tensor, empty_strided
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from placewise.core.cluster import Cluster, Device
from placewise.core.problem import Problem
from placewise.graph_capture.capture import CapturedStep
from placewise.graph_capture.resolved_program import ResolvedProgram
from placewise.machines.slices import Cut
from placewise.rewrite.augmented_graph import WAIT
from placewise.rewrite.augmented_program import AugmentedProgram, leave_out_calls
from placewise.run.backends.protocol import Prepared
from placewise.run.devices import RealDevice
from placewise.run.lower.lowering import tensor_devices
from placewise.run.lower.neighbours import lower_side_by_side
from placewise.run.lower.placed_step import PlacedStep
from placewise.run.lower.waits import Queue
from placewise.run.step_trace import StepTrace
from placewise.run.storage_copies import clone_storage, copy_storage_over, copy_storage_to

Entry = tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]  # function, arguments, keyword arguments, results


def stand_in_devices(cluster: Cluster, from_host: tuple[bool, ...]) -> tuple[RealDevice, ...]:
    """Returns the real devices of a cluster of CPUs, of which some are taken for GPUs."""
    return tuple(
        replace(device, kind="gpu", launches_from_host=True, threads=0) if is_launched else device
        for device, is_launched in zip(one_thread_each(cluster), from_host, strict=True)
    )


def placed_at_random(step: CapturedStep, seed: int, from_host: tuple[bool, ...]) -> PlacedStep:
    """Returns the step in a random placement and order, on devices of which some are taken for GPUs.

    What waits in a step with options does so on the last device.
    """
    cluster, rng = cpu_cluster(len(from_host)), np.random.default_rng(seed)
    problem = Problem.of(step.graph, cluster)
    placement = random_placements(problem, rng, 1)[0]
    if isinstance(step.program, AugmentedProgram):
        waits = np.unique(problem.op_groups[[kind == WAIT for kind in step.graph.ops.kinds]])
        placement[waits] = len(from_host) - 1
        placement = leave_some_out(problem, placement[None], rng)[0]
        present = problem.present(placement)
        step = replace(step, graph=present.problem.graph, program=leave_out_calls(step.program, present))
        problem, placement = present.problem, placement[present.groups]
    order = random_order(problem, rng)
    devices = stand_in_devices(cluster, from_host)
    resolved = ResolvedProgram.of(step)
    instructions = lower_side_by_side(problem, placement, order, resolved, [not is_launched for is_launched in from_host])
    return PlacedStep(resolved, instructions, tensor_devices(problem, placement), devices)


class InstantStreams:
    """Streams whose work is finished when it is launched."""

    def __init__(self, from_host: list[bool]) -> None:
        self.from_host = from_host
        self.recorded: set[int] = set()
        self.pinned: list[Tensor] = []
        self.current = -1
        self.waits = 0

    def enter(self, device: int) -> Prepared:
        assert self.from_host[device]
        return partial(setattr, self, "current", device)

    def copy(self, source: int, target: int) -> Callable[..., Tensor]:
        def copy(tensor: Tensor, over: Tensor | None = None) -> Tensor:
            assert self.from_host[source] or self.is_pinned(tensor)
            self.current = -1
            made = copy_storage_to(tensor, empty_strided) if over is None else copy_storage_over(tensor, over)
            if not self.from_host[target]:
                self.pinned.append(made)
            return made

        return copy

    def pin(self, tensor: Tensor) -> Tensor:
        pinned = clone_storage(tensor)
        self.pinned.append(pinned)
        return pinned

    def empty(self, *size: Any, **options: Any) -> Tensor:
        self.pinned.append(empty_strided(*size, **options))
        return self.pinned[-1]

    def is_pinned(self, tensor: Tensor) -> bool:
        return any(tensor.data_ptr() == pinned.data_ptr() for pinned in self.pinned)

    def record(self, instruction: int, queue: Queue) -> Prepared:
        return partial(self.recorded.add, instruction)

    def wait(self, instruction: int, queue: Queue) -> Prepared:
        return partial(self._check, instruction)

    def synchronize(self, instruction: int) -> Prepared:
        return partial(self._check, instruction)

    def _check(self, instruction: int) -> None:
        assert instruction in self.recorded
        self.waits += 1

    def mark(self, instruction: int, is_end: bool, queue: Queue) -> Prepared:
        def check() -> None:
            assert len(queue) == 2 or self.current == queue[0]

        return check

    def stay_ahead(self) -> Prepared:
        return lambda: None

    @contextmanager
    def step(self, trace: StepTrace | None = None) -> Iterator[None]:
        self.recorded.clear()
        self.current = -1
        yield

    def synchronize_all(self) -> None: ...


class LateStreams(InstantStreams):
    """Streams whose copies are made as late as they may be: when something waits for them, or when the next step begins."""

    def __init__(self, from_host: list[bool]) -> None:
        super().__init__(from_host)
        self.running: dict[Queue, list[Prepared]] = {}  # by channel, in order
        self.ends: dict[int, tuple[Queue, int]] = {}  # instruction -> its channel, and how many of its copies come before
        self.lock = Lock()

    def copy(self, source: int, target: int) -> Callable[..., Tensor]:
        def copy(tensor: Tensor, over: Tensor | None = None) -> Tensor:
            assert self.from_host[source] or self.is_pinned(tensor)
            self.current = -1
            made = clone_storage(tensor) if over is None else over
            if over is None and made.is_floating_point():
                made.fill_(float("nan"))  # shows what is read too early
            with self.lock:
                self.running.setdefault((source, target), []).append(partial(copy_storage_over, tensor.detach(), made))
            if not self.from_host[target]:
                self.pinned.append(made)
            return made

        return copy

    def pin(self, tensor: Tensor) -> Tensor:
        for _ in range(20):  # the lane that has made it goes on meanwhile
            time.sleep(0)
        return super().pin(tensor)

    def record(self, instruction: int, queue: Queue) -> Prepared:
        def record() -> None:
            self.recorded.add(instruction)
            self.ends[instruction] = (queue, len(self.running.get(queue, ())))

        return record

    def _check(self, instruction: int) -> None:
        super()._check(instruction)
        self._make(*self.ends[instruction])

    def _make(self, queue: Queue, count: int) -> None:
        with self.lock:
            copies = self.running.get(queue, [])
            for number in range(count):
                copies[number]()
                copies[number] = int  # it is made once

    @contextmanager
    def step(self, trace: StepTrace | None = None) -> Iterator[None]:
        for queue, copies in self.running.items():
            self._make(queue, len(copies))
        self.running.clear()
        with super().step(trace):
            yield


class RecordedCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The calls of a segment, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []
        self.is_running = False

    def start(self) -> None:
        self.is_running = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        self.is_running = False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else (result,)
        self.entries.append(tree_map_only(Tensor, Tensor.detach, (function, args, dict(kwargs or {}), list(made))))
        return result

    def replay(self) -> None:
        for function, args, kwargs, made in self.entries:
            result = function(*args, **kwargs)
            again = result if isinstance(result, (tuple, list)) else (result,)
            for old, new in zip(made, again, strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class StandInRecorder:
    """Stands in for CudaGraphs."""

    def __init__(self) -> None:
        self.segments: dict[int, RecordedCalls] = {}
        self.replays = 0

    def begin(self, segment: int, device: int) -> Prepared:
        def begin() -> None:
            self.segments[segment] = RecordedCalls()
            self.segments[segment].start()

        return begin

    def end(self, segment: int) -> Prepared:
        return lambda: self.segments[segment].stop()

    def replay(self, segment: int) -> Prepared:
        def replay() -> None:
            self.replays += 1
            self.segments[segment].replay()

        return replay

    def abandon(self) -> None:
        for calls in self.segments.values():
            if calls.is_running:
                calls.stop()

    def reset(self) -> None:
        self.segments.clear()


class StandInAccelerator:
    """The backend of a kind of device that no file of ours knows: the CPU, launched on from the host."""

    def claim(
        self, devices: Sequence[Device], cluster_name: str, slices: Mapping[str, Cut], claimed: Sequence[RealDevice]
    ) -> list[RealDevice]:
        return [RealDevice(device.name, device.kind, "cpu", launches_from_host=True) for device in devices]

    def reset_peaks(self, devices: Sequence[RealDevice]) -> None: ...

    def peak_bytes(self, devices: Sequence[RealDevice]) -> dict[str, int]:
        return {device.name: 7 for device in devices}

    def release_memory(self) -> None: ...

    def open_streams(self, devices: Sequence[RealDevice]) -> InstantStreams:
        return InstantStreams([device.launches_from_host for device in devices])

    def recorder_factory(self, devices: Sequence[RealDevice]) -> Callable[[], StandInRecorder]:
        return StandInRecorder
