"""placewise capture: a model's training step as a graph file."""

import argparse
from typing import Any

from placewise.cli.outputs import check_writable, print_json
from placewise.cli.shared_options import add_command, add_model_argument


def add_capture(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "capture", _capture, "capture a model's training step as a graph file")
    add_model_argument(parser)
    parser.add_argument("-o", "--output", metavar="GRAPH", required=True, help="the graph.json or graph.json.gz to write")


def _capture(options: argparse.Namespace) -> None:
    from placewise.formats.graph_file import write_graph
    from placewise.models import load_graph

    check_writable(options.output, reads=(options.model,))
    graph = load_graph(options.model)
    write_graph(graph, options.output)
    if options.json:
        sizes = {"ops": len(graph.ops), "tensors": len(graph.tensors), "groups": graph.num_groups}
        print_json({"file": options.output, "name": graph.name, "digest": graph.digest, **sizes})
    else:
        print(f"{options.output}: {len(graph.ops):,} ops, {len(graph.tensors):,} tensors, {graph.num_groups:,} groups")
