"""Gives a program order to graphs whose files have none."""

import heapq
from collections.abc import Sequence

from placewise.core.errors import GraphError


def topological_order(names: Sequence[str], edges: Sequence[tuple[int, int]], source: str) -> list[int]:
    """Returns the nodes, by position in the file, so that every edge points forward; ties go to the lowest position.

    A cycle raises a GraphError that names the file (`source`) and a node of the cycle.
    """
    followers: list[list[int]] = [[] for _ in names]
    waits = [0] * len(names)
    for tail, head in edges:
        followers[tail].append(head)
        waits[head] += 1
    ready = [node for node, count in enumerate(waits) if count == 0]  # ascending, so already a heap
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
        raise GraphError(f"{source}: {names[node]}: is part of a cycle, a graph must not have one")
    return order


def _node_of_cycle(stuck: list[bool], edges: Sequence[tuple[int, int]]) -> int:
    """Returns a node of a cycle: every stuck node waits for another stuck one, so walking back must end in a cycle."""
    waits_for = {head: tail for tail, head in reversed(edges) if stuck[tail] and stuck[head]}
    node = stuck.index(True)
    seen: dict[int, None] = {}
    while node not in seen:
        seen[node] = None
        node = waits_for[node]
    return node
