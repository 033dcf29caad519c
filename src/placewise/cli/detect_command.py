"""placewise detect: this machine as a cluster."""

import argparse
import os
from typing import Any

from placewise.cli.clusters_command import cluster_fields
from placewise.cli.outputs import check_writable, print_json
from placewise.cli.shared_options import add_command, add_virtual_option, positive_argument

JOIN_SECONDS = 300.0  # after which ranks that have not come, or don't answer, end the others


def add_detect(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "detect", _detect, "describe this machine as a cluster.toml; under torchrun, all hosts")
    parser.add_argument("-o", "--output", metavar="CLUSTER", help="the cluster.toml to write (default: print it)")
    parser.add_argument(
        "--measure", action="store_true", help="measure flops, bandwidths, overheads and links (needs torch)"
    )
    parser.add_argument(
        "--cpus", metavar="N", type=positive_argument, default=1, help="describe the CPU as N devices (default: 1)"
    )
    add_virtual_option(parser)


def _detect(options: argparse.Namespace) -> None:
    from placewise.core.cluster import Cluster
    from placewise.formats.cluster_file import format_cluster, write_cluster
    from placewise.machines.slices import slice_devices

    check_writable(options.output)
    virtual = dict(options.virtual)
    cluster = Cluster.detect()
    slices = {f"gpu:{name.removeprefix('cuda:')}": count for name, count in virtual.items()}
    if slices or options.cpus > 1:
        cluster = slice_devices(cluster, {**slices, "cpu:0": options.cpus})
    if options.measure:
        from placewise.measure.roofline import measure_machine

        cluster = measure_machine(cluster, virtual)
    if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
        from placewise.measure.all_hosts import describe_hosts
        from placewise.run.backends.hosts import joined_ranks

        with joined_ranks(JOIN_SECONDS) as rank:
            cluster = describe_hosts(cluster)
        if rank:  # the first one tells
            return
    if options.output:
        write_cluster(cluster, options.output)
    if options.json:
        print_json(cluster_fields(cluster))
    elif options.output:
        print(f"{options.output}: {cluster.description}")
    else:
        print(format_cluster(cluster), end="")
