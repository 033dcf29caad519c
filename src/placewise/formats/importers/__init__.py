"""Graphs that others measured, read as ours; docs/importers.md says what becomes of what."""

from pathlib import Path

from placewise.core.errors import GraphError
from placewise.core.graph import Graph
from placewise.formats.files import parse_json, read_bytes
from placewise.formats.graph_file import parse_graph
from placewise.formats.importers import dnn_partitioning, pipedream

__all__ = ["dnn_partitioning", "pipedream", "read_any_graph"]


def read_any_graph(path: str | Path) -> Graph:
    """Returns the graph of a file, ours or another project's, gzipped or not; its content says which, not its name.

    A GraphError names the file, the element and the rule that does not hold.
    """
    data = read_bytes(path, GraphError)
    if data.lstrip().startswith((b"{", b"[")):
        fields = parse_json(path, data, GraphError)
        if dnn_partitioning.recognises(fields):
            return dnn_partitioning.parse(fields, str(path))
        if isinstance(fields, dict) and not {"format", "tensors", "ops"}.isdisjoint(fields):
            return parse_graph(fields, str(path))
    elif pipedream.recognises(data):
        return pipedream.parse(data, str(path))
    raise GraphError(
        f"{path}: must be a placewise graph (JSON with format, tensors, ops), a dnn-partitioning graph (JSON with "
        "nodes, edges) or a PipeDream profile (lines of `node -- layer -- times and sizes`)"
    )
