"""Records what a step does with its gradients: it unscales and clips them, and the optimizer updates the parameters."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from placewise.core.errors import CaptureError
from placewise.graph_capture.fused_updates import prepare_fused, recorded_fused_updates
from placewise.graph_capture.graph_builder import UPDATE
from placewise.graph_capture.host_scalars import HostScalar, recorded_functions
from placewise.graph_capture.meta_copies import SWITCHES, adopt_state
from placewise.graph_capture.meta_kernels import CachedMetaMode
from placewise.graph_capture.meta_modes import MetaMode, MetaStateMode
from placewise.graph_capture.program import Resident
from placewise.graph_capture.random_tape import HostGenerators
from placewise.graph_capture.recorder import Recorder
from placewise.graph_capture.training_step import TrainingStep

Optimizer = torch.optim.Optimizer

OWN_ATTRIBUTES = ("state", "param_groups", "defaults", "_step_count", "_opt_called")  # of PyTorch, and of its schedules


@dataclass(frozen=True, eq=False)
class RecordedUpdate:
    """What the update leaves to return, and from which op on it is skipped if a gradient is not finite."""

    grad_norm: Tensor | None = None  # of all gradients, before they are clipped
    found_inf: Tensor | None = None  # above 0 if a gradient is not finite; None without a GradScaler
    first_op: int = 0  # of the optimizer's own step


def record_update(step: TrainingStep, original: Optimizer, scale: Tensor | None, recorder: Recorder) -> RecordedUpdate:
    """Records the update of a step on the meta device; `original` is the user's optimizer, which may have state."""
    optimizer = step.optimizer
    assert optimizer is not None
    names = {id(parameter): name for name, parameter in step.modules.named_parameters()}
    gradients = {id(p): p.grad for p in step.modules.parameters() if p.grad is not None}
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not trained:
        raise CaptureError("no parameter of the optimizer gets a gradient")
    recorder.phase, recorder.micro_batch, recorder.path = UPDATE, -1, ""
    for number, gradient in gradients.items():
        recorder.set_owner(gradient, names[number])
    found_inf = None if scale is None else _unscale([gradients[id(p)] for p in trained], scale, recorder)
    grad_norm = _clip(step, recorder)
    _make_state(optimizer, original, recorder)
    _set_back_groups(optimizer, original)
    prepare_fused(optimizer, original)
    numbers = [entry for p in trained for entry in _add_state(optimizer, p, names[id(p)], recorder)]
    tensors = {id(p): {k: v for k, v in optimizer.state[p].items() if isinstance(v, Tensor)} for p in trained}
    first_op = len(recorder.graph.op_names)
    _record_step(optimizer, recorder)
    if found_inf is not None:
        _wait_for(recorder.tensor_of(found_inf), first_op, recorder)
    _record_replaced_numbers(numbers, recorder)
    for parameter in trained:
        _record_replaced_tensors(names[id(parameter)], tensors[id(parameter)], optimizer.state[parameter], recorder)
    if recorder.program.has_lost_numbers:
        raise CaptureError(
            "the optimizer computes with a number that changes from step to step (its step counter, the learning rate) in "
            "a way that can't be recorded (numpy, `from math import sqrt`): use Python's + - * / **, `math.sqrt` or tensors"
        )
    return RecordedUpdate(grad_norm, found_inf, first_op)


# --- gradients ---


def _unscale(gradients: list[Tensor], scale: Tensor, recorder: Recorder) -> Tensor:
    """Divides the gradients by the loss's scale, as GradScaler does; returns whether one of them is not finite."""
    if any(gradient.dtype == torch.float16 for gradient in gradients):
        raise CaptureError("a GradScaler can't unscale float16 gradients: keep the weights in float32 and use autocast")
    recorder.path = "grad_scaler"
    with torch.no_grad(), MetaMode(recorder, track_scalars=True), recorder:
        inverse = scale.double().reciprocal().float().item()
        found = []
        for gradient in gradients:
            found.append(torch.zeros(1))
            torch._amp_foreach_non_finite_check_and_unscale_([gradient], found[-1], torch.full((), inverse))
        found_inf = torch.cat(found).max()
    recorder.path = ""
    return found_inf


def _clip(step: TrainingStep, recorder: Recorder) -> Tensor | None:
    """Clips the gradients by value and by their norm, as the step asks for; returns the norm before."""
    norm = None
    with torch.no_grad(), MetaMode(recorder), recorder:
        if step.clip_grad_value is not None:
            recorder.path = "clip_grad_value"
            nn.utils.clip_grad_value_(step.model.parameters(), step.clip_grad_value, foreach=False)
        if step.clip_grad_norm is not None:
            recorder.path = "clip_grad_norm"
            norm = nn.utils.clip_grad_norm_(step.model.parameters(), step.clip_grad_norm, foreach=False)
    recorder.path = ""
    return norm


def _wait_for(tensor: int, first_op: int, recorder: Recorder) -> None:
    """Makes the ops from this one on wait for the op that makes a tensor: only then it is known whether they run."""
    graph = recorder.graph
    maker = next(op for op, writes in enumerate(graph.writes) if tensor in writes)
    made = {written for writes in graph.writes[first_op:] for written in writes}
    for op in range(first_op, len(graph.op_names)):
        if made.isdisjoint(graph.reads[op]) and maker not in graph.after[op]:
            graph.after[op].append(maker)


# --- the optimizer's step ---


def _record_step(optimizer: Optimizer, recorder: Recorder) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for key in [key for key in group if key not in ("params", "param_names", *SWITCHES)]:
            group[key] = _live_hyper_parameter(group[key], key, number, recorder)
    kept, generators = _PythonState(optimizer), HostGenerators()
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    with MetaMode(recorder, track_scalars=True), recorder, recorded_functions(), recorded_fused_updates(recorder):
        optimizer.step()
    if name := kept.changed():
        raise CaptureError(
            f"the optimizer changes {name} in every step, which a recorded step can't follow: keep a number that counts in "
            "its parameter groups, or in the state of each parameter"
        )
    if name := generators.changed():
        raise CaptureError(
            f"the optimizer draws numbers from {name}, and a recorded step would repeat them: draw them with torch"
        )
    for number, (group, before) in enumerate(zip(optimizer.param_groups, settings, strict=True)):
        for key in [key for key, value in before.items() if group[key] is not value]:
            if type(group[key]) is not HostScalar or recorder.program.is_late(group[key].slot):
                raise CaptureError(f"the optimizer's step changes {key!r} of its parameter group {number}")
            recorder.program.update_hyper_parameter(key, number, group[key].slot)


class _PythonState:
    """What an optimizer keeps in Python besides its parameter groups and the tensors and numbers of parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before = self._present()

    def changed(self) -> str:
        """Returns the name of what is not what it was; "" if all is."""
        present = self._present()
        return next((name for name, value in present.items() if self._before.get(name) != value), "")

    def _present(self) -> dict[str, str]:
        found = {
            f"its attribute {name!r}": repr(value)
            for name, value in vars(self._optimizer).items()
            if name not in OWN_ATTRIBUTES and _is_plain(value)
        }
        for key, entry in self._optimizer.state.items():
            if not isinstance(key, Tensor):
                found[f"its state {key!r}"] = repr(entry) if _is_plain(entry) else ""
            elif isinstance(entry, dict):
                for name, value in entry.items():
                    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                    if not is_number and _is_plain(value):
                        found[f"its state {name!r}"] = found.get(f"its state {name!r}", "") + repr(value)
        return found


def _is_plain(value: Any) -> bool:
    """Returns whether a value consists of numbers and texts alone."""
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float, str))


def _live_hyper_parameter(value: Any, name: str, group: int, recorder: Recorder) -> Any:
    """Returns a hyper-parameter whose value every step reads again: as a number that is recorded, or one that must stay."""
    if isinstance(value, Tensor):
        recorder.program.add_host_resident(value, "hyper-parameter", name, group)
        return value
    if type(value) in (tuple, list):
        return type(value)([_live_hyper_parameter(v, f"{name}[{i}]", group, recorder) for i, v in enumerate(value)])
    slot = recorder.program.add_hyper_parameter(name, group, value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return HostScalar.of(value, slot, recorder.program) if is_number else value


def _make_state(optimizer: Optimizer, original: Optimizer, recorder: Recorder) -> None:
    """Lets the optimizer create its state, as in its first step; state that the original already has replaces it."""
    with MetaStateMode(recorder), CachedMetaMode(recorder.kernels):
        try:
            optimizer.step()
        except KeyError:  # state that its constructor creates (Adagrad in older torch): the original has it
            optimizer.state.clear()
    for group, given in zip(optimizer.param_groups, original.param_groups, strict=True):
        for parameter, key in zip(group["params"], given["params"], strict=True):
            if key in original.state:
                adopt_state(optimizer, parameter, original.state[key])


def _set_back_groups(optimizer: Optimizer, original: Optimizer) -> None:
    """Gives the parameter groups the values that they have before a step; one that the first step makes counts from 0."""
    for number, (group, given) in enumerate(zip(optimizer.param_groups, original.param_groups, strict=True)):
        for key in [key for key in group if key != "params"]:
            if key not in given and group[key] != 1:
                raise CaptureError(
                    f"the optimizer's first step makes {key!r} of its parameter group {number}: take it eagerly"
                )
            if key not in SWITCHES:
                group[key] = given.get(key, torch.zeros_like(group[key]) if isinstance(group[key], Tensor) else 0)


def _add_state(
    optimizer: Optimizer, parameter: nn.Parameter, name: str, recorder: Recorder
) -> list[tuple[dict[str, Any], Resident, type]]:
    """Adds a parameter's optimizer state; returns the states that are Python numbers: dict, resident, type."""
    state = optimizer.state.get(parameter, {})
    numbers = []
    for key, value in state.items():
        if isinstance(value, Tensor) and value.is_meta:
            recorder.add_resident(value, "state", name, key, owner=name)
        elif isinstance(value, Tensor):
            recorder.program.add_host_resident(value, "state", name, key)
        elif type(value) in (int, float):
            resident = recorder.program.add_number("state", name, key)
            state[key] = HostScalar.of(value, resident.slot, recorder.program)
            numbers.append((state, resident, type(value)))
    return numbers


def _record_replaced_tensors(name: str, before: dict[str, Tensor], state: dict[str, Any], recorder: Recorder) -> None:
    """Records what becomes of each tensor of a parameter's state that the step has replaced: one on a device is copied."""
    for key, tensor in before.items():
        value = state.get(key)
        if value is tensor:
            continue
        if not isinstance(value, Tensor) or value.size() != tensor.size() or value.is_meta != tensor.is_meta:
            raise CaptureError(f"the optimizer's step sets its state {key!r} to a value that can't be recorded")
        if value.is_meta:
            with torch.no_grad(), MetaMode(recorder), recorder:
                tensor.copy_(value)
            state[key] = tensor
        else:
            program = recorder.program
            resident = next(r for r in program.residents if (r.kind, r.name, r.key) == ("state", name, key))
            program.update_number(resident, program.result_slot(value))


def _record_replaced_numbers(numbers: list[tuple[dict[str, Any], Resident, type]], recorder: Recorder) -> None:
    """Records the Python numbers in the optimizer's state that the step has replaced."""
    for state, resident, kind in numbers:
        value = state[str(resident.key)]
        if type(value) is not HostScalar:
            raise CaptureError(f"the optimizer's step sets its state {resident.key!r} to a value that can't be recorded")
        if recorder.program.is_late(value.slot):
            raise CaptureError(
                f"the optimizer's step keeps a number that it reads from a tensor: its state {resident.key!r}"
            )
        if value.slot != resident.slot:
            slot = recorder.program.host_call(int, (value.slot,)) if kind is int else value.slot
            recorder.program.update_number(resident, slot)
