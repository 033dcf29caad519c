"""A program order for graphs whose files have none."""

import heapq
from collections.abc import Sequence

from placewise.core.errors import GraphError


def topological_order(names: Sequence[str], edges: Sequence[tuple[int, int]], source: str) -> list[int]:
    """Returns the nodes' positions so that every edge leads forwards; ties go to the lowest position in the file.

    A cycle is a GraphError that names `source`, the file, and a node of the cycle.
    """
    followers: list[list[int]] = [[] for _ in names]
    waits = [0] * len(names)
    for tail, head in edges:
        followers[tail].append(head)
        waits[head] += 1
    ready = [node for node, count in enumerate(waits) if count == 0]  # ascending, so a heap already
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for follower in followers[node]:
            waits[follower] -= 1
            if waits[follower] == 0:
                heapq.heappush(ready, follower)
    if len(order) < len(names):
        node = _node_of_cycle([count > 0 for count in waits], edges)
        raise GraphError(f"{source}: {names[node]}: its edges lead back to it, a graph must not have a cycle")
    return order


def _node_of_cycle(stuck: list[bool], edges: Sequence[tuple[int, int]]) -> int:
    """Returns a node of a cycle: every stuck node waits for a stuck one, so going back must end in a circle."""
    waits_for = {head: tail for tail, head in reversed(edges) if stuck[tail] and stuck[head]}
    node = stuck.index(True)
    seen: dict[int, None] = {}
    while node not in seen:
        seen[node] = None
        node = waits_for[node]
    return node
