"""The rewrites that add optional ops, by name, on a graph alone: for placing and predicting, which need no program."""

from collections.abc import Sequence
from dataclasses import replace

from placewise.core.errors import PlanError
from placewise.core.graph import Graph
from placewise.core.plan import Plan, digest_of_graph
from placewise.formats.files import describe
from placewise.rewrite.augmented_graph import OPTIONS, add_options
from placewise.rewrite.optional_tensors import OptionalTensors

RECOMPUTE, PARK = "recompute 3", "park 2"  # with their versions, as those of augmented_graph

MEMORY_OPTIONS = {
    OPTIONS: OptionalTensors(),
    RECOMPUTE: OptionalTensors(wait=False, visit=False),
    PARK: OptionalTensors(repeat=False),
}


def memory_rewrites(recompute: bool = True, park: bool = True) -> tuple[str, ...]:
    """Returns the names of the rewrites that let a step recompute tensors, and let them wait elsewhere."""
    if recompute:
        return (OPTIONS if park else RECOMPUTE,)
    return (PARK,) if park else ()


def rewrite_graph(graph: Graph, names: Sequence[str]) -> Graph:
    """Returns a graph as these rewrites make it; they add optional ops."""
    for name in names:
        graph = replace(add_options(graph, MEMORY_OPTIONS[name]).graph, rewrites=(*graph.rewrites, name))
    return graph


def check_rewrites(names: Sequence[str]) -> None:
    """Refuses rewrites that are repeated, or that add optional ops to optional ops: a file could name thousands."""
    if len(set(names)) < len(names) or len([name for name in names if name in MEMORY_OPTIONS]) > 1:
        raise PlanError(
            f"plan: its {len(names)} rewrites must all be different, and at most one may add optional ops: "
            f"{describe(', '.join(names))}"
        )


def graph_of_plan(graph: Graph, plan: Plan) -> Graph:
    """Returns the graph that a plan is for, if optional ops make it of this one; else this one."""
    done = len(graph.rewrites)
    others = plan.rewrites[done:]
    is_other = plan.graph_digest is not None and plan.graph_digest != digest_of_graph(graph)
    if is_other and plan.rewrites[:done] == graph.rewrites and all(name in MEMORY_OPTIONS for name in others):
        check_rewrites(plan.rewrites)
        return rewrite_graph(graph, others)
    return graph
