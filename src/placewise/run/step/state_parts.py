"""The state of training by name, as torch.distributed.checkpoint saves and loads it; of a rank, the part that it keeps.

The names are those of PyTorch's own `get_state_dict`: parameters and buffers under "model", and under "optimizer" the state
of each parameter and the groups with the names of their parameters.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from placewise.core.errors import ExecutionError
from placewise.graph_capture.training_step import StepModules
from placewise.run.lower.placed_step import Far


def state_part(modules: StepModules, optimizer: torch.optim.Optimizer | None, far: Far) -> dict[str, Any]:
    """Returns the state without what another rank keeps; its tensors are the model's and the optimizer's own."""
    tensors = {**_named_parameters(modules), **dict(modules.named_buffers(remove_duplicate=False))}
    far_ids = {id(tensors[name]) for name, key in far if not key}  # a tensor can have several names
    part: dict[str, Any] = {
        "model": {
            name: value
            for name, value in modules.state_dict().items()
            if name not in tensors or id(tensors[name]) not in far_ids
        }
    }
    if optimizer is not None:
        part["optimizer"] = {"state": _optimizer_part(modules, optimizer, far), "param_groups": _groups(modules, optimizer)}
    return part


def load_state_part(modules: StepModules, optimizer: torch.optim.Optimizer | None, part: Mapping[str, Any]) -> None:
    """Sets the state to these values; what is not among them stays as it is."""
    unknown = [key for key in part["model"] if key.startswith("loss:") and "loss:" not in modules.modules]
    for prefix, module in modules.modules.items():
        mine = {key: value for key, value in part["model"].items() if key.startswith("loss:") == bool(prefix)}
        given = {key.removeprefix(prefix): value for key, value in mine.items()}
        unknown += module.load_state_dict({**module.state_dict(), **given}, strict=False).unexpected_keys
    if unknown:
        raise ExecutionError(f"the checkpoint has {unknown[0]}, the model has not")
    if optimizer is None:
        return
    parameters = _named_parameters(modules)
    for name, state in part["optimizer"]["state"].items():
        if name not in parameters:
            raise ExecutionError(f"the checkpoint has optimizer state of {name}, the model has no such parameter")
        own = optimizer.state[parameters[name]]
        for key, value in state.items():
            if isinstance(value, Tensor) and isinstance(own.get(key), Tensor):
                own[key].copy_(value)
            else:
                own[key] = value
    for group, values in zip(optimizer.param_groups, part["optimizer"]["param_groups"], strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})


def _optimizer_part(modules: StepModules, optimizer: torch.optim.Optimizer, far: Far) -> dict[str, dict[str, Any]]:
    found = {}
    for name, parameter in modules.named_parameters():
        state = {key: value for key, value in optimizer.state.get(parameter, {}).items() if (name, key) not in far}
        if state:
            found[name] = state
    return found


def _groups(modules: StepModules, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    names = {id(parameter): name for name, parameter in modules.named_parameters()}
    return [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]


def _named_parameters(modules: StepModules) -> dict[str, Any]:
    return dict(modules.named_parameters(remove_duplicate=False))
