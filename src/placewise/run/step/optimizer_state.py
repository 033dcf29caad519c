"""The optimizer's state as its first step would create it, without taking that step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from placewise.core.errors import ExecutionError
from placewise.graph_capture.meta_copies import copy_optimizer
from placewise.graph_capture.program import Program


def make_state(program: Program, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Creates the optimizer's state that the program reads and that does not exist yet.

    The optimizer's own code creates it: a copy of the optimizer takes a step with gradients of zero. That step writes
    neither parameters nor state, so state keeps the value that it was created with.
    """
    parameters = dict(model.named_parameters())
    wanted = [resident for resident in program.residents if resident.kind == "state"]
    missing = dict.fromkeys(r.name for r in wanted if r.key not in optimizer.state.get(parameters[r.name], {}))
    if not missing:
        return
    if isinstance(optimizer, torch.optim.SGD):
        _make_momentum(optimizer, {parameters[name] for name in missing})
        return
    stand_ins = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in parameters.values()}
    copied = copy_optimizer(optimizer, dict(stand_ins))
    protection = _WriteProtection(stand_ins.values())
    for name, parameter in parameters.items():
        stand_in = stand_ins[id(parameter)]
        copied.state[stand_in] = _FirstValues(protection, optimizer.state.get(parameter, {}))
        stand_in.grad = torch.zeros_like(parameter) if name in missing else None
    with protection, torch.no_grad():
        copied.step()
    for name in missing:
        made = copied.state[stand_ins[id(parameters[name])]]
        assert isinstance(made, _FirstValues)
        optimizer.state[parameters[name]] = {**made.first, **optimizer.state.get(parameters[name], {})}
    for resident in wanted:
        state = optimizer.state[parameters[resident.name]]
        if resident.like is not None and not isinstance(value := state[str(resident.key)], Tensor):
            device = parameters[resident.name].device  # a number that the first step replaces by a tensor
            state[str(resident.key)] = torch.full(resident.like.shape, value, dtype=resident.like.dtype, device=device)


def _make_momentum(optimizer: torch.optim.SGD, missing: set[nn.Parameter]) -> None:
    """Creates momentum of zero for SGD; its first step takes the gradient itself, which is the same without dampening."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in missing:
                if group["dampening"]:
                    raise ExecutionError(
                        "the first step of SGD with dampening differs from all others: take it in eager code"
                    )
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)


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
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, Tensor) and value.untyped_storage()._cdata in self.storages:
                return value
        return func(*args, **(kwargs or {}))


class _FirstValues(dict[str, Any]):
    """A parameter's state that remembers the first value of each key."""

    def __init__(self, protection: _WriteProtection, present: Mapping[str, Any]) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self._protection = protection
        self.update(present)

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
