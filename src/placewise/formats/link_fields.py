"""What cluster and profile files both say of a link."""

from typing import Any

import numpy as np

from placewise.core.cluster import NO_WORK, CopyWork, Link
from placewise.formats.files import Fields, describe

SHARED_FIELDS = ("host_waits", "source_work", "target_work", "delay_seconds")


def read_shared_fields(link: Fields) -> dict[str, Any]:
    """Returns the arguments of a Link that are in SHARED_FIELDS."""
    return {
        "host_waits": read_flag(link, "host_waits"),
        "source_work": _read_work(link, "source_work"),
        "target_work": _read_work(link, "target_work"),
        "delay_seconds": link.number("delay_seconds", 0),
    }


def read_flag(link: Fields, name: str) -> bool:
    """Returns whether a field is true; it is false if it is not given."""
    given = link.get(name, False)
    if not isinstance(given, bool):
        raise link.wrong(f"{name} must be true or false, got {describe(given)}")
    return given


def _read_work(link: Fields, name: str) -> CopyWork:
    """Returns what is in {seconds = 2e-5, bytes_per_second = 3e9}; each may be left out."""
    if name not in link.given:
        return NO_WORK
    work = Fields(f"{link.element}: {name}", link.get(name), CopyWork._fields, link.error)
    speed = work.number("bytes_per_second", above_zero=True) if "bytes_per_second" in work.given else np.inf
    return CopyWork(work.number("seconds", 0), speed)


def shared_fields(link: Link) -> dict[str, Any]:
    """Returns those of SHARED_FIELDS that the link has."""
    found: dict[str, Any] = {"host_waits": True} if link.host_waits else {}
    for name, work in (("source_work", link.source_work), ("target_work", link.target_work)):
        if work != NO_WORK:
            found[name] = {key: float(value) for key, value in work._asdict().items() if np.isfinite(value)}
    if link.delay_seconds:
        found["delay_seconds"] = float(link.delay_seconds)
    return found
