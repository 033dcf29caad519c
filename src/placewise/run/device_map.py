"""A plan as a device_map of Hugging Face Accelerate: a device for each module."""

import re
from collections.abc import Sequence

import numpy as np
import torch

from placewise.core.errors import ExecutionError
from placewise.core.graph import TENSOR_KINDS, Graph
from placewise.core.grouping import module_path

MODEL_KINDS = (TENSOR_KINDS.index("parameter"), TENSOR_KINDS.index("buffer"))

LOSS = "loss"  # the path of a loss that is a module; it is not part of the model

MOST_NAMED = 5  # modules in an error


def export_device_map(graph: Graph, placement: Sequence[str]) -> dict[str, int | torch.device]:
    """Returns the device of each module: the number of a GPU, or `torch.device("cpu")`; "" is the whole model.

    `placement` has a device's name for each of the graph's groups. A module that is on one device with all modules in it has
    one entry; if only its own tensors are on one device, each of these has an entry. A module's own tensors and its own
    ops, backward and update included, must be on one device; an ExecutionError names modules that are split. What a module
    without tensors computes between others (a sum, a view) is left to Accelerate.
    """
    own, tensors = _devices_by_module(graph, placement)
    split = [path for path in tensors if len(own[path]) > 1]
    if split:
        named = ", ".join(f"{path or 'the model itself'} ({', '.join(own[path])})" for path in split[:MOST_NAMED])
        rest = f" and {len(split) - MOST_NAMED} more" if len(split) > MOST_NAMED else ""
        raise ExecutionError(f"the plan has no device_map, because it splits {named}{rest}")
    whole = {path: dict(own[path]) for path in tensors}
    for path in tensors:
        for outer in _outer(path):
            whole.setdefault(outer, {}).update(own[path])
    found: dict[str, int | torch.device] = {}
    for path in sorted(tensors):
        names = [_largest_on_one_device(path, whole)] if len(whole[path]) == 1 else tensors[path]
        found |= dict.fromkeys(names, _accelerate_device(next(iter(own[path]))))
    return found


def _devices_by_module(graph: Graph, placement: Sequence[str]) -> tuple[dict[str, dict[str, None]], dict[str, list[str]]]:
    """Returns the devices of each module's own ops and tensors, and the tensors of each module that gets an entry."""
    ops, names = graph.ops, graph.tensors.names
    own: dict[str, dict[str, None]] = {}
    tensors: dict[str, list[str]] = {}
    for op in range(len(ops)):
        own.setdefault(module_path(graph, op), {})[placement[ops.groups[op]]] = None
    for tensor in np.flatnonzero((graph.producer < 0) & np.isin(graph.tensors.kinds, MODEL_KINDS)).tolist():
        home, reader = graph.tensors.home[tensor], graph.first_reader[tensor]
        group = home if home >= 0 else ops.groups[reader] if reader >= 0 else 0  # what nothing reads may be anywhere
        path = names[tensor].rpartition(".")[0]
        tensors.setdefault(path, []).append(names[tensor])
        own.setdefault(path, {})
        if home >= 0 or not own[path]:
            own[path][placement[group]] = None
    inner = {outer for path in own for outer in _outer(path)}
    for path in own:  # without tensors of their own: activations, and those that share the weights of another
        if path not in inner and path.partition(".")[0] not in ("", LOSS):
            tensors.setdefault(path, [])
    return own, tensors


def _outer(path: str) -> list[str]:
    """Returns the modules that contain a module, from the nearest to the model itself."""
    parts = path.split(".") if path else []
    return [".".join(parts[:i]) for i in range(len(parts) - 1, -1, -1)]


def _largest_on_one_device(path: str, whole: dict[str, dict[str, None]]) -> str:
    for outer in _outer(path):
        if len(whole[outer]) > 1:
            return path
        path = outer
    return path


def _accelerate_device(name: str) -> int | torch.device:
    """Returns a device as Accelerate expects it; its string "cpu" would mean offloading."""
    if match := re.fullmatch(r"(?:gpu|cuda):(\d+)", name):
        return int(match[1])
    if re.fullmatch(r"cpu(:\d+)?", name):
        return torch.device("cpu")
    raise ExecutionError(f"device {name!r}: Accelerate knows only gpu:0, gpu:1, ... and cpu")
