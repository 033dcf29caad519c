"""A graph to place on a cluster, with everything that is needed to evaluate a placement."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from placewise.core.arrays import MAX_NUMBER, Bools, Floats, Ints, frozen
from placewise.core.cluster import Cluster
from placewise.core.costs import predict_op_seconds
from placewise.core.errors import ProblemError
from placewise.core.graph import Graph, digest_of
from placewise.core.grouping import COLOCATED, group_ops


@dataclass(frozen=True, eq=False)
class Problem:
    """The task of finding a device for each group. A group here is one or several of the graph's own groups.

    `Problem.of` makes one from a graph and a cluster.
    """

    graph: Graph
    cluster: Cluster
    grouping: str  # the name of the grouping, which gave `merged`
    merged: Ints  # [the graph's groups] -> group of the problem
    op_seconds: Floats  # [ops, devices]
    allowed: Bools  # [groups, devices], whether all ops of a group can run there

    def __post_init__(self) -> None:
        object.__setattr__(self, "merged", frozen(self.merged, np.int64))
        object.__setattr__(self, "op_seconds", frozen(self.op_seconds, np.float64))
        object.__setattr__(self, "allowed", frozen(self.allowed, np.bool_))
        what = f"graph {self.graph.name!r} on cluster {self.cluster.name!r}"
        endless = np.argwhere(self.op_seconds >= MAX_NUMBER)
        if len(endless):
            op, device = endless[0]
            place = self.cluster.device_names[device]
            raise ProblemError(f"{what}: ops[{op}] {self.graph.ops.names[op]!r} would never finish on {place!r}")
        stuck = np.flatnonzero(~self.allowed.any(axis=1))
        if len(stuck):
            op = int(np.flatnonzero(self.op_groups == stuck[0])[0])
            kinds = sorted({device.kind for device in self.cluster.devices})
            raise ProblemError(
                f"{what}: no device can run the group of ops[{op}] {self.graph.ops.names[op]!r}; "
                f"the cluster's kinds of device are {', '.join(kinds)}"
            )

    @classmethod
    def of(cls, graph: Graph, cluster: Cluster, grouping: str = COLOCATED) -> "Problem":
        """Returns the problem of placing the graph's groups, merged by `grouping`, on the cluster."""
        merged = group_ops(graph, grouping)
        allowed = np.ones((int(merged.max(initial=-1)) + 1, cluster.num_devices), np.bool_)
        for kinds in sorted({kinds for kinds in graph.ops.devices if kinds is not None}):
            bound = np.array([entry == kinds for entry in graph.ops.devices], np.bool_)
            can = np.array([device.kind in kinds for device in cluster.devices], np.bool_)
            allowed[merged[graph.ops.groups[bound]]] &= can
        return cls(graph, cluster, grouping, merged, predict_op_seconds(graph, cluster), allowed)

    @property
    def num_ops(self) -> int:
        """The number of ops."""
        return len(self.graph.ops)

    @property
    def num_groups(self) -> int:
        """The number of groups to place."""
        return len(self.allowed)

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return self.cluster.num_devices

    @cached_property
    def op_groups(self) -> Ints:
        """Each op's group: [ops]."""
        return frozen(self.merged[self.graph.ops.groups], np.int64)

    @cached_property
    def fastest_seconds(self) -> Floats:
        """Each op's time on the fastest device that its group can run on: [ops]."""
        return frozen(np.where(self.allowed[self.op_groups], self.op_seconds, np.inf).min(axis=1), np.float64)

    @cached_property
    def digest(self) -> str:
        """A SHA-256 over the graph, the cluster and the grouping."""
        return digest_of([self.graph.digest, self.cluster.digest], self.merged, self.op_seconds)

    def check_placements(self, placements: Ints) -> Ints:
        """Returns the placements as int64 [batch, groups]; a ProblemError unless every group has an allowed device."""
        placements = np.asarray(placements)
        if placements.ndim != 2 or placements.shape[1] != self.num_groups or placements.dtype.kind not in "iu":
            raise ProblemError(
                f"placements must be whole numbers of shape [batch, {self.num_groups}], "
                f"got {placements.dtype} of shape {list(placements.shape)}"
            )
        if placements.size and not 0 <= placements.min() <= placements.max() < self.num_devices:
            row, group = np.argwhere((placements < 0) | (placements >= self.num_devices))[0]
            raise ProblemError(
                f"Expected 0 <= device < {self.num_devices}, placement {row} has {placements[row, group]} for group {group}."
            )
        denied = ~self.allowed[np.arange(self.num_groups), placements]
        if denied.any():
            row, group = np.argwhere(denied)[0]
            device = self.cluster.devices[placements[row, group]]
            raise ProblemError(f"placement {row} puts group {group} on {device.name!r}, which can't run all of its ops")
        return placements.astype(np.int64, copy=False)

    def check_order(self, order: Ints) -> Ints:
        """Returns the order as int64 [ops]; a ProblemError unless it launches every op once, after those that it needs."""
        order = np.asarray(order)
        whole = order.shape == (self.num_ops,) and order.dtype.kind in "iu"
        if not whole or not np.array_equal(np.sort(order), np.arange(self.num_ops)):
            raise ProblemError(f"an order must name each of the {self.num_ops} ops once")
        position = np.empty(self.num_ops, np.int64)
        position[order] = np.arange(self.num_ops)
        writers, readers, _ = self.graph.edges
        after = self.graph.ops.after
        for before, later in ((writers, readers), (after.values, after.rows)):
            wrong = np.flatnonzero(position[before] >= position[later])
            if len(wrong):
                n, m = later[wrong[0]], before[wrong[0]]
                names = self.graph.ops.names
                raise ProblemError(f"the order launches ops[{n}] {names[n]!r} before ops[{m}] {names[m]!r}, which it needs")
        return order.astype(np.int64, copy=False)

    def expand(self, placement: Ints) -> tuple[str, ...]:
        """Returns a placement [groups] as a device name for each of the graph's own groups."""
        names = self.cluster.device_names
        return tuple(names[device] for device in np.asarray(placement)[self.merged].tolist())

    def contract(self, names: Sequence[str]) -> Ints:
        """Returns the placement [groups] for a device name for each of the graph's own groups."""
        number = {name: i for i, name in enumerate(self.cluster.device_names)}
        if len(names) != len(self.merged):
            raise ProblemError(f"placement has {len(names)} entries, the graph has {len(self.merged)} groups")
        for group, name in enumerate(names):
            if name not in number:
                known = ", ".join(number)
                raise ProblemError(f"placement[{group}]: there is no device {name!r}; the devices are {known}")
        devices = np.array([number[name] for name in names], np.int64)
        placement = np.zeros(self.num_groups, np.int64)
        placement[self.merged] = devices
        split = np.flatnonzero(placement[self.merged] != devices)
        if len(split):
            raise ProblemError(
                f"placement[{split[0]}]: {names[split[0]]!r} splits a group that {self.grouping!r} keeps together"
            )
        self.check_placements(placement[None])
        return placement
