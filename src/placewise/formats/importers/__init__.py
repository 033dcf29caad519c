"""Reads graphs of other projects as ours; docs/importers.md describes how each part is translated."""

from pathlib import Path

from placewise.core.errors import GraphError
from placewise.core.graph import Graph
from placewise.formats.files import parse_json, read_bytes
from placewise.formats.graph_file import parse_graph
from placewise.formats.importers.dnn_partitioning import (
    dnn_partitioning_cluster,
    is_dnn_partitioning,
    parse_dnn_partitioning,
    read_dnn_partitioning,
)
from placewise.formats.importers.pipedream import is_pipedream, parse_pipedream, pipedream_cluster, read_pipedream

__all__ = [
    "dnn_partitioning_cluster",
    "is_pipedream",
    "pipedream_cluster",
    "read_any_graph",
    "read_dnn_partitioning",
    "read_pipedream",
]


def read_any_graph(path: str | Path) -> Graph:
    """Returns the graph in a file, in our format or another project's, gzipped or not; the content decides, not the name.

    A GraphError names the file, the element and the rule that does not hold.
    """
    data = read_bytes(path, GraphError)
    if data.lstrip().startswith((b"{", b"[")):
        fields = parse_json(path, data, GraphError)
        if is_dnn_partitioning(fields):
            return parse_dnn_partitioning(fields, str(path))
        if isinstance(fields, dict) and not {"format", "tensors", "ops"}.isdisjoint(fields):
            return parse_graph(fields, str(path))
    elif is_pipedream(data):
        return parse_pipedream(data, str(path))
    raise GraphError(
        f"{path}: must be a placewise graph (JSON with format, tensors, ops), a dnn-partitioning graph (JSON with "
        "nodes, edges) or a PipeDream profile (lines of `node -- layer -- times and sizes`)"
    )
