"""A graph to place on a cluster, with everything that is needed to evaluate a placement."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from placewise.core.arrays import MAX_NUMBER, Bools, Floats, Ints, frozen
from placewise.core.cluster import Cluster
from placewise.core.costs import predict_op_seconds
from placewise.core.errors import ProblemError
from placewise.core.graph import Graph, digest_of
from placewise.core.grouping import COLOCATED, group_ops
from placewise.core.optional_ops import leave_out

NOWHERE = -1  # the place of a group of optional ops that do not run


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
        seconds, parts = _most_seconds(self)
        if not seconds < MAX_NUMBER:
            raise ProblemError(f"{what}: {parts} of a step could take {MAX_NUMBER:g} s: times are too long to add up")
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
        merged = _merge(graph, grouping)
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
    def device_sets(self) -> Ints:
        """The number of the set of devices that each group can run on, by its first group: [groups]."""
        known: dict[bytes, int] = {}
        rows = np.packbits(self.allowed, axis=1)
        return frozen([known.setdefault(row.tobytes(), len(known)) for row in rows], np.int64)

    @cached_property
    def optional(self) -> Bools:
        """Whether each group may be nowhere: [groups]."""
        optional = np.zeros(self.num_groups, np.bool_)
        optional[self.merged] = self.graph.optional_groups
        return frozen(optional, np.bool_)

    @cached_property
    def fastest_seconds(self) -> Floats:
        """Each op's time on the fastest device that its group can run on: [ops]."""
        return frozen(np.where(self.allowed[self.op_groups], self.op_seconds, np.inf).min(axis=1), np.float64)

    @cached_property
    def digest(self) -> str:
        """A SHA-256 over the graph, the cluster and the grouping."""
        return digest_of([self.graph.digest, self.cluster.digest], self.merged, self.op_seconds)

    def check_placements(self, placements: Ints) -> Ints:
        """Returns the placements as int64 [batch, groups]; a ProblemError unless every group has an allowed device.

        A group of optional ops may be NOWHERE.
        """
        placements = np.asarray(placements)
        if placements.ndim != 2 or placements.shape[1] != self.num_groups or placements.dtype.kind not in "iu":
            raise ProblemError(
                f"placements must be whole numbers of shape [batch, {self.num_groups}], "
                f"got {placements.dtype} of shape {list(placements.shape)}"
            )
        nowhere = (placements == NOWHERE) & self.optional if self.graph.has_options else None
        inside = placements if nowhere is None else np.where(nowhere, 0, placements)
        if inside.size and not 0 <= inside.min() <= inside.max() < self.num_devices:
            row, group = np.argwhere((inside < 0) | (inside >= self.num_devices))[0]
            raise ProblemError(
                f"Expected 0 <= device < {self.num_devices}, placement {row} has {placements[row, group]} for group {group}."
            )
        denied = ~self.allowed[np.arange(self.num_groups), inside]
        denied = denied if nowhere is None else denied & ~nowhere
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

    def present(self, placement: Ints) -> "Present":
        """Returns what is left of the problem when a placement [groups] leaves some groups of optional ops nowhere."""
        is_there = np.asarray(placement) != NOWHERE
        left = leave_out(self.graph, is_there[self.merged])
        groups = np.flatnonzero(is_there)
        merged = np.searchsorted(groups, self.merged[left.groups])
        what = (left.graph, self.cluster, self.grouping, merged, self.op_seconds[left.ops], self.allowed[groups])
        return Present(Problem(*what), left.ops, left.tensors, groups, self)

    def check_plan(self, placement: Ints, order: Ints) -> Ints:
        """Returns the order as int64 [ops]; a ProblemError unless the ops of a placement [groups] can be launched in it.

        Ops that are nowhere may be anywhere in the order.
        """
        if not self.graph.has_options:
            return self.check_order(order)
        order = np.asarray(order)
        if not np.array_equal(np.sort(order), np.arange(self.num_ops)):
            raise ProblemError(f"an order must name each of the {self.num_ops} ops once")
        present = self.present(placement)
        present.problem.check_order(present.reduce_order(order))
        return order.astype(np.int64, copy=False)

    def expand(self, placement: Ints) -> tuple[str | None, ...]:
        """Returns a placement [groups] as a device name for each of the graph's own groups, None for one that is nowhere."""
        names = (*self.cluster.device_names, None)
        return tuple([names[device] for device in np.asarray(placement)[self.merged].tolist()])

    def contract(self, names: Sequence[str | None]) -> Ints:
        """Returns the placement [groups] for a device name, or None, for each of the graph's own groups."""
        number: dict[str | None, int] = {name: i for i, name in enumerate(self.cluster.device_names)}
        if self.graph.has_options:
            number[None] = NOWHERE
        if len(names) != len(self.merged):
            raise ProblemError(f"placement has {len(names)} entries, the graph has {len(self.merged)} groups")
        for group, name in enumerate(names):
            if name not in number:
                known = ", ".join(self.cluster.device_names)
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


class Present(NamedTuple):
    """What is left of a problem when some groups of optional ops are nowhere."""

    problem: Problem  # without options
    ops: Ints  # [ops left], their numbers in the whole problem
    tensors: Ints  # [tensors left], as ops
    groups: Ints  # [groups left], as ops
    whole: Problem  # with all its options

    def restore_times(self, times: list[float]) -> list[float | None]:
        """Returns a time for each op of the whole problem, None for those that do not run."""
        found: list[float | None] = [None] * self.whole.num_ops
        for op, seconds in zip(self.ops.tolist(), times, strict=True):
            found[op] = seconds
        return found

    def reduce_order(self, order: Ints) -> Ints:
        """Returns an order of the whole problem's ops as one of the ops left."""
        number = np.full(self.whole.num_ops, -1, np.int64)
        number[self.ops] = np.arange(len(self.ops))
        left: Ints = number[order]
        return left[left >= 0]

    def restore_order(self, order: Ints) -> Ints:
        """Returns an order of the ops left as one of the whole problem's: those that do not run come last."""
        return np.concatenate([self.ops[order], np.setdiff1d(np.arange(self.whole.num_ops), self.ops)])

    def restore_placement(self, placement: Ints) -> Ints:
        """Returns a placement of the groups left as one of the whole problem's."""
        restored = np.full(self.whole.num_groups, NOWHERE, np.int64)
        restored[self.groups] = placement
        return restored


def _most_seconds(problem: Problem) -> tuple[float, str]:
    """Returns seconds that no step exceeds, infinite if no float holds them, and what most of them are for, in words."""
    graph, cluster = problem.graph, problem.cluster
    ops = float(problem.op_seconds.max(axis=1, initial=0.0).sum())
    num_copies = len(graph.tensors) * (cluster.num_devices - 1)
    nbytes = float(graph.tensors.nbytes.sum(dtype=np.float64)) * (cluster.num_devices - 1)
    slowest = float(cluster.bytes_per_second.min())
    copies = nbytes / slowest if nbytes < slowest * MAX_NUMBER else np.inf
    copies += num_copies * float(cluster.latency_seconds.max() + cluster.delay_seconds.max())
    fixed, per_byte, fixed_there, per_byte_there = cluster.copy_work.max(axis=(1, 2)).tolist()
    copies += num_copies * (fixed + fixed_there) + nbytes * (per_byte + per_byte_there)
    launches = cluster.dispatch_seconds * problem.num_ops + cluster.copy_launch_seconds * 2 * num_copies
    return ops + copies + launches, max((ops, "the ops"), (copies, "the copies"), (launches, "the launches"))[1]


def _merge(graph: Graph, grouping: str) -> Ints:
    """Returns the merged group of each of the graph's groups; those of optional ops stay alone: [the graph's groups]."""
    if not graph.has_options:
        return group_ops(graph, grouping)
    left = leave_out(graph, ~graph.optional_groups)
    merged = np.full(graph.num_groups, -1, np.int64)
    merged[left.groups] = group_ops(left.graph, grouping)
    alone = merged < 0
    merged[alone] = int(merged.max(initial=-1)) + 1 + np.arange(int(alone.sum()))
    return merged
