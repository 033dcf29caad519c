"""What networks read about sets of ops: the kinds of op, the sizes of the outputs, the neighbours.

A *label* is the set that an op belongs to: a group of the problem, a block, or a group of a learned grouper. Sizes are
log10(1 + size) / 10, which is between 0 and 1.9.
"""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.graph import Graph
from placewise.core.labels import renumber, sum_by_label

MAX_OUTPUTS, MAX_DIMENSIONS = 6, 4  # that are read of a set's outputs, and of each one's shape
MAX_NEIGHBOURS = 6  # that a set reads from, and as many that read from it
PADDING = -1.0


class Kinds(NamedTuple):
    """The ops' kinds as numbers, in the order of their first ops."""

    of_op: Ints  # [ops]
    num_kinds: int

    @classmethod
    def of(cls, graph: Graph) -> "Kinds":
        """Returns the kinds of a graph's ops."""
        labels = np.unique(np.array(graph.ops.kinds, np.str_), return_inverse=True)[1].reshape(-1)
        numbers = renumber(labels) if len(labels) else np.zeros(0, np.int64)
        return cls(numbers, int(numbers.max(initial=-1)) + 1)

    def counted(self, labels: Ints, num_labels: int) -> Floats:
        """Returns the number of ops of each kind in each label: [labels, kinds]."""
        found = sum_by_label(labels * self.num_kinds + self.of_op, np.ones(len(labels)), num_labels * self.num_kinds)
        return found.reshape(num_labels, self.num_kinds)


def scaled(nbytes: Ints | Floats) -> Floats:
    """Returns sizes as networks read them."""
    result: Floats = np.log10(1.0 + nbytes) / 10
    return result


def edges_between(graph: Graph, labels: Ints, num_labels: int) -> tuple[Ints, Ints]:
    """Returns the writers and the readers of all pairs of different labels with tensors between them, each pair once."""
    writers, readers, _ = graph.edges
    pairs = np.unique(labels[writers] * num_labels + labels[readers])
    source, target = pairs // max(num_labels, 1), pairs % max(num_labels, 1)
    return source[source != target], target[source != target]


def output_shapes(graph: Graph, labels: Ints, num_labels: int) -> tuple[Floats, Ints]:
    """Returns the shapes of each label's largest outputs, padded, and the number of its outputs: [labels, 24], [labels].

    An output is a tensor that one of its ops writes and that another label reads, or that nobody reads. A shape is its first
    four sizes; one that is unknown is the tensor's bytes. Ties go to the first tensor.
    """
    written = np.flatnonzero(graph.producer >= 0)
    owner = labels[graph.producer[written]]
    read, readers = graph.ops.reads.values, labels[graph.ops.reads.rows]
    own = np.full(len(graph.tensors), -1, np.int64)
    own[written] = owner
    inside, outside = np.zeros(len(own), np.bool_), np.zeros(len(own), np.bool_)
    inside[read[readers == own[read]]] = True
    outside[read[readers != own[read]]] = True
    leaves = (outside | ~inside)[written]
    tensors, owner = written[leaves], owner[leaves]
    order = np.lexsort((tensors, -graph.tensors.nbytes[tensors], owner))
    largest = np.full((num_labels, MAX_OUTPUTS), -1, np.int64)
    _fill(largest, owner[order], tensors[order])
    shapes = np.full((num_labels, MAX_OUTPUTS, MAX_DIMENSIONS), PADDING)
    for label, place in np.argwhere(largest >= 0):
        tensor = int(largest[label, place])
        shape = graph.tensors.shape_of(tensor)
        sizes = (graph.tensors.nbytes[tensor],) if shape is None else shape.sizes[:MAX_DIMENSIONS]
        shapes[label, place, : len(sizes)] = scaled(np.array(sizes, np.int64))
    return shapes.reshape(num_labels, -1), np.bincount(owner, minlength=num_labels)


def neighbours(source: Ints, target: Ints, num_labels: int) -> Floats:
    """Returns up to 6 labels that each label reads from and up to 6 that read from it, the lowest first: [labels, 12].

    They are numbers / `num_labels`, padded; the edges are those of `edges_between`.
    """
    found = np.full((num_labels, 2 * MAX_NEIGHBOURS), PADDING)
    order = np.lexsort((source, target))
    _fill(found[:, :MAX_NEIGHBOURS], target[order], source[order] / max(num_labels, 1))
    order = np.lexsort((target, source))
    _fill(found[:, MAX_NEIGHBOURS:], source[order], target[order] / max(num_labels, 1))
    return found


def adjacency(source: Ints, target: Ints, num_labels: int) -> Floats:
    """Returns 1 where the column's label reads from the row's label, else 0: [labels, labels]."""
    matrix = np.zeros((num_labels, num_labels))
    matrix[source, target] = 1.0
    return matrix


def standardised(rows: Floats) -> Floats:
    """Returns rows whose columns have the mean 0 and the deviation 1 over the rows, or are 0 where all are alike."""
    deviation = rows.std(axis=0)
    result: Floats = (rows - rows.mean(axis=0)) / np.where(deviation > 1e-9, deviation, np.inf)
    return result


def column_sums(labels: Ints, rows: Floats, num_labels: int) -> Floats:
    """Returns the sum of the rows of each label: [labels, columns] from [rows] and [rows, columns]."""
    return np.stack([sum_by_label(labels, column, num_labels) for column in rows.T], axis=1)


def _fill(table: Floats | Ints, rows: Ints, values: Floats | Ints) -> None:
    """Writes the values of each row from the left, as many as fit; rows are in rising order."""
    column = np.arange(len(rows)) - np.searchsorted(rows, rows)
    fits = column < table.shape[1]
    table[rows[fits], column[fits]] = values[fits]
