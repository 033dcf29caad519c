"""Steps to simulate: small machines by hand, and random graphs, clusters, placements and launch orders."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from builders import graph_data, op, tensor
from hypothesis import strategies as st

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation, Proposal, Search
from placewise.core.graph import COMPUTE_TYPES
from placewise.core.problem import NOWHERE, Problem
from placewise.formats.cluster_file import parse_cluster
from placewise.formats.graph_file import parse_graph
from placewise.simulate import reference

GROUPINGS = ("colocated", "colocated", "single-consumer", "module", "coarse:3", "coarse:6")


def all_proposals(search: Search) -> list[Proposal]:
    """Returns all that a search proposes if everything fits and costs nothing."""
    found, proposal = [], next(search)
    while True:
        found.append(proposal)
        count = len(proposal.placements)
        try:
            proposal = search.send(Evaluation(np.zeros(count), np.zeros(count), np.zeros(count, np.int64)))
        except StopIteration:
            return found


@dataclass(frozen=True)
class Step:
    """A graph on a cluster: as plain data, which the reference reads, and as a problem."""

    graph: dict[str, Any]
    cluster: dict[str, Any]
    problem: Problem

    @classmethod
    def of(cls, graph: dict[str, Any], cluster: dict[str, Any], grouping: str = "colocated") -> "Step":
        """Returns the step of plain data."""
        return cls(graph, cluster, Problem.of(parse_graph(graph), parse_cluster(cluster), grouping))

    def reference(self, placement: Ints, order: Ints | None = None) -> dict[str, Any]:
        """Returns the reference's result for a placement [groups], launched in an order [ops] or in program order."""
        launches = None if order is None else order.tolist()
        return reference.simulate(self.graph, self.cluster, self.problem.expand(placement), launches)

    def peaks(self, placement: Ints, order: Ints | None = None) -> list[int]:
        """Returns the definition's peak bytes of each device."""
        return list(self.reference(placement, order)["peak_bytes"].values())


def gpus(count: int, memory: int = 1000, dispatch: float = 0, channel: str | None = None) -> dict[str, Any]:
    """Returns equal GPUs; a copy takes 1 s and 1 s more for each byte. All links are one channel, or each is its own."""
    gpu = {"kind": "gpu", "memory": memory, "flops": 1, "bytes_per_second": 1}
    link: dict[str, Any] = {"latency_seconds": 1, "bytes_per_second": 1}
    if channel is not None:
        link["channel"] = channel
    devices = [{"name": f"gpu:{d}", **gpu} for d in range(count)]
    return {"name": "gpus", "devices": devices, "default_link": link, "dispatch_seconds": dispatch}


def takes(
    seconds: float, group: int, reads: Sequence[int] = (), writes: Sequence[int] = (), **others: Any
) -> dict[str, Any]:
    """Returns a row of a graph file's ops, for an op that takes these seconds on every GPU."""
    return op(f"op{group}", group, reads, writes, seconds={"gpu": seconds}, **others)


def random_cluster(rng: np.random.Generator, num_devices: int, memory: int) -> dict[str, Any]:
    """Returns devices of two kinds; links may share channels, and may have no latency; launches may cost time.

    In half of the clusters all numbers are multiples of 1/4, so that many things happen at the same moment.
    """
    is_coarse = rng.random() < 0.5

    def number(low: float, high: float) -> float:
        return float(rng.integers(int(low * 4), int(high * 4) + 1) / 4 if is_coarse else rng.uniform(low, high))

    def link() -> dict[str, Any]:
        fields: dict[str, Any] = {"latency_seconds": number(0, 1) if rng.random() < 0.6 else 0}
        fields["bytes_per_second"] = float(rng.choice([1, 2, 8])) if is_coarse else number(1, 9)
        if rng.random() < 0.3:
            fields["channel"] = str(rng.choice(["bus", "nic"]))
        return fields

    devices = []
    for d in range(num_devices):
        device = {"name": f"d{d}", "kind": str(rng.choice(["gpu", "cpu"])), "memory": int(rng.integers(0, memory + 1))}
        speeds = {"flops": float(rng.choice([1, 2, 4])), "bytes_per_second": float(rng.choice([1, 2, 4]))}
        devices.append({**device, **speeds, "overhead_seconds": number(0, 1) if rng.random() < 0.5 else 0})
    links = []
    for _ in range(int(rng.integers(0, 4)) if num_devices > 1 else 0):
        a, b = rng.choice(num_devices, 2, replace=False)
        links.append({"from": f"d{a}", "to": f"d{b}", "both": bool(rng.random() < 0.5), **link()})
    dispatch = number(0, 0.5) if rng.random() < 0.4 else 0
    return {"name": "random", "devices": devices, "links": links, "default_link": link(), "dispatch_seconds": dispatch}


def random_graph(rng: np.random.Generator, num_ops: int, cluster: dict[str, Any]) -> dict[str, Any]:
    """Returns a graph that the cluster can run, as plain data.

    It has homes, groups without ops, views and in-place versions of what the step makes and of what is resident, resident
    tensors that share memory or that nobody reads, `after`, ops that read nothing, read a tensor twice, write nothing or
    do no work, ops that only some devices can run, and parts that are not connected.
    """
    num_groups = int(rng.integers(1, max(num_ops, 1) + 1, 2).max())
    recent = int(rng.choice([3, 10, 10**6]))  # how far back ops reach
    tensors: list[dict[str, Any]] = []
    owners: list[int] = []  # of each tensor: the group that may write its storage, -1: none may
    roots: list[int] = []
    readers: dict[int, set[int]] = {}  # of each storage

    def add(owner: int, alias_of: int = -1, **fields: Any) -> int:
        number = len(tensors)
        tensors.append(tensor(f"t{number}", int(rng.integers(0, 9)), **fields))
        if alias_of >= 0:
            tensors[-1]["alias_of"] = alias_of
        roots.append(number if alias_of < 0 else roots[alias_of])
        owners.append(owner)
        return number

    def owned(group: int) -> list[int]:
        return [t for t in range(max(0, len(tensors) - recent), len(tensors)) if owners[t] == group]

    for _ in range(int(rng.integers(0, 3 + num_ops // 3))):
        base = int(rng.integers(0, len(tensors))) if tensors and rng.random() < 0.2 else -1
        home = owners[base] if base >= 0 else int(rng.integers(-1, num_groups)) if num_ops else -1
        add(home, base, **({} if home < 0 else {"home": home}), kind="parameter")
    ops = []
    for n in range(num_ops):
        group = int(rng.integers(0, num_groups))
        first = max(0, len(tensors) - recent)
        reads = rng.integers(first, len(tensors), int(rng.integers(0, 4))).tolist() if tensors else []
        after = (
            set(rng.integers(max(0, n - recent), n, int(rng.integers(0, 3))).tolist()) if n and rng.random() < 0.3 else set()
        )
        for t in reads:
            readers.setdefault(roots[t], set()).add(n)
        writes = []
        for _ in range(int(rng.choice([0, 1, 1, 1, 2]))):
            mine = owned(group)
            base = int(rng.choice(mine)) if mine and rng.random() < 0.3 else -1
            writes.append(add(group, base))
            if base >= 0:
                after |= readers.get(roots[base], set()) - {n}
        row = op(f"m{group % 3}.op{n}", group, reads, writes, **_work(rng))
        if after:
            row["after"] = sorted(after)
        if rng.random() < 0.1:
            row["devices"] = [cluster["devices"][0]["kind"]]
        ops.append(row)
    outputs = sorted(set(rng.integers(0, len(tensors), int(rng.integers(0, 4))).tolist())) if tensors else []
    return graph_data(tensors, ops, outputs)


def _work(rng: np.random.Generator) -> dict[str, Any]:
    """Returns what an op costs: nothing, a roofline, or given times by kind or by name."""
    amount = float(rng.integers(0, 9) / 4 if rng.random() < 0.5 else rng.uniform(0, 3))
    costs: list[dict[str, Any]] = [
        {},
        {"flops": amount},
        {"nbytes_moved": amount, "flops": 1},
        {"flops": amount, "seconds": {"gpu": amount / 2, "d1": 1}},
        {"seconds": {"gpu": amount, "cpu": 2 * amount}},
    ]
    return costs[int(rng.integers(len(costs)))]


def give_types(rng: np.random.Generator, graph: dict[str, Any], cluster: dict[str, Any]) -> None:
    """Gives some ops a type that they compute in, and some devices a speed for some types."""
    for row in graph["ops"]:
        if rng.random() < 0.7:
            row["compute"] = str(rng.choice(COMPUTE_TYPES))
    for device in cluster["devices"]:
        if rng.random() < 0.7:
            others = {str(name): float(rng.choice([0.5, 3, 8])) for name in rng.choice(COMPUTE_TYPES[1:], 3, replace=False)}
            device["flops"] = others | {"float32": device["flops"]}


def give_options(rng: np.random.Generator, graph: dict[str, Any]) -> None:
    """Makes the ops of about half of the groups optional, where that is possible: what they write stands for something.

    Not possible are homes, and ops that come before all tensors.
    """
    ops, tensors = graph["ops"], graph["tensors"]
    producer = {t: n for n, row in enumerate(ops) for t in row["writes"]}
    homes = {entry["home"] for entry in tensors if "home" in entry}
    for group in sorted({row["group"] for row in ops} - homes):
        mine = [n for n, row in enumerate(ops) if row["group"] == group]
        if rng.random() < 0.5 or not any(producer.get(t, -1) < mine[0] for t in range(len(tensors))):
            continue
        for n in mine:
            ops[n]["optional"] = True
            earlier = [t for t in range(len(tensors)) if producer.get(t, -1) < n]
            for t in ops[n]["writes"]:
                tensors[t]["stands_for"] = int(rng.choice(earlier))


def give_hosts(rng: np.random.Generator, cluster: dict[str, Any]) -> None:
    """Gives the devices hosts, launches a cost, and links one or two channels: often network cards of the hosts."""
    for device in cluster["devices"]:
        if rng.random() < 0.8:
            device["host"] = str(rng.choice(["a", "b", "c"]))
    if rng.random() < 0.7:
        cluster["dispatch_seconds"] = float(rng.choice([0.25, 0.5, 0.1]))
    for link in [cluster["default_link"], *cluster["links"]]:
        if rng.random() < 0.7:
            names = rng.choice(["a card", "b card", "c card", "bus"], int(rng.choice([1, 2, 2])))
            link["channel"] = [str(name) for name in names]


def give_host_waits(rng: np.random.Generator, cluster: dict[str, Any]) -> None:
    """Lets the hosts wait for what is copied over some links, and makes launches cost time."""
    for link in [cluster["default_link"], *cluster["links"]]:
        link["host_waits"] = bool(rng.random() < 0.6)
    cluster["dispatch_seconds"] = float(rng.choice([0.0, 0.25, 0.5]))
    if rng.random() < 0.5:
        cluster["copy_dispatch_seconds"] = cluster["dispatch_seconds"] + float(rng.choice([0.0, 0.25, 1.0]))


def give_copy_work(rng: np.random.Generator, cluster: dict[str, Any]) -> None:
    """Lets copies over some links take time of the devices at their ends, and be on their way for a while."""
    for link in [cluster["default_link"], *cluster["links"]]:
        for name in ("source_work", "target_work"):
            if rng.random() < 0.6:
                link["delay_seconds"] = float(rng.choice([0.0, 0.5, 2.0]))
                link[name] = {"seconds": float(rng.choice([0.0, 0.25, 1.5])), "bytes_per_second": float(rng.uniform(1, 9))}


def random_step(
    seed: int,
    num_ops: int,
    num_devices: int,
    memory: int,
    grouping: str,
    typed: bool = False,
    options: bool = False,
    hosts: bool = False,
    waits: bool = False,
) -> tuple[Step, np.random.Generator]:
    """Returns a random step, in float32 or in several types, and the generator for what else a test draws."""
    rng = np.random.default_rng(seed)
    cluster = random_cluster(rng, num_devices, memory)
    graph = random_graph(rng, num_ops, cluster)
    if typed:
        give_types(rng, graph, cluster)
    if options:
        give_options(rng, graph)
    if hosts:
        give_hosts(rng, cluster)
    if waits:
        give_host_waits(rng, cluster)
        give_copy_work(rng, cluster)
    return Step.of(graph, cluster, grouping), rng


def steps(
    max_ops: int = 12, min_ops: int = 0, memory: int = 60, options: bool = False, waits: bool = False
) -> st.SearchStrategy[tuple[Step, np.random.Generator]]:
    """Draws a random step; each device has up to `memory` bytes, tensors have up to 8. It may have optional ops."""
    return st.builds(
        random_step,
        seed=st.integers(0, 2**32 - 1),
        num_ops=st.integers(min_ops, max_ops),
        num_devices=st.integers(1, 4),
        memory=st.just(memory),
        grouping=st.sampled_from(GROUPINGS),
        typed=st.booleans(),
        options=st.just(options),
        hosts=st.booleans(),
        waits=st.just(waits),
    )


def random_placements(problem: Problem, rng: np.random.Generator, count: int) -> Ints:
    """Returns placements on allowed devices: [count, groups]."""
    weights = np.where(problem.allowed, rng.random((count, problem.num_groups, problem.num_devices)), -1.0)
    placements: Ints = weights.argmax(axis=2)
    return placements


def leave_some_out(problem: Problem, placements: Ints, rng: np.random.Generator) -> Ints:
    """Returns the placements with some groups of optional ops nowhere: [count, groups]."""
    return np.where(problem.optional & (rng.random(placements.shape) < 0.5), NOWHERE, placements)


def random_order(problem: Problem, rng: np.random.Generator) -> Ints:
    """Returns an order that launches every op after those that it needs: [ops]."""
    writers, readers, _ = problem.graph.edges
    after = problem.graph.ops.after
    needs: list[set[int]] = [set() for _ in range(problem.num_ops)]
    pairs = [
        *zip(writers.tolist(), readers.tolist(), strict=True),
        *zip(after.values.tolist(), after.rows.tolist(), strict=True),
    ]
    for before, behind in pairs:
        needs[behind].add(before)
    order: list[int] = []
    waiting = list(range(problem.num_ops))
    launched: set[int] = set()
    while waiting:
        ready = [n for n in waiting if needs[n] <= launched]
        n = ready[int(rng.integers(len(ready)))]
        order.append(n)
        launched.add(n)
        waiting.remove(n)
    return np.array(order, np.int64)
