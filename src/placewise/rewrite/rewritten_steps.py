"""Rewrites by name: applied to a captured step in turn, and again to the step that a plan was made for."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from placewise.core.errors import PlanError
from placewise.core.graph import Graph
from placewise.core.plan import Plan, digest_of_graph
from placewise.formats.files import describe
from placewise.graph_capture.capture import CapturedStep
from placewise.graph_capture.program import Program
from placewise.rewrite.augmented_program import augment
from placewise.rewrite.fuse import fuse
from placewise.rewrite.memory_options import MEMORY_OPTIONS, check_rewrites
from placewise.rewrite.optional_tensors import OptionalTensors

FUSE = "fuse 2"  # with its version: another version makes another graph of the same step


def _add_options(choice: OptionalTensors) -> Callable[[CapturedStep], tuple[Graph, Program]]:
    return lambda step: augment(step.graph, step.program, choice)


REWRITES: dict[str, Callable[[CapturedStep], tuple[Graph, Program]]] = {
    FUSE: fuse,
    **{name: _add_options(choice) for name, choice in MEMORY_OPTIONS.items()},
}


def rewrite(step: CapturedStep, names: Sequence[str]) -> CapturedStep:
    """Returns the step as the rewrites of these names make it from the captured one."""
    captured = step if step.captured is None else step.captured
    found = captured
    for name in names:
        if name not in REWRITES:
            raise PlanError(
                f"plan: its graph was made by {describe(name)}, which this version does not have "
                f"(it has {', '.join(REWRITES)})"
            )
    check_rewrites(names)
    for name in names:
        graph, program = REWRITES[name](found)
        graph = replace(graph, rewrites=(*found.graph.rewrites, name))
        found = replace(captured, graph=graph, program=program, captured=captured)
    return found


def step_of_plan(plan: Plan, step: CapturedStep) -> CapturedStep:
    """Returns the step that a plan is for: rewritten as its graph was, if it is not that of the given step."""
    if plan.graph_digest in (None, digest_of_graph(step.graph)) or plan.rewrites == step.graph.rewrites:
        return step
    return rewrite(step, plan.rewrites)
