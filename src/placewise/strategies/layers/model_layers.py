"""A step as layers in forward order: what belongs together when a model is cut between its modules.

A layer is a module that reads parameters: a convolution, an embedding, an LSTM cell. It has the forward, backward and update
ops of this module for all micro-batches. All other ops join one of these layers:

    activations, residual sums, the loss    the layer of the op that made what they read, the latest one if there are
                                            several; so a dropout or a ReLU that a block uses three times does not tie the
                                            block's ends together
    the backward ops of these               the layer of the latest forward op whose result they read, else as above
    ops that read no op's result            the layer of the first op that reads their result: the mask of a dropout

The outermost module is not a layer, as its own ops are at both ends. A graph without modules has a layer for each forward
op. A group is in the layer of its first op.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints
from placewise.core.graph import PHASES, TENSOR_KINDS, Graph
from placewise.core.grouping import module_path
from placewise.core.labels import sum_by_label
from placewise.core.problem import Problem

_FORWARD = PHASES.index("forward")
_PARAMETER = TENSOR_KINDS.index("parameter")


@dataclass(frozen=True, eq=False)
class Layers:
    """The layers of a step, and the one of each group."""

    names: tuple[str, ...]  # module paths, or op names if the graph has no modules; at least one
    of_group: Ints  # [groups]

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.names)


_KNOWN: "WeakKeyDictionary[Problem, Layers]" = WeakKeyDictionary()  # several strategies need the same layers


def find_layers(problem: Problem) -> Layers:
    """Returns the layers in the order of their first ops."""
    if problem not in _KNOWN:
        _KNOWN[problem] = _find_layers(problem)
    return _KNOWN[problem]


def _find_layers(problem: Problem) -> Layers:
    graph = problem.graph
    paths = [module_path(graph, n) for n in range(len(graph.ops))]
    names = list(dict.fromkeys(paths[n] for n, _ in parameter_reads(graph) if paths[n]))
    number = {name: i for i, name in enumerate(names)}
    layers = [number.get(path, -1) for path in paths]  # [ops]
    if not names:
        forward = np.flatnonzero(graph.ops.phases == _FORWARD).tolist() or list(range(len(graph.ops)))
        names = [graph.ops.names[n] for n in forward]
        for i, n in enumerate(forward):
            layers[n] = i
    _follow(graph, layers)
    return Layers(tuple(names) or ("",), group_values(problem, np.array(layers, np.int64)))


def parameter_reads(graph: Graph) -> list[tuple[int, int]]:
    """Returns every (op, parameter) of which the op reads the parameter or a view of it, in program order."""
    roots = graph.storage[graph.ops.reads.values]
    reads = (graph.tensors.kinds[roots] == _PARAMETER) & (graph.producer[roots] < 0)
    return list(zip(graph.ops.reads.rows[reads].tolist(), roots[reads].tolist(), strict=True))


def group_values(problem: Problem, op_values: Ints) -> Ints:
    """Returns the value of each group's first op: [groups].

    A group without ops has the value of the first op that reads a tensor that is at home with it, or 0.
    """
    graph = problem.graph
    values = np.zeros(problem.num_groups, np.int64)
    homes = np.flatnonzero((graph.tensors.home >= 0) & (graph.first_reader >= 0))[::-1]
    values[problem.merged[graph.tensors.home[homes]]] = op_values[graph.first_reader[homes]]
    values[problem.op_groups[::-1]] = op_values[::-1]  # in reverse, so that the first op of a group decides
    return values


def layer_seconds(problem: Problem, layers: Layers, op_seconds: Floats) -> Floats:
    """Returns the time of each layer's ops on each device, from op times [ops, devices]: [layers, devices]."""
    of_op = layers.of_group[problem.op_groups]
    columns = [sum_by_label(of_op, op_seconds[:, d], layers.num_layers) for d in range(problem.num_devices)]
    return np.stack(columns, axis=1)


def layer_bytes(problem: Problem, layers: Layers) -> tuple[Floats, Floats]:
    """Returns an estimate of the bytes that each layer keeps: [layers] all the time, and [layers] for all micro-batches.

    A layer keeps its resident tensors (parameters, state, inputs), and what one phase of the step makes and a later one
    reads. It keeps the gradients that the update needs all the time, and the activations of a micro-batch that the backward
    ops need while the micro-batch is under way. Copies and short-lived tensors are left out.
    """
    graph, tensors, ops = problem.graph, problem.graph.tensors, problem.graph.ops
    last_phase = np.full(len(tensors), -1, np.int64)  # [tensors], the last phase that reads a storage
    np.maximum.at(last_phase, graph.storage[ops.reads.values], ops.phases[ops.reads.rows])
    made = graph.producer >= 0
    of_maker = np.where(made, graph.producer, graph.first_reader)  # [tensors], -1: nobody uses it
    phases, micro_batches, op_groups = (
        np.append(column, -1) for column in (ops.phases, ops.micro_batches, problem.op_groups)
    )
    group = np.where(tensors.home >= 0, np.append(problem.merged, -1)[tensors.home], op_groups[of_maker])
    kept = (graph.storage == np.arange(len(tensors))) & (group >= 0) & (~made | (last_phase > phases[of_maker]))
    passing = kept & made & (phases[of_maker] == _FORWARD) & (micro_batches[of_maker] >= 0)

    def total(chosen: Bools) -> Floats:
        return sum_by_label(layers.of_group[group[chosen]], tensors.nbytes[chosen].astype(np.float64), layers.num_layers)

    return total(kept & ~passing), total(passing)


def _follow(graph: Graph, layers: list[int]) -> None:
    """Gives each op without a layer (-1) that of an op whose result it reads, else of an op that reads its result.

    Forward ops come first, so that the others find the layers of the results that they read.
    """
    producer, is_forward = graph.producer.tolist(), (graph.ops.phases == _FORWARD).tolist()
    made = [[producer[t] for t in row if producer[t] >= 0] for row in graph.ops.reads.lists()]  # [ops] -> ops
    readers = _readers(made)
    for only_forward in (True, False):
        ops = [n for n, layer in enumerate(layers) if layer < 0 and (is_forward[n] or not only_forward)]
        for n in ops:
            known = [m for m in made[n] if layers[m] >= 0]
            saved = [m for m in known if is_forward[m]]
            layers[n] = layers[max(saved or known)] if known else -1
        for n in reversed(ops):
            if layers[n] < 0:
                layers[n] = next((layers[m] for m in readers[n] if layers[m] >= 0), -1)
    for n, layer in enumerate(layers):
        layers[n] = max(layer, 0)  # not connected with any layer


def _readers(made: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the ops that read each op's results, in program order: [ops] -> ops."""
    readers: list[list[int]] = [[] for _ in made]
    for n, row in enumerate(made):
        for m in row:
            readers[m].append(n)
    return readers
