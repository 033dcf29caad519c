"""Reads and writes profile.json."""

import json
from pathlib import Path
from typing import Any

from placewise.core.cluster import Link
from placewise.core.errors import ProfileError
from placewise.core.profile import CheckedPrediction, Contention, Profile, ProfiledDevice, Timing
from placewise.formats.files import Fields, read_json, write_bytes
from placewise.formats.link_fields import SHARED_FIELDS, read_shared_fields, shared_fields

FORMAT, VERSION = "placewise-profile", 1

PROFILE_FIELDS = (
    "format",
    "version",
    "devices",
    "links",
    "dispatch_seconds",
    "copy_dispatch_seconds",
    "contention",
    "checks",
    "timings",
)

CHECK_FIELDS = ("placement", "predicted_seconds", "measured_seconds")

DEVICE_FIELDS = ("name", "kind", "hardware", "times_of", "slices", "part_of")

LINK_FIELDS = ("from", "to", "bytes_per_second", "latency_seconds", *SHARED_FIELDS)

TIMING_FIELDS = ("seconds", "count", "spread_seconds")  # the last one in older files only, and unused

FACTORS = ("compute", "memory", "memory_beside_compute", "copies", "cached", "cached_beside_compute")


def read_profile(path: str | Path) -> Profile:
    """Returns the profile in a file; a ProfileError names the file, the field and the rule that does not hold."""
    return parse_profile(read_json(path, ProfileError), str(path))


def write_profile(profile: Profile, path: str | Path) -> None:
    """Writes the profile to a file."""
    write_bytes(path, format_profile(profile).encode())


def parse_profile(data: Any, source: str = "profile") -> Profile:
    """Returns the profile in the parsed JSON of a file; errors name `source`."""
    top = Fields(source, data, PROFILE_FIELDS, ProfileError)
    top.check_format(FORMAT, VERSION)
    devices = tuple(_device(row, f"{source}: devices[{i}]") for i, row in enumerate(top.entries("devices")))
    names = [device.name for device in devices]
    for i, device in enumerate(devices):
        if device.times_of not in names or names.count(device.name) > 1:
            raise ProfileError(f"{source}: devices[{i}]: times_of must be a device, and no two devices may share a name")
    links = tuple(_link(row, f"{source}: links[{i}]", names) for i, row in enumerate(top.entries("links", [])))
    return Profile(
        devices,
        {
            signature: _timings(row, f"{source}: timings[{signature!r}]", names)
            for signature, row in top.mapping("timings").items()
        },
        links,
        top.number("dispatch_seconds", 0),
        {kind: _contention(row, f"{source}: contention[{kind!r}]") for kind, row in top.mapping("contention", {}).items()},
        tuple(_check(row, f"{source}: checks[{i}]") for i, row in enumerate(top.entries("checks", []))),
        top.number("copy_dispatch_seconds") if "copy_dispatch_seconds" in top.given else None,
    )


def _device(row: Any, element: str) -> ProfiledDevice:
    device = Fields(element, row, DEVICE_FIELDS, ProfileError)
    name, kind, hardware = device.text("name"), device.text("kind"), device.text("hardware")
    times_of, part_of = device.text("times_of"), device.text("part_of", "")
    return ProfiledDevice(name, kind, hardware, times_of, device.integer("slices", 1), part_of)


def _link(row: Any, element: str, names: list[str]) -> Link:
    link = Fields(element, row, LINK_FIELDS, ProfileError)
    source, target = link.text("from"), link.text("to")
    for name in (source, target):
        if name not in names:
            raise link.wrong(f"there is no device {name!r}; the devices are {', '.join(names)}")
    return Link(
        source,
        target,
        link.number("bytes_per_second", above_zero=True),
        link.number("latency_seconds"),
        **read_shared_fields(link),
    )


def _check(row: Any, element: str) -> CheckedPrediction:
    check = Fields(element, row, CHECK_FIELDS, ProfileError)
    seconds = (check.number(name, above_zero=True) for name in CHECK_FIELDS[1:])
    return CheckedPrediction(check.text("placement"), *seconds)


def _timings(row: Any, element: str, names: list[str]) -> dict[str, Timing]:
    devices = Fields(element, row, names, ProfileError)
    found = {}
    for name in devices.given:
        timing = Fields(f"{element}: {name}", devices.get(name), TIMING_FIELDS, ProfileError)
        found[name] = Timing(timing.number("seconds"), timing.integer("count", 1))
    return found


def _contention(row: Any, element: str) -> Contention:
    fields = Fields(element, row, (*FACTORS, "cache_bytes"), ProfileError)
    found: dict[str, Any] = {}
    for name in FACTORS:
        factors = fields.entries(name, ... if name in ("compute", "memory") else [1.0])  # older files have only these two
        if not factors or any(type(factor) not in (int, float) or not 1 <= factor < 1e6 for factor in factors):
            raise fields.wrong(f"{name} must be a list of at least one number, none below 1, got {factors}")
        found[name] = tuple(float(factor) for factor in factors)
    return Contention(**found, cache_bytes=fields.number("cache_bytes", 0))


def format_profile(profile: Profile) -> str:
    """Returns the text of a profile's file, with a line for each device, link and signature."""
    devices = [
        {name: getattr(device, name) for name in DEVICE_FIELDS if name != "part_of" or device.part_of}
        for device in profile.devices
    ]
    links = [
        dict(zip(LINK_FIELDS, (link.source, link.target, link.bytes_per_second, link.latency_seconds), strict=False))
        | shared_fields(link)
        for link in profile.links
    ]
    contention = {kind: vars(factors) for kind, factors in profile.contention.items()}
    head = {"format": FORMAT, "version": VERSION, "dispatch_seconds": profile.dispatch_seconds, "contention": contention}
    if profile.copy_dispatch_seconds is not None:
        head["copy_dispatch_seconds"] = profile.copy_dispatch_seconds
    checks = [vars(check) for check in profile.checks]
    timings = [
        f"{json.dumps(signature)}: {_encode({name: vars(timing) for name, timing in row.items()})}"
        for signature, row in sorted(profile.timings.items())
    ]
    sections = {"devices": map(_encode, devices), "links": map(_encode, links), "checks": map(_encode, checks)}
    lists = "".join(f' "{name}": [{_lines(entries)}],\n' for name, entries in sections.items())
    return f'{_encode(head)[:-1]},\n{lists} "timings": {{{_lines(timings)}}}}}\n'


def _encode(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _lines(entries: Any) -> str:
    return ",".join(f"\n  {entry}" for entry in entries)
