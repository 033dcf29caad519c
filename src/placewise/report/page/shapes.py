"""The shapes of what an op reads and writes, in words."""

from functools import cache

from placewise.core.arrays import Ragged
from placewise.core.graph import Graph, Tensors

FEW = 3  # shapes that are told one by one

NO_BREAK = "\u00a0"  # keeps a shape on one line


def shapes_of_ops(graph: Graph) -> list[tuple[str, str]]:
    """Returns what each op reads and what it writes, as `float32 [64, 1024], int64 [] and 3 more`: [ops].

    A text is empty where no shape is known, and has spaces that don't break inside a shape.
    """
    reads, writes = (_in_words(graph.tensors, rows) for rows in (graph.ops.reads, graph.ops.writes))
    return list(zip(reads, writes, strict=True))


def _in_words(tensors: Tensors, rows: Ragged) -> list[str]:
    words = [str(shape).replace(" ", NO_BREAK) for shape in tensors.shapes] + ["unknown"]  # the last one is number -1

    @cache
    def told(row: tuple[int, ...]) -> str:
        if max(row, default=-1) < 0:
            return ""
        more = f" and {len(row) - FEW} more" if len(row) > FEW else ""
        return ", ".join(words[number] for number in row[:FEW]) + more

    return [told(tuple(row)) for row in Ragged(rows.offsets, tensors.shape[rows.values]).lists()]
