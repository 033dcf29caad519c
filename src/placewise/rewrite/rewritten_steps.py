"""Rewrites by name: applied to a captured step in turn, and again to the step that a plan was made for."""

from collections.abc import Sequence
from dataclasses import replace

from placewise.core.errors import PlanError
from placewise.graph_capture.capture import CapturedStep
from placewise.rewrite.fuse import fuse

FUSE = "fuse 1"  # with its version: another version makes another graph of the same step

REWRITES = {FUSE: fuse}


def rewrite(step: CapturedStep, names: Sequence[str]) -> CapturedStep:
    """Returns the step as the rewrites of these names make it from the captured one."""
    captured = step if step.captured is None else step.captured
    found = captured
    for name in names:
        if name not in REWRITES:
            raise PlanError(
                f"plan: its graph was made by {name!r}, which this version does not have (it has {', '.join(REWRITES)})"
            )
        graph, program = REWRITES[name](found)
        graph = replace(graph, rewrites=(*graph.rewrites, name))
        found = replace(captured, graph=graph, program=program, captured=captured)
    return found
