"""Decides which ops are placed together: named groupings that merge the graph's own groups.

    colocated               only ops that must share a device: those that write one storage, and a parameter's update
    single-consumer         a group that only one other group reads joins it, repeatedly (ColocRL, rule 2)
    name-prefix:K           ops whose names share the first K levels (Spotlight uses K = 2); a list's number is no level of
                            its own: encoder, layers.0, mm
    cell                    a call of a module with its gradients, then as single-consumer (ColocRL, rules 1 to 3)
    module                  a module's forward, backward and update ops, over all micro-batches
    module-by-micro-batch   the same, separately for each micro-batch
    layer                   a numbered block of the model with all its modules (model.layers.3), else a module
    coarse:N                about N groups with heavy edges inside, and no cycles between groups

Groupings by name use the name of a group's first op. Merging changes no cost: ops keep their own times.
"""

import re

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.coarsening import coarsen
from placewise.core.costs import nominal_seconds
from placewise.core.errors import ProblemError
from placewise.core.graph import PHASES, Graph
from placewise.core.labels import connected_components, renumber, sum_by_label
from placewise.core.suggestions import did_you_mean

COLOCATED = "colocated"

GROUPINGS = ("colocated", "single-consumer", "name-prefix:K", "module", "module-by-micro-batch", "coarse:N", "layer", "cell")

KEPT = {"layers": "layer", "modules": "module"}  # what `place --keep` calls groupings

_NUMBER = re.compile("[1-9][0-9]{0,8}")

_SUFFIX = re.compile(r"(\.(backward|update))?(_\d+)?$")


def group_ops(graph: Graph, grouping: str) -> Ints:
    """Returns the merged group of each of the graph's groups, numbered by first group: [the graph's groups]."""
    name, _, number = grouping.partition(":")
    if not is_grouping(grouping):
        raise ProblemError(unknown_grouping(grouping))
    if name == COLOCATED:
        return np.arange(graph.num_groups)
    if name == "single-consumer":
        return _single_consumer(graph, np.arange(graph.num_groups))
    if name == "cell":
        return _single_consumer(graph, _cells(graph))
    if name == "coarse":
        source, target, nbytes = group_edges(graph)
        return coarsen(group_work(graph), _first_ops(graph), source, target, nbytes, int(number))
    first = _first_ops(graph)
    labels: list[object] = []
    for group, op in enumerate(first.tolist()):
        if op < 0:
            labels.append(("alone", group))  # a home without ops
        elif name == "name-prefix":
            labels.append(_prefix(_SUFFIX.sub("", graph.ops.names[op]), int(number)))
        elif name == "layer":
            labels.append(_layer(module_path(graph, op)))
        elif name == "module":
            labels.append(module_path(graph, op))
        else:
            labels.append((module_path(graph, op), int(graph.ops.micro_batches[op])))
    return _by_label(labels)


def is_grouping(text: str) -> bool:
    """Returns whether a text names a grouping."""
    name, _, number = text.partition(":")
    takes_number = name in ("name-prefix", "coarse")
    return (text in GROUPINGS and ":" not in text) or bool(takes_number and _NUMBER.fullmatch(number))


def unknown_grouping(text: str) -> str:
    """Returns what is wrong with a text that names none of the choices."""
    hint = did_you_mean(text, GROUPINGS)
    return f"unknown grouping {text!r}: {hint}{' (K and N are whole numbers above 0)' if ':' in hint else ''}"


def module_path(graph: Graph, op: int) -> str:
    """Returns the path of the module that an op belongs to; an update op belongs to its parameter's module."""
    return _module_path(graph.ops.names[op], graph.ops.phases[op] == PHASES.index("update"))


def module_path_of(name: str) -> str:
    """Returns the path of the module that an op of this name belongs to, where its graph is not known."""
    suffix = _SUFFIX.search(name)
    return _module_path(name, suffix is not None and suffix[2] == "update")


def _module_path(name: str, is_update: bool) -> str:
    path = _SUFFIX.sub("", name).rpartition(".")[0]
    return path.rpartition(".")[0] if is_update else path


def _layer(path: str) -> str:
    """Returns the path up to its first number: model.layers.3 of model.layers.3.mlp; the whole path if it has none."""
    names = path.split(".")
    end = next((i + 1 for i, name in enumerate(names) if name.isdecimal()), len(names))
    return ".".join(names[:end])


def group_edges(graph: Graph) -> tuple[Ints, Ints, Floats]:
    """Returns the edges between different groups, each pair once: sources, targets, and the bytes of their tensors."""
    writers, readers, tensors = graph.edges
    source, target = graph.ops.groups[writers], graph.ops.groups[readers]
    pairs = np.unique(np.stack([source, target, tensors]), axis=1)  # a tensor counts once for a pair
    pairs = pairs[:, pairs[0] != pairs[1]]
    keys, inverse = np.unique(pairs[:2], axis=1, return_inverse=True)
    nbytes = sum_by_label(inverse.ravel(), graph.tensors.nbytes[pairs[2]].astype(np.float64), keys.shape[1])
    return keys[0], keys[1], nbytes


def group_work(graph: Graph) -> Floats:
    """Returns each group's work in seconds, as `nominal_seconds` counts them: [groups]."""
    return sum_by_label(graph.ops.groups, nominal_seconds(graph), graph.num_groups)


def _first_ops(graph: Graph) -> Ints:
    """Returns the first op of each group, -1 if it has none: [groups]."""
    first = np.full(graph.num_groups, -1, np.int64)
    first[graph.ops.groups[::-1]] = np.arange(len(graph.ops))[::-1]
    return first


def _by_label(labels: list[object]) -> Ints:
    known: dict[object, int] = {}
    return np.array([known.setdefault(label, len(known)) for label in labels], np.int64)


def _prefix(name: str, levels: int) -> str:
    """Returns the first levels of a name; a number belongs to the level before it: layers.0 is one level."""
    found: list[str] = []
    for word in name.split("."):
        if word.isdecimal() and found:
            found[-1] += f".{word}"
        else:
            found.append(word)
    return ".".join(found[:levels])


def _cells(graph: Graph) -> Ints:
    """Returns the cell of each group's first op: [the graph's groups].

    The paper co-locates a gradient with its op, and by hand an LSTM cell, an attention step and their like. Here a call of a
    module is a cell: ops of the forward pass that follow each other in one module and micro-batch, where ops of the same
    kinds several times are so many calls. A module that has ops of its own and holds no list is called as a whole. A
    backward op belongs to the cell of its module that made or read most of what it reads (ties go to the first), else to
    that of the op before it. The updates of a module are one cell.
    """
    phases, paths = graph.ops.phases, _called_modules([module_path(graph, op) for op in range(len(graph.ops))])
    places = list(zip(paths, graph.ops.micro_batches.tolist(), strict=True))
    labels: list[object] = [None] * len(graph.ops)
    first = 0
    for op in range(1, len(graph.ops) + 1):
        if op == len(graph.ops) or (phases[op], places[op]) != (phases[first], places[first]):
            calls = _calls([graph.ops.kinds[n] for n in range(first, op)]) if phases[first] == PHASES.index("forward") else 1
            for n in range(first, op):
                labels[n] = (first, (n - first) * calls // (op - first))
            first = op
    users: dict[tuple[int, object], list[object]] = {}  # the cells in a place that made or read a tensor
    for op in np.flatnonzero(phases == PHASES.index("forward")).tolist():
        for number in (*graph.ops.writes[op].tolist(), *graph.ops.reads[op].tolist()):
            users.setdefault((number, places[op]), []).append(labels[op])
    last: tuple[object, object] = (None, None)  # the place and the cell of the backward op before
    for op in np.flatnonzero(phases == PHASES.index("backward")).tolist():
        known = [n for n in graph.ops.reads[op].tolist() if graph.producer[n] >= 0]
        votes = [label for number in known for label in users.get((number, places[op]), ())]
        if votes or last[0] == places[op]:
            labels[op] = max(votes, key=votes.count) if votes else last[1]
        last = places[op], labels[op]
    for op in np.flatnonzero(phases == PHASES.index("update")).tolist():
        labels[op] = paths[op]
    of_group = [("alone", group) if op < 0 else labels[op] for group, op in enumerate(_first_ops(graph).tolist())]
    return _by_label(of_group)


def _called_modules(paths: list[str]) -> list[str]:
    """Returns the module whose call an op belongs to: the outermost one with ops of its own and without a list in it."""
    parents = {".".join(words[:n]) for words in (path.split(".") for path in set(paths)) for n in range(1, len(words))}
    lists = {path.rpartition(".")[0] for path in {*paths, *parents} if path.rpartition(".")[2].isdecimal()}
    whole = parents & set(paths) - lists
    called = {}
    for path in set(paths):
        words = path.split(".")
        called[path] = next((p for n in range(1, len(words)) if (p := ".".join(words[:n])) in whole), path)
    return [called[path] for path in paths]


def _calls(kinds: list[str]) -> int:
    """Returns how many times a list repeats its beginning of at least three kinds; 1 if it is not made of repetitions."""
    for length in range(3, len(kinds) // 2 + 1):
        if len(kinds) % length == 0 and kinds == kinds[:length] * (len(kinds) // length):
            return len(kinds) // length
    return 1


def _single_consumer(graph: Graph, merged: Ints) -> Ints:
    """Returns the fixed point of: if only Y reads X's outputs, X and Y are one group (Mirhoseini et al. 2017, §3).

    `merged` are the groups that are joined already: [the graph's groups].
    """
    source, target, _ = group_edges(graph)
    while True:
        pairs = np.unique(np.stack([merged[source], merged[target]]), axis=1)
        pairs = pairs[:, pairs[0] != pairs[1]]
        num_consumers = np.bincount(pairs[0], minlength=len(merged))
        alone = pairs[:, num_consumers[pairs[0]] == 1]
        if not alone.shape[1]:
            return renumber(merged)
        merged = connected_components(len(merged), alone.T.tolist())[merged]
