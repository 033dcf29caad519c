"""A plan in the words of Hugging Face Accelerate: a device for each module, where that can say it."""

import re
from collections.abc import Sequence

import torch

from placewise.core.errors import ExecutionError
from placewise.core.graph import PHASES, TENSOR_KINDS, Graph
from placewise.core.grouping import module_path

MODEL_KINDS = (TENSOR_KINDS.index("parameter"), TENSOR_KINDS.index("buffer"))
MOST_NAMED = 5  # of the modules that are split


def device_map(graph: Graph, placement: Sequence[str]) -> dict[str, int | torch.device]:
    """Returns the device of each module: the number of a GPU, or `torch.device("cpu")`; "" is the whole model.

    `placement` has a device's name for each of the graph's groups. Modules that are on one device with all that is in
    them are named once. A module's own tensors and all of its ops, backward and update included, must be on one device;
    an ExecutionError names those that are split. What a module of other modules computes between them (a sum, a view)
    is left to Accelerate, which does it where its inputs are.
    """
    devices, owners = _devices_by_module(graph, placement)
    split = [path for path in owners if len(devices[path]) > 1]
    if split:
        named = ", ".join(f"{path or 'the model itself'} ({', '.join(devices[path])})" for path in split[:MOST_NAMED])
        rest = f" and {len(split) - MOST_NAMED} more" if len(split) > MOST_NAMED else ""
        raise ExecutionError(f"the plan can't be said by module, for it splits {named}{rest}")
    found: dict[str, int | torch.device] = {}
    for path in sorted(owners):
        top = _largest_on_one_device(path, devices)
        found[top] = _accelerate_device(devices[path][0])
    return found


def _devices_by_module(graph: Graph, placement: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Returns the devices of each module with all that is in it, in order of appearance, and those that have tensors."""
    ops, tensors = graph.ops, graph.tensors
    own: dict[str, dict[str, None]] = {}
    owners: dict[str, None] = {}
    for tensor in range(len(tensors)):
        if graph.producer[tensor] < 0 and tensors.kinds[tensor] in MODEL_KINDS:
            path = tensors.names[tensor].rpartition(".")[0]
            home, reader = tensors.home[tensor], graph.first_reader[tensor]
            group = home if home >= 0 else ops.groups[reader] if reader >= 0 else -1
            owners[path] = None
            own.setdefault(path, {})
            if group >= 0:
                own[path][placement[group]] = None
    for op in range(len(ops)):
        path = module_path(graph, op)
        if path in owners or ops.phases[op] != PHASES.index("update"):
            own.setdefault(path, {})[placement[ops.groups[op]]] = None
    whole: dict[str, dict[str, None]] = {path: dict(found) for path, found in own.items()}
    for path in owners:
        for outer in _outer(path):
            whole.setdefault(outer, {}).update(own[path])
    return {path: list(found) for path, found in whole.items()}, list(owners)


def _outer(path: str) -> list[str]:
    """Returns the modules that a module is in, from the nearest to the model itself."""
    parts = path.split(".") if path else []
    return [".".join(parts[:i]) for i in range(len(parts) - 1, -1, -1)]


def _largest_on_one_device(path: str, devices: dict[str, list[str]]) -> str:
    for outer in _outer(path):
        if len(devices[outer]) > 1:
            return path
        path = outer
    return path


def _accelerate_device(name: str) -> int | torch.device:
    """Returns a device's name as Accelerate wants it; its string "cpu" would mean offloading."""
    if match := re.fullmatch(r"(?:gpu|cuda):(\d+)", name):
        return int(match[1])
    if re.fullmatch(r"cpu(:\d+)?", name):
        return torch.device("cpu")
    raise ExecutionError(f"device {name!r}: only gpu:0, gpu:1, ... and cpu can be said to Accelerate")
