"""What there is: models, clusters, this machine."""

import argparse
import dataclasses
from typing import Any

from placewise.cli.common import check_writable, command, positive_argument, print_json
from placewise.cli.profiling import add_virtual_option


def add_models(commands: Any) -> None:
    """Adds the command."""
    command(commands, "models", _models, "list the models of the zoo, with their options")


def _models(options: argparse.Namespace) -> None:
    from placewise import zoo
    from placewise.report.text_tables import bold

    if options.json:
        models = {name: {"summary": entry.summary, "options": zoo.model_options(name)} for name, entry in zoo.MODELS.items()}
        print_json(models)
        return
    for name, entry in zoo.MODELS.items():
        print(f"{bold(name)}{entry.summary:>{14 - len(name) + len(entry.summary)}}")
        print(f"{'':<14}{', '.join(f'{option}={default}' for option, default in zoo.model_options(name).items())}")


def add_clusters(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "clusters", _clusters, "list the machines that have a name, or print one as a cluster.toml")
    parser.add_argument("name", nargs="?", help="print this one, to start your own file from")


def _clusters(options: argparse.Namespace) -> None:
    from placewise.formats.cluster_file import format_cluster
    from placewise.machines.presets import preset, preset_names
    from placewise.report.text_tables import table

    if options.name is not None:
        cluster = preset(options.name)
        print_json(_cluster_json(cluster)) if options.json else print(format_cluster(cluster), end="")
        return
    clusters = [preset(name) for name in preset_names()]
    if options.json:
        print_json({cluster.name: _cluster_json(cluster) for cluster in clusters})
    else:
        print(table(("cluster", "what it is"), [(c.name, c.description) for c in clusters], left=2))


def _cluster_json(cluster: Any) -> dict[str, Any]:
    fields = ("name", "description", "devices", "links", "dispatch_seconds")
    return {name: dataclasses.asdict(cluster)[name] for name in fields}


def add_detect(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "detect", _detect, "describe this machine as a cluster.toml")
    parser.add_argument("-o", "--output", metavar="FILE", help="the file to write (default: print it)")
    parser.add_argument(
        "--measure", action="store_true", help="measure flops, bandwidths, overheads and links (needs torch)"
    )
    parser.add_argument("--cpus", metavar="N", type=positive_argument, default=1, help="describe the CPU as N devices (1)")
    add_virtual_option(parser)


def _detect(options: argparse.Namespace) -> None:
    from placewise.core.cluster import Cluster
    from placewise.formats.cluster_file import format_cluster, write_cluster
    from placewise.machines.virtual import cut_devices

    check_writable(options.output)
    virtual = dict(options.virtual)
    cluster = Cluster.detect()
    pieces = {f"gpu:{name.removeprefix('cuda:')}": count for name, count in virtual.items()}
    if pieces or options.cpus > 1:
        cluster = cut_devices(cluster, {**pieces, "cpu:0": options.cpus})
    if options.measure:
        from placewise.measure.roofline import measure_machine

        cluster = measure_machine(cluster, virtual)
    if options.output:
        write_cluster(cluster, options.output)
    if options.json:
        print_json(_cluster_json(cluster))
    elif options.output:
        print(f"{options.output}: {cluster.description}")
    else:
        print(format_cluster(cluster), end="")
