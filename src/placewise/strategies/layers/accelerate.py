"""Hugging Face Accelerate's device_map="balanced", on the names and sizes of parameters.

These are `get_balanced_memory` and `infer_auto_device_map` of accelerate.utils.modeling (1.15), quirk by quirk: the first
GPU keeps room for the largest layer that is still to come, and only its memory limits the last GPU. There is no disk: what
does not fit on the GPUs is left over. And there are no module objects: modules that are not split are given by path instead
of by class, and a child without parameters does not count.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from placewise.core.graph import TENSOR_KINDS, Graph
from placewise.core.grouping import module_path
from placewise.strategies.layers.model_layers import parameter_reads


@dataclass(frozen=True)
class Modules:
    """The tree of modules in the names of parameters and buffers; a path is that of a module or of a tensor."""

    parameters: Mapping[str, int]  # qualified name -> bytes, in the order of registration; 0 bytes for a second name
    buffers: Mapping[str, int]
    ties: Sequence[Sequence[str]] = ()  # all names of each parameter that has several
    no_split: str = ""  # a regular expression: a module whose whole path matches is not split

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The bytes below each path; "" has all bytes."""
        sizes: dict[str, int] = {"": 0}
        for name, nbytes in [*self.parameters.items(), *self.buffers.items()]:
            parts = name.split(".")
            for depth in range(len(parts) + 1):
                path = ".".join(parts[:depth])
                sizes[path] = sizes.get(path, 0) + nbytes
        return sizes

    @cached_property
    def children(self) -> dict[str, list[str]]:
        """The modules directly below each module."""
        children: dict[str, list[str]] = {"": []}
        for path in self.sizes:
            if path and path not in self.parameters and path not in self.buffers:
                children.setdefault(path, [])
                children.setdefault(_parent(path), []).append(path)
        return children

    def splits(self, path: str) -> list[str]:
        """Returns the parts of a module, its own parameters first; an empty list if it can't be split."""
        if not self.children.get(path) or (self.no_split and re.fullmatch(self.no_split, path)):
            return []
        return [name for name in self.parameters if _parent(name) == path] + self.children[path]

    def largest_layer(self, paths: Sequence[str]) -> tuple[int, list[str]]:
        """Returns the size of the largest module at or below the paths that can't be split, and all modules of that size."""
        largest, names = 0, []
        waiting = list(paths)
        while waiting:
            path = waiting.pop(0)
            if self.splits(path):
                waiting = self.children[path] + waiting
            elif self.sizes[path] > largest:
                largest, names = self.sizes[path], [path]
            elif self.sizes[path] == largest:
                names.append(path)
        return largest, names


def modules_of(graph: Graph, no_split: str) -> Modules:
    """Returns the modules of a graph's parameters and buffers.

    A graph has one name for a tied parameter. A module that reads a parameter from outside of it is taken to have a second
    name for it, in the order right after the last module that runs before it.
    """
    tensors = graph.tensors
    sizes: dict[str, dict[str, int]] = {"parameter": {}, "buffer": {}}
    for t, name in enumerate(tensors.names):
        kind = TENSOR_KINDS[tensors.kinds[t]]
        if kind in sizes and name and graph.producer[t] < 0:
            sizes[kind].setdefault(name, int(tensors.nbytes[t]))
    first_reads: dict[tuple[str, str], int] = {}  # module, parameter -> op
    first_ops: dict[str, int] = {}
    for n, t in parameter_reads(graph):
        module = module_path(graph, n)
        first_ops.setdefault(module, n)
        first_reads.setdefault((module, tensors.names[t]), n)
    parameters, ties = list(sizes["parameter"]), dict[str, list[str]]()
    for (module, name), n in first_reads.items():
        second = f"{module}.{name.rpartition('.')[2]}"
        if module and _parent(name) and not _is_below(name, module) and second not in parameters:
            before = [i for i, path in enumerate(parameters) if first_ops.get(_parent(path), n) < n]
            parameters.insert(max(before, default=-1) + 1, second)
            ties.setdefault(name, [name]).append(second)
    own = {name: sizes["parameter"].get(name, 0) for name in parameters}
    return Modules(own, sizes["buffer"], list(ties.values()), no_split)


def balanced_limits(modules: Modules, memory_bytes: Sequence[int]) -> list[int]:
    """Returns the bytes that each GPU may take of its memory: an equal share and a bit more; for the last one, all of it."""
    usable = [gpu for gpu, memory in enumerate(memory_bytes) if memory > 0]
    limits = list(memory_bytes)
    if not usable:
        return limits
    blocks: dict[str, int] = {}  # the first module that is not split of each kind; paths of one kind differ only in numbers
    inner = {path: modules.sizes[path] for path in modules.children}
    for path, size in inner.items():
        if modules.no_split and re.fullmatch(modules.no_split, path):
            blocks.setdefault(re.sub(r"\d+", "#", path), size)
    leaves = [size for path, size in inner.items() if path and size and not modules.children[path]]
    mean = int(sum(leaves) / max(len(leaves), 1))
    share = modules.sizes[""] // len(usable) + int(1.25 * max([mean, *blocks.values()]))
    for gpu in usable[:-1]:
        limits[gpu] = min(share, limits[gpu])
    return limits


def infer_device_map(modules: Modules, limits: Sequence[int]) -> dict[str, int]:
    """Returns the GPU of each module or parameter; what is left over gets the number of GPUs.

    Modules fill one GPU after the other in their order, each as a whole if it fits, else by its parts. The first GPU keeps
    room for the largest layer to come. Tied parameters are on one device.
    """
    rooms = [*limits, math.inf]
    tops = {kind: [name for name in names if not _parent(name)]
            for kind, names in (("parameters", modules.parameters), ("buffers", modules.buffers))}  # fmt: skip
    waiting = tops["parameters"] + modules.children[""] + tops["buffers"]
    largest, largest_names = modules.largest_layer(waiting)
    places: dict[str, int] = {}
    used, device = 0, 0
    while waiting:
        path = waiting.pop(0)
        largest_names = [name for name in largest_names if not _is_below(name, path)]
        if not largest_names:
            largest, largest_names = _largest_waiting(modules, waiting)
        room = rooms[device] - (largest if device == 0 else 0) - used
        size, tied = modules.sizes[path], _tied_to(modules, path, waiting)
        with_ties = size + sum(modules.sizes[holder] - modules.sizes[name] for name, holder in tied)
        if with_ties <= room:
            used += with_ties
            for name in [path, *(holder for _, holder in tied)]:
                places[name] = device
                waiting = [other for other in waiting if other != name]
            continue
        split = next((holder for _, holder in tied if modules.splits(holder)), None) if size <= room else None
        if split is not None:
            index = waiting.index(split)
            waiting = [path, *waiting[:index], *modules.splits(split), *waiting[index + 1 :]]
        elif size >= room and modules.splits(path):
            waiting = modules.splits(path) + waiting
        else:
            used, device = 0, device + 1
            waiting.insert(0, path)
            continue
        largest, largest_names = _largest_waiting(modules, waiting)
    return places


def find_device(places: Mapping[str, int], path: str) -> int | None:
    """Returns the device of a module or a parameter: its own entry, else that of the innermost module that contains it."""
    while path not in places and path:
        path = _parent(path)
    return places.get(path)


def _largest_waiting(modules: Modules, waiting: Sequence[str]) -> tuple[int, list[str]]:
    return modules.largest_layer([path for path in waiting if path in modules.children])


def _tied_to(modules: Modules, path: str, waiting: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the names outside a path of parameters inside it, each with the waiting path that contains it."""
    found = []
    for names in modules.ties:
        outside = [name for name in names if not _is_below(name, path)]
        if 0 < len(outside) < len(names):
            holders = [next((w for w in waiting if _is_below(name, w)), None) for name in outside]
            found += [(name, holder) for name, holder in zip(outside, holders, strict=True) if holder is not None]
    return found


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _is_below(path: str, module: str) -> bool:
    """Returns whether a path is the module's or inside the module."""
    return path == module or path.startswith(f"{module}.")
