"""placewise import: graphs of other projects."""

import argparse
from typing import Any

from placewise.cli.outputs import check_writable, print_json
from placewise.cli.shared_options import add_command, positive_argument


def add_import(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "import", _import, "convert a graph that another project measured, and its machine, to our files"
    )
    parser.add_argument("file", metavar="FILE", help="a PipeDream profile, or a dnn-partitioning JSON")
    parser.add_argument("-o", "--output", metavar="GRAPH", required=True, help="the graph.json or graph.json.gz to write")
    parser.add_argument(
        "--cluster-output", metavar="CLUSTER", help="write the machine to this cluster.toml; see docs/importers.md"
    )
    parser.add_argument("--merged", action="store_true", help="PipeDream: a layer's forward and backward as one op")
    parser.add_argument(
        "--gpus", metavar="N", type=positive_argument, default=4, help="PipeDream: GPUs of the machine (default: 4)"
    )


def _import(options: argparse.Namespace) -> None:
    from placewise.core.errors import GraphError
    from placewise.formats.cluster_file import write_cluster
    from placewise.formats.files import read_bytes
    from placewise.formats.graph_file import write_graph
    from placewise.formats.importers import (
        dnn_partitioning_cluster,
        is_pipedream,
        pipedream_cluster,
        read_any_graph,
        read_pipedream,
    )

    check_writable(options.output, options.cluster_output, reads=(options.file,))
    is_profile = is_pipedream(read_bytes(options.file, GraphError))
    graph = read_pipedream(options.file, merged=options.merged) if is_profile else read_any_graph(options.file)
    cluster = None
    if options.cluster_output:
        cluster = pipedream_cluster(options.gpus) if is_profile else dnn_partitioning_cluster(options.file)
    write_graph(graph, options.output)
    if cluster is not None:
        write_cluster(cluster, options.cluster_output)
    if options.json:
        print_json({"file": options.output, "cluster": options.cluster_output, "name": graph.name, "ops": len(graph.ops)})
    else:
        print(f"{options.output}: {len(graph.ops):,} ops" + (f"; {options.cluster_output}" if cluster is not None else ""))
