"""Runs a captured step with real tensors, op by op in program order: the meaning of a Program in thirty lines."""

from typing import Any

import torch
from torch import Tensor

from placewise.graph_capture.program import HERE, Program, Resident, Slot
from placewise.graph_capture.whole_passes import SavedPass


def run(
    program: Program,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    parts: list[Any],
    loss_fn: Any = None,
) -> list[Tensor]:
    """Runs one step in place on the model, the optimizer and a loss that is a module; `parts` are the micro-batches.

    Returns the outputs.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    if isinstance(loss_fn, torch.nn.Module):
        parameters |= {f"loss:{name}": parameter for name, parameter in loss_fn.named_parameters()}
        buffers |= {f"loss:{name}": buffer for name, buffer in loss_fn.named_buffers()}
    values: list[Any] = [None] * program.num_slots
    for resident in program.residents:
        values[resident.slot] = _resident(resident, parameters, buffers, optimizer, parts)

    def fill(argument: Any) -> Any:
        if type(argument) is Slot:
            return values[argument]
        return type(argument)(map(fill, argument)) if type(argument) in (list, tuple) else argument

    with torch.no_grad():
        for call in program.calls:
            kwargs = {key: "cpu" if value is HERE else fill(value) for key, value in call.kwargs.items()}
            result = call.function(*fill(call.args), **kwargs)
            kinds = (Tensor, SavedPass)
            found = [result] if not isinstance(result, (tuple, list)) else [r for r in result if isinstance(r, kinds)]
            for slot, value in zip(call.results, found, strict=True):
                values[slot] = value
    for branch in program.branches:
        assert branch.function(*fill(branch.args)) == branch.outcome, branch.subject
    for resident, slot in program.updates:
        optimizer.state[parameters[resident.name]][resident.key] = values[slot]  # type: ignore[union-attr]
    return [values[slot] for slot in program.outputs]


def _resident(resident: Resident, parameters: Any, buffers: Any, optimizer: Any, parts: list[Any]) -> Any:
    match resident.kind:
        case "parameter":
            return parameters[resident.name]
        case "buffer":
            return buffers[resident.name]
        case "state":
            return optimizer.state[parameters[resident.name]][resident.key]
        case "input":
            return eval(resident.name, {"batch": parts[max(int(resident.key), 0)]})
        case "hyper-parameter":
            name, _, index = resident.name.partition("[")
            value = optimizer.param_groups[resident.key][name]
            return value[int(index[:-1])] if index else value
    assert resident.value is not None
    return resident.value.clone()
