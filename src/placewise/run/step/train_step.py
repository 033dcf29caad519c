"""A compiled step: a real batch in, the loss out, and the model's own parameters updated."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor

from placewise.core.errors import ExecutionError
from placewise.core.quantities import format_count
from placewise.graph_capture.capture import CapturedStep
from placewise.graph_capture.module_attributes import modules_by_path
from placewise.run.backends.cpu_threads import Cancellation, LaneThreads
from placewise.run.backends.protocol import LaunchRecorder, Network, Streams
from placewise.run.codegen.host_arithmetic import HostArithmetic, HostScalars
from placewise.run.codegen.lanes import HOST_LANE, Lanes, LaneSetup, LaneWriter, pinning_lane
from placewise.run.codegen.result_layouts import ResultLayouts
from placewise.run.codegen.update_gate import UpdateGate
from placewise.run.devices import RealDevice, group_by_backend
from placewise.run.lower.instructions import RunOp
from placewise.run.lower.placed_step import PlacedStep
from placewise.run.step.failed_steps import Before, FailedSteps
from placewise.run.step.preconditions import check_preconditions
from placewise.run.step.replay import WARM_UP, Replay
from placewise.run.step.residents import Residents
from placewise.run.step.state_parts import load_state_part, state_part
from placewise.run.step.step_result import StepResult, fill, loss_of, model_output
from placewise.run.step.turn import Turn
from placewise.run.step_trace import StepTrace

UNSTEADY_STEPS = 2  # plain steps while memory is allocated, or the step that records and the first that replays


class TrainStep:
    """Runs a captured step as it was placed; `plan.compile(step)` makes one.

    `train_step(batch)` returns the loss; a StepResult, if the step was captured with `outputs=True`; for inference, what the
    model returned. It updates the model's own parameters and buffers and the optimizer's own state, which can be used and
    changed between calls. `grad_norm` is the norm of the last step's gradients before they were clipped, if they are. Only
    one thread at a time can call it, in the process that compiled it.
    """

    grad_norm: Tensor | None = None

    def __init__(
        self, step: CapturedStep, placed: PlacedStep, streams: Streams | None = None,
        make_recorder: Callable[[], LaunchRecorder] | None = None, network: Network | None = None,
    ) -> None:  # fmt: skip
        step.guard.check()
        self.placed, self._step, self._streams, self._turn = placed, step, streams, Turn()
        self._residents = Residents(placed, step.step, streams)
        self._failed_steps = FailedSteps(placed.resolved)
        arithmetic, cancellation = HostArithmetic(placed.resolved), Cancellation()
        self._compute_scalars = arithmetic.build(self._residents.positions)
        self._check_branches = arithmetic.build_check(self._residents.positions)
        modules = modules_by_path(step.step.model, step.step.loss_fn)
        self._attributes = [(modules[attribute.module], attribute) for attribute in step.returned.attributes]
        self._gate, self._layouts = UpdateGate(), ResultLayouts()
        self._setup = LaneSetup(
            placed, arithmetic, self._residents.positions, streams, cancellation, self._gate, self._layouts, network
        )
        self._lanes = LaneWriter(self._setup).write()
        self._traced: Lanes | None = None
        self._replay = Replay(make_recorder, self._setup) if make_recorder is not None else None
        self._threads = LaneThreads(_lane_devices(placed, self._lanes), cancellation)

    def __repr__(self) -> str:
        names = ", ".join(device.name for device in self.placed.devices)
        return f"TrainStep({self._step.graph.name!r}: {format_count(len(self._step.graph.ops), 'op')} on {names})"

    def __call__(self, batch: Any) -> Any:
        """Runs one step and returns its loss."""
        return self._turn.run(partial(self._run, batch))  # which can also trace, or run other lanes

    def bring_home(self, batch: Any) -> Any:
        """Returns the batch with its tensors on their home devices, and moves the model's and the optimizer's there."""
        return self._turn.run(partial(self._residents.bring_home, batch))

    def collect(self) -> None:
        """Brings the model's and the optimizer's tensors from all ranks to each of them; all ranks must call it.

        A rank updates only what lives on its own devices. Afterwards every rank has the whole model, to save or evaluate.
        """
        self._turn.run(self._collect)

    def _collect(self) -> None:
        network, homes = self._setup.network, self.placed.tensor_devices.tolist()
        if network is None:
            return
        own = self._residents.own_tensors()
        if any(tensor.is_meta for _, tensor in own):
            raise ExecutionError(
                "this rank has only its own part of the model, so it can't collect the rest: save all parts with "
                "torch.distributed.checkpoint"
            )
        with torch.no_grad():
            for number, tensor in own:
                network.collect(tensor, homes[number])

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of model and optimizer by name, for torch.distributed.checkpoint; of a rank, what it keeps.

        `dcp.save({"training": train_step}, checkpoint_id=folder)` on all ranks writes the whole state, `dcp.load` reads it
        into the model and the optimizer, also for a plan of other hosts or of one machine.
        """
        return state_part(self._step.step.modules, self._step.step.optimizer, self.placed.far)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets what `state_dict` returns to these values."""
        with torch.no_grad():
            load_state_part(self._step.step.modules, self._step.step.optimizer, state)

    def trace(self, batch: Any) -> StepTrace:
        """Runs one step without a recording, and returns when everything ran and how many bytes it made."""
        return self._turn.run(partial(self._run_traced, batch))

    def _run_traced(self, batch: Any) -> StepTrace:
        self._forget_recording()
        if self._traced is None:
            self._traced = LaneWriter(self._setup, is_traced=True).write()
        trace = StepTrace()
        self._run(batch, self._traced, trace)
        return trace

    def trace_ahead(self, batch: Any, steps: int = 1) -> list[StepTrace]:
        """Runs some steps whose times are those of the devices alone: the host stays ahead of them.

        Rows are launched together, as in a usual step; a row's time is that of its first instruction.
        """
        return self._turn.run(partial(self._run_ahead, batch, steps))

    def _run_ahead(self, batch: Any, steps: int) -> list[StepTrace]:
        assert self._streams is not None
        self._forget_recording()
        writer = LaneWriter(self._setup, is_traced=True, pause=self._streams.stay_ahead())
        lanes, traces = writer.write(), [StepTrace() for _ in range(steps)]
        for trace in traces:
            trace.rows = writer.rows
            self._run(batch, lanes, trace)
        return traces

    def host_seconds(self, batch: Any, steps: int = 1) -> list[float]:
        """Runs some steps and returns the host's seconds for launching each op by op, without waiting for the devices.

        A host whose queue is full has to wait. So it lets the queues run empty often, off the clock.
        """
        return self._turn.run(partial(self._run_timed, batch, steps))

    def _run_timed(self, batch: Any, steps: int) -> list[float]:
        self._forget_recording()
        stopwatch = _Stopwatch(self.synchronize)
        lanes = LaneWriter(self._setup, pause=stopwatch.pause).write()
        found = []
        for _ in range(steps):
            self._run(batch, lanes)
            stopwatch.pause()
            found.append(stopwatch.take())
        return found

    @property
    def warm_up_steps(self) -> int:
        """How many steps to run before measuring: the first ones allocate memory and, if launches are recorded, record."""
        return UNSTEADY_STEPS if self._replay is None else WARM_UP + UNSTEADY_STEPS

    @property
    def num_recorded_ops(self) -> int:
        """The number of ops that are in recorded segments."""
        return 0 if self._replay is None else self._replay.num_recorded_ops

    def synchronize(self) -> None:
        """Returns when all devices have finished their work; those with threads have when a call returns."""
        if self._streams is not None:
            self._streams.synchronize_all()

    def reset_peaks(self) -> None:
        """Makes the allocators start to count their peaks again, without cached blocks whose sizes suited other steps."""
        for backend, devices in group_by_backend(self.placed.devices):
            backend.reset_peaks(devices)

    def allocated_bytes(self) -> dict[str, int]:
        """Returns the allocators' peaks: by device, or by what slices share; CPU devices have none."""
        peaks: dict[str, int] = {}
        for backend, devices in group_by_backend(self.placed.devices):
            peaks |= backend.peak_bytes(devices)
        return peaks

    def close(self) -> None:
        """Ends the threads, and gives back the recording and memory; the step can't be run any more."""
        self._turn.run(self._end)

    def _end(self) -> None:
        self._threads.close()
        self._forget_recording()
        for backend, _ in group_by_backend(self.placed.devices):
            backend.release_memory()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # what copy, deepcopy and pickle call
        raise ExecutionError(
            "a train step can't be copied or pickled, because it owns threads: save the plan (plan.save) and the state_dict "
            "of model and optimizer, then capture and compile there"
        )

    def _forget_recording(self) -> None:
        """Gives back the memory of recorded segments, which a plain step needs; the next step records again."""
        if self._replay is not None:
            self._replay.forget()

    def _run(self, batch: Any, lanes: Lanes | None = None, trace: StepTrace | None = None) -> Any:
        """Runs one step in these lanes, by default plain or recorded ones, and returns its loss."""
        if self._threads.is_closed:
            raise ExecutionError("the train step is closed: compile the plan again")
        if torch._C._is_any_autocast_enabled():
            raise ExecutionError(
                "autocast is on around the step, which would not follow it: use it inside the model, or pass "
                "autocast=torch.bfloat16 when you capture"
            )
        self._step.guard.check()
        program = self.placed.resolved.program
        outputs: list[Any] = [None] * len(program.outputs)
        network = self._setup.network
        with torch.no_grad(), nullcontext() if network is None else network.step():
            residents = self._residents.gather(batch)
            check_preconditions(program.preconditions, residents, self._residents.positions)
            self._check_branches(residents)
            before = self._failed_steps.look(residents)
            scalars = HostScalars(partial(self._compute, residents, before))
            try:
                if not self._computes_late or lanes is not None:
                    scalars.get()
                lanes = self._choose_lanes(residents, scalars) if lanes is None else lanes
                mailbox: list[Any] = [None] * lanes.mailbox_size
                given = (residents, scalars, mailbox, outputs, None if trace is None else trace.add)
                jobs = {lane: partial(function, *given) for lane, function in lanes.functions.items()}
                host = jobs.pop(HOST_LANE, None)
                with self._streams.step(trace) if self._streams is not None else nullcontext(), self._recovering():
                    self._threads.run(jobs, host)
                    scalars.get()
            except BaseException as failure:
                is_replayed = self._replay is not None and lanes not in (None, self._lanes)
                updated = self._failed_steps.recover(residents, before, failure, is_replayed)
                self._residents.keep(scalars.updates, updated)
                raise
            if not self._layouts.is_known and self._gate.is_open:
                self._layouts.is_known = True
                self._lanes = LaneWriter(self._setup).write()
            if self._gate.is_open:
                self._residents.keep(scalars.updates)
            else:
                self._failed_steps.set_back(residents, before)
                self._threads.cancellation.reset()
            return self._result(self._share(outputs))

    def _share(self, outputs: list[Any]) -> list[Any]:
        """Returns the outputs of all ranks, and leaves the random generators of all ranks alike."""
        network, placed = self._setup.network, self.placed
        if network is None:
            return outputs
        homes, storages = placed.tensor_devices.tolist(), placed.resolved.storages
        return network.share(outputs, [homes[storages[slot]] for slot in placed.resolved.program.outputs], self._drawing)

    @cached_property
    def _drawing(self) -> int | None:
        """The device of an op that draws random numbers."""
        placed = self.placed
        runs = (placed.whole or placed.instructions).sequence
        return next((run.device for run in runs if isinstance(run, RunOp) and run.op in placed.random_ops), None)

    @property
    def _computes_late(self) -> bool:
        """Whether the host launches forward and backward pass before it computes what the update reads.

        A branch by a result may refuse the step, and has to do so before anything has changed.
        """
        is_alone = list(self._lanes.functions) == [HOST_LANE]
        return self._replay is None and is_alone and not self._setup.arithmetic.late_branches

    def _compute(self, residents: list[Any], before: Before) -> tuple[list[Any], list[Any]]:
        self._failed_steps.look_at_counters(residents, before)
        return self._compute_scalars(residents)

    def _choose_lanes(self, residents: list[Any], scalars: HostScalars) -> Lanes:
        if self._replay is None:
            return self._lanes
        with self._recovering():
            return self._replay.lanes(self._lanes, residents, scalars.get())

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        """Leaves streams and the recording in order when what is inside fails."""
        try:
            yield
        except BaseException as failure:
            if self._replay is not None:
                self._replay.recover(failure)
            raise

    def _result(self, outputs: list[Tensor]) -> Any:
        returned = self._step.returned
        if returned.found_inf is not None:
            self._residents.update_scale(outputs[returned.found_inf])
        self.grad_norm = None if returned.grad_norm is None else outputs[returned.grad_norm]
        for module, attribute in self._attributes:
            setattr(module, attribute.name, fill(attribute.structure, [outputs[p] for p in attribute.positions]))
        output = None if returned.output is None else model_output(returned.output, outputs)
        if not returned.losses:
            return output
        loss = loss_of(returned, outputs)
        return loss if returned.output is None else StepResult(loss, output, self.grad_norm)


def _lane_devices(placed: PlacedStep, lanes: Lanes) -> dict[int, RealDevice]:
    """Returns where each lane runs that has a thread."""
    devices = {number: device for number, device in enumerate(placed.devices) if not device.launches_from_host}
    devices |= {pinning_lane(number): device.pinning_thread for number, device in devices.items()}
    sending = RealDevice("sending", "cpu", "cpu", threads=1)
    return {lane: devices.get(lane, sending) for lane in lanes.functions if lane != HOST_LANE}


class _Stopwatch:
    """The seconds from the first pause to the last, without the pauses."""

    def __init__(self, rest: Callable[[], None]) -> None:
        self.seconds, self._rest = 0.0, rest
        self._started: float | None = None

    def pause(self) -> None:
        if self._started is not None:
            self.seconds += perf_counter() - self._started
        self._rest()
        self._started = perf_counter()

    def take(self) -> float:
        """Returns the seconds, and starts again from zero at the next pause."""
        seconds, self.seconds, self._started = self.seconds, 0.0, None
        return seconds
