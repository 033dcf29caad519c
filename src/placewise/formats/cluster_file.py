"""cluster.toml: a cluster as text that people write."""

import tomllib
from pathlib import Path
from typing import Any

from placewise.core.cluster import Cluster, Device, Link
from placewise.core.errors import ClusterError
from placewise.formats.files import Table, describe, one_line, read_bytes, write_bytes

FORMAT, VERSION = "placewise-cluster", 1

CLUSTER_FIELDS = ("format", "version", "name", "description", "dispatch_seconds", "devices", "links", "default_link")

DEVICE_FIELDS = ("name", "kind", "memory", "flops", "bytes_per_second", "overhead_seconds")

DEFAULT_LINK_FIELDS = ("bytes_per_second", "latency_seconds", "channel")

LINK_FIELDS = ("from", "to", *DEFAULT_LINK_FIELDS, "both")

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def read_cluster(path: str | Path) -> Cluster:
    """Returns the cluster of a file; a ClusterError names the file, the element and the rule that does not hold."""
    try:
        data = tomllib.loads(read_bytes(path, ClusterError).decode("utf-8"))
    except (ValueError, RecursionError) as problem:  # ValueError has TOML's and UTF-8's errors below it
        raise ClusterError(f"{path}: is not TOML: {one_line(problem)}") from None
    return parse_cluster(data, str(path))


def write_cluster(cluster: Cluster, path: str | Path) -> None:
    """Writes the cluster."""
    write_bytes(path, format_cluster(cluster).encode())


def parse_cluster(data: Any, source: str = "cluster") -> Cluster:
    """Returns the cluster that plain data (of TOML) says; `source` is named in errors."""
    top = Table(source, data, CLUSTER_FIELDS, ClusterError)
    top.kind_of_file(FORMAT, VERSION, optional=True)
    devices = tuple(_device(row, f"{source}: devices[{i}]") for i, row in enumerate(top.rows("devices")))
    links = _default_links(top, devices, source)
    for i, row in enumerate(top.rows("links", [])):
        links += _links(row, f"{source}: links[{i}]")
    try:
        return Cluster(
            top.text("name", ""), devices, tuple(links), top.number("dispatch_seconds", 0), top.text("description", "")
        )
    except ClusterError as problem:
        raise ClusterError(f"{source}: {problem}") from None


def _device(row: Any, element: str) -> Device:
    table = Table(element, row, DEVICE_FIELDS, ClusterError)
    table.element = f"{element} {table.text('name')!r}"
    return Device(
        name=table.text("name"),
        kind=table.text("kind"),
        memory_bytes=_memory(table),
        flops=table.number("flops", above_zero=True),
        bytes_per_second=table.number("bytes_per_second", above_zero=True),
        overhead_seconds=table.number("overhead_seconds", 0),
    )


def _memory(device: Table) -> int:
    """Returns a number of bytes from 4096 or "12GiB"."""
    value = device.get("memory")
    if not isinstance(value, str):
        return device.integer("memory")
    unit = next((unit for unit in UNITS if value.endswith(unit)), None)
    try:
        return int(float(value.removesuffix(unit)) * UNITS[unit]) if unit else int(value)
    except (ValueError, OverflowError):
        units = ", ".join(UNITS)
        raise device.wrong(f"memory must be bytes or text like '12GiB' ({units}), it is {describe(value)}") from None


def _default_links(top: Table, devices: tuple[Device, ...], source: str) -> list[Link]:
    if "default_link" not in top.fields:
        return []
    table = Table(f"{source}: default_link", top.get("default_link"), DEFAULT_LINK_FIELDS, ClusterError)
    names = [device.name for device in devices]
    return [_link(table, a, b) for a in names for b in names if a != b]


def _links(row: Any, element: str) -> list[Link]:
    table = Table(element, row, LINK_FIELDS, ClusterError)
    both = table.get("both", False)
    if not isinstance(both, bool):
        raise table.wrong(f"both must be true or false, it is {describe(both)}")
    ends = table.text("from"), table.text("to")
    return [_link(table, *ends)] + ([_link(table, *reversed(ends))] if both else [])


def _link(table: Table, source: str, target: str) -> Link:
    return Link(
        source,
        target,
        table.number("bytes_per_second", above_zero=True),
        table.number("latency_seconds"),
        table.text("channel") if "channel" in table.fields else None,
    )


def format_cluster(cluster: Cluster) -> str:
    """Returns the text of a cluster's file; every link is written out."""
    lines = [f'format = "{FORMAT}"', f"version = {VERSION}", f"name = {_quoted(cluster.name)}"]
    if cluster.description:
        lines.append(f"description = {_quoted(cluster.description)}")
    lines.append(f"dispatch_seconds = {cluster.dispatch_seconds!r}")
    for device in cluster.devices:
        lines += ["", "[[devices]]", f"name = {_quoted(device.name)}", f"kind = {_quoted(device.kind)}"]
        lines += [f"memory = {_memory_text(device.memory_bytes)}", f"flops = {device.flops!r}"]
        lines += [f"bytes_per_second = {device.bytes_per_second!r}", f"overhead_seconds = {device.overhead_seconds!r}"]
    for link in cluster.links:
        lines += ["", "[[links]]", f"from = {_quoted(link.source)}", f"to = {_quoted(link.target)}"]
        lines += [f"bytes_per_second = {link.bytes_per_second!r}", f"latency_seconds = {link.latency_seconds!r}"]
        if link.channel is not None:
            lines.append(f"channel = {_quoted(link.channel)}")
    return "\n".join(lines) + "\n"


def _memory_text(memory_bytes: int) -> str:
    """Returns a memory size in the largest binary unit that says it exactly."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if memory_bytes and memory_bytes % UNITS[unit] == 0:
            return f'"{memory_bytes // UNITS[unit]}{unit}"'
    return str(memory_bytes)


def _quoted(text: str) -> str:
    """Returns text as a TOML basic string."""
    escapes = {'"': '\\"', "\\": "\\\\"}
    return '"' + "".join(escapes.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in text) + '"'
