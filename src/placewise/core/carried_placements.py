"""A placement of one step carried over to a similar one: another batch size, another length, or the forward pass alone."""

from collections import Counter
from collections.abc import Sequence

from placewise.core.graph import Graph
from placewise.core.grouping import module_path


def carry_over(graph: Graph, placement: Sequence[str], other: Graph) -> tuple[str, ...]:
    """Returns a device's name for each group of another graph, from those of a graph's groups.

    An op goes where the op of its name is, or else where most ops of its module are, or else where the op before it goes. A
    group goes where most of its ops go; ties go to the first of them.
    """
    groups = graph.ops.groups.tolist()
    devices = {name: placement[group] for name, group in zip(graph.ops.names, groups, strict=True)}
    by_module: dict[str, Counter[str]] = {}
    for op, name in enumerate(graph.ops.names):
        by_module.setdefault(module_path(graph, op), Counter())[devices[name]] += 1
    votes: dict[int, Counter[str]] = {}
    before = placement[0] if placement else ""
    for op, (name, group) in enumerate(zip(other.ops.names, other.ops.groups.tolist(), strict=True)):
        counted = by_module.get(module_path(other, op))
        before = devices.get(name) or (counted.most_common(1)[0][0] if counted else before)
        votes.setdefault(group, Counter())[before] += 1
    return tuple(votes[group].most_common(1)[0][0] if group in votes else before for group in range(other.num_groups))
