"""placewise clusters: the preset machines, and names that are composed."""

import argparse
import dataclasses
import math
from typing import Any

from placewise.cli.outputs import print_json
from placewise.cli.shared_options import add_command


def add_clusters(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "clusters", _clusters, "list the preset machines, or print one as a cluster.toml")
    parser.add_argument("name", metavar="PRESET", nargs="?", help="print this one, as a start for your own file")
    parser.epilog = "A name can also be composed: 3090+1080ti, 4xA100-nvlink, 2x(4090+3060)@10GbE."


def _clusters(options: argparse.Namespace) -> None:
    from placewise.formats.cluster_file import format_cluster
    from placewise.machines.composed import catalogue_lines, compose, is_composed
    from placewise.machines.presets import PRESETS, preset
    from placewise.report.terminal_text import table

    if options.name is not None:
        is_name = options.name not in PRESETS and is_composed(options.name)
        cluster = compose(options.name) if is_name else preset(options.name)
        print_json(cluster_fields(cluster)) if options.json else print(format_cluster(cluster), end="")
        return
    clusters = [preset(name) for name in PRESETS]
    if options.json:
        print_json({cluster.name: cluster_fields(cluster) for cluster in clusters})
    else:
        rows = [(c.name, _speeds(c.devices[0]), c.description) for c in clusters]
        print(table(("cluster", "Tflop/s of its first GPU", "what it is"), rows, left=3))
        print("\nComposed names: 3090+1080ti, 4xA100-nvlink, or hosts with a network: 2x(4090+3060)@10GbE, 2x(cpu)@1GbE.")
        print("Each host has a CPU too. For anything else, write a file.\n")
        print(table(("GPU", "float32 peak and memory", "what it is"), catalogue_lines(), left=3))


def _speeds(device: Any) -> str:
    """Returns a device's speed in float32, and in the types of training that are faster."""
    faster = [name for name in ("tf32", "bfloat16", "float16") if device.flops_in(name) > device.flops]
    shown = ["float32", *(name for name in faster if name != "float16" or "bfloat16" not in faster)]  # the same speed
    return ", ".join(f"{name} {device.flops_in(name) / 1e12:.3g}" for name in shown)


def cluster_fields(cluster: Any) -> dict[str, Any]:
    """Returns a cluster as --json prints it."""
    fields = ("name", "description", "devices", "links", "dispatch_seconds")
    found = {name: dataclasses.asdict(cluster)[name] for name in fields}
    for device in found["devices"]:
        device["flops_by_type"] = dict(device["flops_by_type"])
    for row, link in zip(found["links"], cluster.links, strict=True):
        for name in ("source_work", "target_work"):  # without the infinite speed of none, which JSON has not
            row[name] = {key: value for key, value in getattr(link, name)._asdict().items() if math.isfinite(value)}
    return found
