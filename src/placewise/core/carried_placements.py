"""A placement of one step carried over to a similar one: another batch size, one layer more, or the forward pass alone."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from placewise.core.graph import Graph
from placewise.core.grouping import module_path, module_path_of

FROM_NAME, FROM_MODULE, FROM_NEIGHBOUR = range(3)  # why an op goes where it goes


class CarriedOps(NamedTuple):
    """Where each op of a graph goes, and why."""

    places: tuple[str, ...]  # [ops], names of devices
    reasons: tuple[int, ...]  # [ops], FROM_NAME, FROM_MODULE or FROM_NEIGHBOUR


@dataclass(frozen=True)
class KnownPlaces:
    """Where the ops and modules of a placed step are, by name."""

    by_name: Mapping[str, str]  # an op's name -> a device's
    by_module: Mapping[str, str]  # a module's path -> the device of most of its ops; ties go to the first
    first: str  # the device of the first op; "" without ops

    @classmethod
    def of_graph(cls, graph: Graph, placement: Sequence[str]) -> "KnownPlaces":
        """Returns the places of all ops of a graph whose groups have these devices."""
        devices = [placement[group] for group in graph.ops.groups.tolist()]
        paths = [module_path(graph, op) for op in range(len(graph.ops))]
        return cls._of(graph.ops.names, paths, devices, placement[0] if placement else "")

    @classmethod
    def of_names(cls, names: Sequence[str], placement: Sequence[str]) -> "KnownPlaces":
        """Returns the places of ops with these names: one for each group."""
        return cls._of(names, [module_path_of(name) for name in names], placement, placement[0] if placement else "")

    @classmethod
    def _of(cls, names: Sequence[str], paths: Sequence[str], devices: Sequence[str], first: str) -> "KnownPlaces":
        votes: dict[str, Counter[str]] = {}
        for path, device in zip(paths, devices, strict=True):
            votes.setdefault(path, Counter())[device] += 1
        modules = {path: counted.most_common(1)[0][0] for path, counted in votes.items()}
        return cls(dict(zip(names, devices, strict=True)), modules, first)

    def carry_to(self, graph: Graph) -> CarriedOps:
        """Returns where the ops of another graph go.

        An op goes where the op of its name is, else where most ops of its module are, else where the op before it goes.
        """
        before, places, reasons = self.first, list[str](), list[int]()
        for op, name in enumerate(graph.ops.names):
            known, reason = self.by_name.get(name), FROM_NAME
            if known is None:
                known, reason = self.by_module.get(module_path(graph, op)), FROM_MODULE
            if known is None:
                known, reason = before, FROM_NEIGHBOUR
            before = known
            places.append(known)
            reasons.append(reason)
        return CarriedOps(tuple(places), tuple(reasons))


def carry_over(graph: Graph, placement: Sequence[str], other: Graph) -> tuple[str, ...]:
    """Returns a device's name for each group of another graph, from those of a graph's groups.

    A group goes where most of its ops go (`KnownPlaces.carry_to`); ties go to the first of them.
    """
    places = KnownPlaces.of_graph(graph, placement).carry_to(other).places
    votes: dict[int, Counter[str]] = {}
    for place, group in zip(places, other.ops.groups.tolist(), strict=True):
        votes.setdefault(group, Counter())[place] += 1
    last = places[-1] if places else placement[0] if placement else ""
    return tuple(votes[group].most_common(1)[0][0] if group in votes else last for group in range(other.num_groups))


def names_of_groups(graph: Graph) -> tuple[str, ...]:
    """Returns a name for each group by which another graph can find it: its first op's, or its first tensor's."""
    names = [""] * graph.num_groups
    for tensor, home in reversed(list(enumerate(graph.tensors.home.tolist()))):
        if home >= 0:
            names[home] = graph.tensors.names[tensor]
    for op, group in reversed(list(enumerate(graph.ops.groups.tolist()))):
        names[group] = graph.ops.names[op]
    return tuple(names)
