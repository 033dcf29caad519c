"""What a step notes of itself: when each instruction ran, and how many bytes it made."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from placewise.core.errors import ExecutionError
from placewise.graph_capture.capture import CapturedStep
from placewise.run.backends.cpu_memory import give_back_memory
from placewise.run.backends.cpu_threads import Alarm, Team, job_of
from placewise.run.backends.protocol import Streams
from placewise.run.codegen.cuda_graph_lanes import Graphs
from placewise.run.codegen.host_scalar_code import HostScalars
from placewise.run.codegen.lanes import HOST_LANE, Lanes, LaneWriter, pinning_lane
from placewise.run.devices import RealDevice
from placewise.run.lower.placed_step import PlacedStep
from placewise.run.step.recorded_graphs import WARM_UP, Graphed
from placewise.run.step.residents import Residents
from placewise.run.step_notes import Notes


class TrainStep:
    """Runs a captured step as it was placed; `plan.compile(step)` makes one.

    `train_step(batch)` returns the loss (of inference: what the model returned). The model's parameters and buffers and
    the optimizer's state are the live ones before and after each call.
    """

    def __init__(
        self, step: CapturedStep, placed: PlacedStep, streams: Streams | None = None,
        make_graphs: Callable[[], Graphs] | None = None,
    ) -> None:  # fmt: skip
        self.placed, self._step, self._streams = placed, step, streams
        self._residents = Residents(placed, step.step, streams)
        self._numbers = HostScalars(placed.values)
        self._host = self._numbers.build(self._residents.positions)
        self._alarm = Alarm()
        self._given = (placed, self._numbers, self._residents.positions, streams, self._alarm)
        self._lanes = LaneWriter(*self._given).write()
        self._noted: Lanes | None = None
        self._graphed = Graphed(self._lanes, make_graphs, *self._given) if make_graphs is not None else None
        self._team = Team(_places(placed, self._lanes), self._alarm)

    def __call__(self, batch: Any) -> Any:
        """Runs one step and returns its loss."""
        return self._run(batch)

    def bring_home(self, batch: Any) -> Any:
        """Returns the batch with its tensors on their home devices, so that a step finds them there, and the model's too."""
        return self._residents.bring_home(batch)

    def note(self, batch: Any) -> Notes:
        """Runs one step without graphs, and returns when everything ran and the bytes that it made."""
        self._forget_graphs()
        if self._noted is None:
            self._noted = LaneWriter(*self._given, is_noted=True).write()
        notes = Notes()
        self._run(batch, self._noted, notes)
        return notes

    def host_seconds(self, batch: Any) -> float:
        """Runs one step and returns how long the host takes to launch it without graphs, on GPUs; it does not wait for them.

        CUDA's queues are let run empty now and then, off the clock, for the host waits where one is full.
        """
        self._forget_graphs()
        watch = _Stopwatch(self.synchronize)
        lanes = LaneWriter(*self._given, pause=watch.pause).write()
        self._run(batch, lanes)
        watch.pause()
        return watch.seconds

    @property
    def warm_up_steps(self) -> int:
        """How many steps it takes until all are alike."""
        return WARM_UP + 2 if self._graphed is not None else 2

    @property
    def num_graphed_ops(self) -> int:
        """How many ops CUDA graphs launch."""
        return 0 if self._graphed is None else self._graphed.num_recorded

    def synchronize(self) -> None:
        """Returns when all devices have done their work; CPU devices have when a call returns."""
        if self._streams is not None:
            self._streams.synchronize_all()

    def reset_peaks(self) -> None:
        """Lets the GPUs' allocators begin anew with their peaks, and without blocks whose sizes suited other steps."""
        gpus = set(self._allocators().values())
        if gpus:
            torch.cuda.empty_cache()
        for gpu in gpus:
            torch.cuda.reset_peak_memory_stats(gpu)

    def allocated_bytes(self) -> dict[str, int]:
        """Returns the peaks of the GPUs' allocators: by device, or "cuda:0" for all of its slices, which share one."""
        return {name: torch.cuda.max_memory_allocated(gpu) for name, gpu in self._allocators().items()}

    def _allocators(self) -> dict[str, str]:
        gpus = [device for device in self.placed.devices if device.is_gpu]
        return {device.name if device.slice is None else device.torch_device: device.torch_device for device in gpus}

    def close(self) -> None:
        """Ends the threads of the CPU devices, gives back graphs and memory; the step can't be run any more."""
        self._team.close()
        self._forget_graphs()
        give_back_memory()

    def _forget_graphs(self) -> None:
        """Gives back the memory of graphs, which a plain step needs; they are recorded anew when they are wanted."""
        if self._graphed is not None:
            self._graphed.forget()

    def _run(self, batch: Any, lanes: Lanes | None = None, notes: Notes | None = None) -> Any:
        if not self._team.close.alive:
            raise ExecutionError("the train step is closed: compile the plan again")
        program = self.placed.values.program
        outputs: list[Any] = [None] * len(program.outputs)
        with torch.no_grad():
            residents = self._residents.gather(batch)
            numbers, updates = self._host(residents)
            lanes = self._choose(residents, numbers) if lanes is None else lanes
            mail: list[Any] = [None] * lanes.num_mails
            given = (residents, numbers, mail, outputs, None if notes is None else notes.add)
            jobs = {lane: job_of(function, *given) for lane, function in lanes.functions.items()}
            host = jobs.pop(HOST_LANE, None)
            with self._streams.step(notes) if self._streams is not None else nullcontext(), self._guard():
                self._team.run(jobs, host)
            self._residents.keep(updates)
            return self._returned(outputs)

    def _choose(self, residents: list[Any], numbers: list[Any]) -> Lanes:
        """Returns the lanes of this step."""
        if self._graphed is None:
            return self._lanes
        with self._guard():
            return self._graphed.lanes(residents, numbers)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Leaves CUDA and the graphs in order when what is inside fails."""
        try:
            yield
        except BaseException as failure:
            if self._graphed is not None:
                self._graphed.give_up(failure)
            raise

    def _returned(self, outputs: list[Tensor]) -> Any:
        if self._step.step.optimizer is None:
            return outputs[0] if len(outputs) == 1 else outputs
        loss = outputs[0]
        for other in outputs[1:]:  # of micro-batches: each is its part of the whole
            loss = loss + other.to(loss.device)
        return loss


def _places(placed: PlacedStep, lanes: Lanes) -> dict[int, RealDevice]:
    """Returns where each lane runs that is not the host's."""
    every = {number: device for number, device in enumerate(placed.devices) if not device.is_gpu}
    every |= {pinning_lane(number): device.pinning for number, device in every.items()}
    return {lane: every[lane] for lane in lanes.functions if lane != HOST_LANE}


class _Stopwatch:
    """The seconds from the first pause to the last, without what pauses take."""

    def __init__(self, rest: Callable[[], None]) -> None:
        self.seconds, self._rest = 0.0, rest
        self._begun: float | None = None

    def pause(self) -> None:
        if self._begun is not None:
            self.seconds += perf_counter() - self._begun
        self._rest()
        self._begun = perf_counter()
