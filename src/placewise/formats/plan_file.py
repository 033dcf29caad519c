"""Reads and writes plan.json."""

import json
import tomllib
from dataclasses import asdict, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from types import NoneType
from typing import Any

from placewise.core.errors import ClusterError, InputError, PlanError
from placewise.core.plan import Plan, Simplicity
from placewise.formats.cluster_file import format_cluster, parse_cluster
from placewise.formats.files import Fields, describe, read_json, write_bytes

FORMAT, VERSION = "placewise-plan", 1


def read_plan(path: str | Path) -> Plan:
    """Returns the plan in a file; a PlanError names the file, the field and the rule that does not hold."""
    fields = Fields(str(path), read_json(path, PlanError), ("format", "version", *Plan.__dataclass_fields__), PlanError)
    fields.check_format(FORMAT, VERSION)
    placement = fields.entries("placement")
    for group, name in enumerate(placement):
        if not isinstance(name, (str, NoneType)):
            raise fields.wrong(f"placement[{group}] must be a device's name or null, got {describe(name)}")
    order = None if fields.get("order", None) is None else tuple(fields.indices("order"))
    groups = () if fields.get("groups", None) is None else tuple(fields.texts("groups"))
    if groups and len(groups) != len(placement):
        raise fields.wrong(f"groups has {len(groups):,} names, placement has {len(placement):,} entries")
    return Plan(tuple(placement), order, groups=groups, **_findings(fields))


def write_plan(plan: Plan, path: str | Path) -> None:
    """Writes the plan to a file."""
    write_bytes(path, (json.dumps(plan_fields(plan), allow_nan=False) + "\n").encode())


def plan_fields(plan: Plan) -> dict[str, Any]:
    """Returns what a plan's file contains."""
    fields = {"format": FORMAT, "version": VERSION, **asdict(replace(plan, machine=None))}
    for name in ("groups", "rewrites", "interval_seconds", "simplicity", "cuda_graphs"):
        if not fields[name]:
            del fields[name]
    return fields if plan.machine is None else {**fields, "machine": tomllib.loads(format_cluster(plan.machine))}


def _findings(plan: Fields) -> dict[str, Any]:
    """Returns the fields about the search and its result, as far as they are given."""
    found: dict[str, Any] = {}
    for name in ("graph_digest", "cluster", "strategy"):
        if plan.get(name, None) is not None:
            found[name] = plan.text(name)
    if plan.get("rewrites", None) is not None:
        found["rewrites"] = tuple(plan.texts("rewrites"))
    for name in ("seed", "evaluations"):
        if plan.get(name, None) is not None:
            found[name] = plan.integer(name)
    for name in ("step_seconds", "bound_seconds", "gap", "predicted_seconds"):
        if plan.get(name, None) is not None:
            found[name] = plan.number(name)
    if (interval := plan.get("interval_seconds", None)) is not None:
        names = ("low", "high")
        if not (isinstance(interval, list) and len(interval) == 2):
            raise plan.wrong(f"interval_seconds must be [low, high], got {describe(interval)}")
        ends = Fields(f"{plan.element}: interval_seconds", dict(zip(names, interval, strict=True)), names, PlanError)
        found["interval_seconds"] = (ends.number("low"), ends.number("high"))
    if plan.get("simplicity", None) is not None:
        found["simplicity"] = read_simplicity(plan.mapping("simplicity"), f"{plan.element}: simplicity", PlanError)
    found["cuda_graphs"] = plan.get("cuda_graphs", False)
    if not isinstance(found["cuda_graphs"], bool):
        raise plan.wrong(f"cuda_graphs must be true or false, got {describe(found['cuda_graphs'])}")
    found["parameters"], peaks = plan.mapping("parameters", {}), plan.mapping("peak_bytes", {})
    devices = Fields(f"{plan.element}: peak_bytes", peaks, tuple(peaks), PlanError)
    found["peak_bytes"] = {device: devices.integer(device) for device in peaks}
    if (machine := plan.get("machine", None)) is not None:
        try:
            found["machine"] = parse_cluster(machine, f"{plan.element}: machine")
        except ClusterError as problem:
            raise PlanError(str(problem)) from None
    if (fits := plan.get("fits", None)) not in (None, True, False) or type(fits) is int:
        raise plan.wrong(f"fits must be true or false, got {describe(fits)}")
    return {**found, "fits": fits, "history": _history(plan)}


def read_simplicity(given: dict[str, Any], source: str, error: type[InputError]) -> Simplicity:
    """Returns what a plan gave for being simple, as a file says it."""
    kinds = {entry.name: entry.type for entry in dataclass_fields(Simplicity)}
    fields = Fields(source, given, tuple(kinds), error)
    values: dict[str, Any] = {
        name: fields.number(name) if kind in (float, "float") else fields.integer(name) for name, kind in kinds.items()
    }
    return Simplicity(**values)


def _history(plan: Fields) -> tuple[tuple[int, float], ...]:
    history = []
    for i, row in enumerate(plan.entries("history", [])):
        if not (isinstance(row, list) and len(row) == 2):
            raise plan.wrong(f"history[{i}] must be [evaluations, seconds], got {describe(row)}")
        names = ("evaluations", "seconds")
        pair = Fields(f"{plan.element}: history[{i}]", dict(zip(names, row, strict=True)), names, PlanError)
        history.append((pair.integer("evaluations"), pair.number("seconds")))
    return tuple(history)
