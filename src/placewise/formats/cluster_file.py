"""Reads and writes cluster.toml."""

from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from placewise.core.cluster import MAX_DEVICES, Cluster, Device, Link
from placewise.core.errors import ClusterError, one_line
from placewise.core.graph import COMPUTE_TYPES
from placewise.core.quantities import BYTE_UNITS, parse_bytes
from placewise.formats.files import Fields, describe, parse_toml, read_bytes, write_bytes
from placewise.formats.link_fields import SHARED_FIELDS, read_flag, read_shared_fields, shared_fields

FORMAT, VERSION = "placewise-cluster", 1

CLUSTER_FIELDS = (
    "format",
    "version",
    "name",
    "description",
    "dispatch_seconds",
    "copy_dispatch_seconds",
    "cuda_graphs",
    "devices",
    "links",
    "default_link",
)

DEVICE_FIELDS = ("name", "kind", "host", "memory", "flops", "bytes_per_second", "overhead_seconds")

DEFAULT_LINK_FIELDS = ("bytes_per_second", "latency_seconds", "channel", *SHARED_FIELDS)

LINK_FIELDS = ("from", "to", *DEFAULT_LINK_FIELDS, "both")


def read_cluster(path: str | Path) -> Cluster:
    """Returns the cluster in a file; a ClusterError names the file, the element and the rule that does not hold."""
    try:
        text = read_bytes(path, ClusterError).decode("utf-8")
    except UnicodeDecodeError as problem:
        raise ClusterError(f"{path}: is not TOML: {one_line(problem)}") from None
    return parse_cluster(parse_toml(path, text, ClusterError), str(path))


def write_cluster(cluster: Cluster, path: str | Path) -> None:
    """Writes the cluster to a file."""
    write_bytes(path, format_cluster(cluster).encode())


def parse_cluster(data: Any, source: str = "cluster") -> Cluster:
    """Returns the cluster in the parsed TOML of a file; errors name `source`."""
    top = Fields(source, data, CLUSTER_FIELDS, ClusterError)
    top.check_format(FORMAT, VERSION, optional=True)
    devices = tuple(_device(row, f"{source}: devices[{i}]") for i, row in enumerate(top.entries("devices")))
    if len(devices) > MAX_DEVICES:  # before default_link is written out for all pairs
        raise top.wrong(f"a cluster has at most {MAX_DEVICES} devices, got {len(devices):,}")
    links = _default_links(top, devices, source)
    for i, row in enumerate(top.entries("links", [])):
        links += _links(row, f"{source}: links[{i}]")
    try:
        return Cluster(
            top.text("name", ""),
            devices,
            tuple(links),
            top.number("dispatch_seconds", 0),
            top.text("description", ""),
            top.number("copy_dispatch_seconds") if "copy_dispatch_seconds" in top.given else None,
            read_flag(top, "cuda_graphs"),
        )
    except ClusterError as problem:
        raise ClusterError(f"{source}: {problem}") from None


def _device(row: Any, element: str) -> Device:
    device = Fields(element, row, DEVICE_FIELDS, ClusterError)
    device.element = f"{element} {device.text('name')!r}"
    speeds = _speeds(device)
    return Device(
        name=device.text("name"),
        kind=device.text("kind"),
        memory_bytes=_memory_bytes(device),
        flops=speeds.pop("float32"),
        bytes_per_second=device.number("bytes_per_second", above_zero=True),
        overhead_seconds=device.number("overhead_seconds", 0),
        flops_by_type=tuple(speeds.items()),
        host=device.text("host", ""),
    )


def _speeds(device: Fields) -> dict[str, float]:
    """Returns the flops by type in 5e12 or {float32 = 5e12, bfloat16 = 7e13}; float32 must be there."""
    given = device.get("flops")
    if not isinstance(given, dict):
        return {"float32": device.number("flops", above_zero=True)}
    if unknown := [name for name in given if name not in COMPUTE_TYPES]:
        raise device.wrong(f"flops names an unknown type {describe(unknown[0])}; the types are {', '.join(COMPUTE_TYPES)}")
    if "float32" not in given:
        raise device.wrong(
            "flops must be a number, or a table that has float32, because types that it lacks count as float32"
        )
    table = Fields(f"{device.element}: flops", given, COMPUTE_TYPES, ClusterError)
    return {name: table.number(name, above_zero=True) for name in given}


def _memory_bytes(device: Fields) -> int:
    """Returns the number of bytes in 4096 or "12GiB"."""
    value = device.get("memory")
    if not isinstance(value, str):
        return device.integer("memory")
    try:
        return parse_bytes(value)
    except (ValueError, OverflowError):
        units = ", ".join(BYTE_UNITS)
        raise device.wrong(f"memory must be bytes or text like '12GiB' ({units}), got {describe(value)}") from None


def _default_links(top: Fields, devices: tuple[Device, ...], source: str) -> list[Link]:
    if "default_link" not in top.given:
        return []
    link = Fields(f"{source}: default_link", top.get("default_link"), DEFAULT_LINK_FIELDS, ClusterError)
    names = [device.name for device in devices]
    return [_link(link, a, b) for a in names for b in names if a != b]


def _links(row: Any, element: str) -> list[Link]:
    link = Fields(element, row, LINK_FIELDS, ClusterError)
    both = read_flag(link, "both")
    ends = link.text("from"), link.text("to")
    return [_link(link, *ends)] + ([_link(link, *reversed(ends))] if both else [])


def _link(link: Fields, source: str, target: str) -> Link:
    return Link(
        source,
        target,
        link.number("bytes_per_second", above_zero=True),
        link.number("latency_seconds"),
        _channel(link) if "channel" in link.given else None,
        **read_shared_fields(link),
    )


def _channel(link: Fields) -> str | tuple[str, ...]:
    """Returns the channel in "bus", or the two in ["a card", "b card"]."""
    given = link.get("channel")
    if isinstance(given, str):
        return link.text("channel")
    if not isinstance(given, list) or not 1 <= len(given) <= 2 or not all(isinstance(name, str) for name in given):
        raise link.wrong(f"channel must be a name, or a list of two names, got {describe(given)}")
    return tuple(given)


def format_cluster(cluster: Cluster) -> str:
    """Returns the text of a cluster's file, with every link written out."""
    head: dict[str, Any] = {"format": FORMAT, "version": VERSION, "name": cluster.name}
    if cluster.description:
        head["description"] = cluster.description
    head["dispatch_seconds"] = float(cluster.dispatch_seconds)
    if cluster.copy_dispatch_seconds is not None:
        head["copy_dispatch_seconds"] = float(cluster.copy_dispatch_seconds)
    if cluster.cuda_graphs:
        head["cuda_graphs"] = True
    sections = [tomli_w.dumps(head)]
    for device in cluster.devices:
        fields: dict[str, Any] = {
            "name": device.name,
            "kind": device.kind,
            **({"host": device.host} if device.host else {}),
            "memory": _memory_text(int(device.memory_bytes)),
        }
        speeds = {
            "bytes_per_second": float(device.bytes_per_second),  # not a numpy scalar, which is not a TOML number
            "overhead_seconds": float(device.overhead_seconds),
        }
        sections.append(f"[[devices]]\n{tomli_w.dumps(fields)}flops = {_flops_text(device)}\n{tomli_w.dumps(speeds)}")
    for link in cluster.links:
        fields = {
            "from": link.source,
            "to": link.target,
            "bytes_per_second": float(link.bytes_per_second),
            "latency_seconds": float(link.latency_seconds),
        }
        if link.channel is not None:
            fields["channel"] = link.channel if isinstance(link.channel, str) else list(link.channel)
        fields |= shared_fields(link)
        tables = {name: value for name, value in fields.items() if isinstance(value, dict)}
        rest = {name: value for name, value in fields.items() if name not in tables}
        lines = "".join(f"{name} = {_inline(table)}\n" for name, table in tables.items())
        sections.append(f"[[links]]\n{tomli_w.dumps(rest)}{lines}")
    return "\n".join(sections)


def _inline(table: dict[str, float]) -> str:
    """Returns numbers as a table on one line, which tomli_w would write as a section of its own."""
    return f"{{{', '.join(f'{name} = {value!r}' for name, value in table.items())}}}"


def _flops_text(device: Device) -> str:
    """Returns one number, or a table by type, which tomli_w would not write on one line."""
    if not device.flops_by_type:
        return repr(float(device.flops))
    speeds = (("float32", device.flops), *device.flops_by_type)
    entries = [f"{name} = {np.format_float_scientific(float(flops), trim='-', exp_digits=1)}" for name, flops in speeds]
    return f"{{{', '.join(entries)}}}"


def _memory_text(memory_bytes: int) -> str | int:
    """Returns a memory size in the largest binary unit that gives a whole number, else in bytes."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if memory_bytes and memory_bytes % BYTE_UNITS[unit] == 0:
            return f"{memory_bytes // BYTE_UNITS[unit]}{unit}"
    return memory_bytes
