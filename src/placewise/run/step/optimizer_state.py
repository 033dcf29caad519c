"""The optimizer's state as its first step would create it, without taking that step."""

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from placewise.core.errors import ExecutionError
from placewise.graph_capture.meta_copies import copy_optimizer
from placewise.graph_capture.program import Program
from placewise.graph_capture.training_step import StepModules


def make_state(program: Program, modules: StepModules, optimizer: torch.optim.Optimizer) -> None:
    """Creates the optimizer's state that the program reads and that does not exist yet.

    The optimizer's own code creates it, and it is tried out on a small parameter whether a step from this state does what
    the first step does. State that starts from the first gradient, as momentum of SGD does, is zero instead.
    """
    for resident in program.residents:
        if resident.kind == "hyper-parameter" and resident.name.isidentifier():  # what the first step makes
            first = resident.value if resident.like is None else torch.zeros(resident.like.shape, dtype=resident.like.dtype)
            optimizer.param_groups[int(resident.key)].setdefault(resident.name, first)
    parameters = dict(modules.named_parameters())
    wanted = [resident for resident in program.residents if resident.kind == "state"]
    missing = dict.fromkeys(r.name for r in wanted if r.key not in optimizer.state.get(parameters[r.name], {}))
    if not missing:
        return
    zero_keys = _keys_that_start_at_zero(optimizer, {parameters[name] for name in missing})
    stand_ins = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in parameters.values()}
    for name in [name for name in parameters if name not in missing]:
        stand_ins[id(parameters[name])].requires_grad_(False)
    made = _first_state(optimizer, stand_ins, {id(parameters[name]) for name in missing})
    for name in missing:
        parameter = parameters[name]
        state = _with_zeros(made[id(parameter)], zero_keys)
        optimizer.state[parameter] = {**state, **optimizer.state.get(parameter, {})}
    for resident in wanted:
        state = optimizer.state[parameters[resident.name]]
        if resident.like is not None and not isinstance(value := state[str(resident.key)], Tensor):
            device = parameters[resident.name].device  # a number that the first step replaces by a tensor
            state[str(resident.key)] = torch.full(resident.like.shape, value, dtype=resident.like.dtype, device=device)
        elif resident.like is not None and not value.dim():
            state[str(resident.key)] = value.to(resident.like.dtype)  # a counter is float32 where an update is fused


def _first_state(
    optimizer: torch.optim.Optimizer, stand_ins: Mapping[int, nn.Parameter], missing: Collection[int]
) -> dict[int, dict[str, Any]]:
    """Returns the state that the optimizer creates for parameters, by their ids, when they have stand-ins.

    A copy of the optimizer takes a step with gradients of zero. That step writes neither parameters nor state, so state
    keeps the value that it was created with.
    """
    copied = copy_optimizer(optimizer, dict(stand_ins))
    protection = _WriteProtection(stand_ins.values())
    for group, given in zip(copied.param_groups, optimizer.param_groups, strict=True):
        group["params"] = [stand_ins[id(p)] for p in given["params"] if id(p) in stand_ins]
    for number, stand_in in stand_ins.items():
        copied.state[stand_in] = _FirstValues(protection)
        stand_in.grad = torch.zeros_like(stand_in) if number in missing else None
    with protection, torch.no_grad():
        copied.step()
    found: dict[int, dict[str, Any]] = {}
    for number in missing:
        state = copied.state[stand_ins[number]]
        assert isinstance(state, _FirstValues)
        found[number] = state.first
    return found


def _keys_that_start_at_zero(optimizer: torch.optim.Optimizer, missing: Collection[nn.Parameter]) -> frozenset[str]:
    """Returns which entries of the state must be zero before the first step, for it to be like all others.

    The smallest parameter of each group takes two first steps: one without state, and one from the state that would be
    created. An ExecutionError if they differ, and zero does not help.
    """
    found: set[str] = set()
    for number, group in enumerate(optimizer.param_groups):
        parameter = min((p for p in group["params"] if p in missing), key=Tensor.numel, default=None)
        if parameter is None:
            continue
        generator = torch.Generator().manual_seed(0)
        values, gradient = (torch.randn(parameter.shape, generator=generator).to(parameter.dtype) for _ in range(2))
        created = _first_state(optimizer, {id(parameter): nn.Parameter(values.clone())}, {id(parameter)})[id(parameter)]
        expected = _try_step(optimizer, number, parameter, values, gradient, {})
        like = [key for key, value in created.items() if isinstance(value, Tensor) and value.shape == parameter.shape]
        keys = frozenset(like) - {"step"}
        for zero_keys in (frozenset[str](), keys):
            state = _with_zeros(created, zero_keys)
            if _same(_try_step(optimizer, number, parameter, values, gradient, state), expected):
                found |= zero_keys
                break
        else:
            raise ExecutionError(
                f"the first step of {type(optimizer).__name__} differs from all others: take it in eager code"
            )
    return frozenset(found)


def _try_step(
    optimizer: torch.optim.Optimizer, number: int, parameter: Tensor, values: Tensor, gradient: Tensor, state: dict[str, Any]
) -> dict[str, Any]:
    """Returns a parameter, under "", and its state after a step that starts from these values."""
    stand_in = nn.Parameter(values.clone())
    stand_in.grad = gradient.clone()
    copied = copy_optimizer(optimizer, {id(parameter): stand_in})
    for i, group in enumerate(copied.param_groups):
        group["params"] = [stand_in] if i == number else []
    if state:
        copied.state[stand_in].update(copy.deepcopy(state))
    with torch.no_grad():
        copied.step()
    return {"": stand_in.detach(), **copied.state[stand_in]}


def _with_zeros(state: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: torch.zeros_like(value) if key in keys else value for key, value in state.items()}


def _same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Returns whether two states have the same numbers; values that are not finite are the same ones."""
    return all(
        torch.equal(torch.nan_to_num(value), torch.nan_to_num(found[key]))
        if isinstance(value, Tensor)
        else value == found[key]
        for key, value in expected.items()
        if key in found
    )


class _WriteProtection(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skips every write into memory that must stay as it is."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        self.tensors: list[Tensor] = []  # keeps their addresses from being reused

    def protect(self, tensor: Tensor) -> None:
        self.storages.add(tensor.untyped_storage()._cdata)
        self.tensors.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, Tensor) and value.untyped_storage()._cdata in self.storages:
                return value
        return func(*args, **kwargs)


class _FirstValues(dict[str, Any]):
    """A parameter's state that remembers the first value of each key."""

    def __init__(self, protection: _WriteProtection) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self._protection = protection

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            is_counter = isinstance(value, Tensor) and not value.dim()  # it must count, or the step would divide by zero
            self.first[key] = value.clone() if is_counter else value
            if isinstance(value, Tensor) and not is_counter:
                self._protection.protect(value)
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]
