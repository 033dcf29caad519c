"""plan.json: a plan as text."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from placewise.core.errors import PlanError
from placewise.core.plan import Plan
from placewise.formats.files import Table, describe, parse_json, read_bytes, write_bytes

FORMAT, VERSION = "placewise-plan", 1


def read_plan(path: str | Path) -> Plan:
    """Returns the plan of a file; a PlanError names the file, the field and the rule that does not hold."""
    return _parse(parse_json(path, read_bytes(path, PlanError), PlanError), str(path))


def write_plan(plan: Plan, path: str | Path) -> None:
    """Writes the plan's file."""
    write_bytes(path, (json.dumps(plan_fields(plan), allow_nan=False) + "\n").encode())


def plan_fields(plan: Plan) -> dict[str, Any]:
    """Returns what a plan's file holds."""
    return {"format": FORMAT, "version": VERSION, **asdict(plan)}


def _parse(data: Any, source: str) -> Plan:
    known = tuple(Plan.__dataclass_fields__)
    table = Table(source, data, ("format", "version", *known), PlanError)
    table.kind_of_file(FORMAT, VERSION)
    placement = table.rows("placement")
    for group, name in enumerate(placement):
        if not isinstance(name, str):
            raise table.wrong(f"placement[{group}] must be a device's name, it is {describe(name)}")
    order = None if table.get("order", None) is None else tuple(table.indices("order"))
    return Plan(tuple(placement), order, **_findings(table))


def _findings(table: Table) -> dict[str, Any]:
    """Returns the fields that say what was found, where they are given."""
    found: dict[str, Any] = {}
    for name in ("graph_digest", "cluster", "strategy"):
        if table.get(name, None) is not None:
            found[name] = table.text(name)
    for name in ("seed", "evaluations"):
        if table.get(name, None) is not None:
            found[name] = table.integer(name)
    for name in ("step_seconds", "bound_seconds", "gap", "predicted_seconds"):
        if table.get(name, None) is not None:
            found[name] = table.number(name)
    for name in ("parameters", "peak_bytes"):
        if not isinstance(value := table.get(name, {}), dict):
            raise table.wrong(f"{name} must be a table, it is {describe(value)}")
        found[name] = value
    peaks = Table(f"{table.element}: peak_bytes", found["peak_bytes"], tuple(found["peak_bytes"]), PlanError)
    found["peak_bytes"] = {device: peaks.integer(device) for device in found["peak_bytes"]}
    if (fits := table.get("fits", None)) not in (None, True, False) or type(fits) is int:
        raise table.wrong(f"fits must be true or false, it is {describe(fits)}")
    return {**found, "fits": fits, "history": _history(table)}


def _history(table: Table) -> tuple[tuple[int, float], ...]:
    rows = table.rows("history", [])
    for i, row in enumerate(rows):
        if not (isinstance(row, list) and len(row) == 2 and all(type(entry) in (int, float) for entry in row)):
            raise table.wrong(f"history[{i}] must be [evaluations, seconds], it is {describe(row)}")
    return tuple((int(spent), float(best)) for spent, best in rows)
