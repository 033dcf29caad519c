"""HEFT, CPoP and the critical path: the papers' and other examples by hand, and a slow HEFT to compare with."""

import json
from typing import Any

import numpy as np
import pytest
from builders import graph_of, graphs, mixed_cluster, op, tensor
from hypothesis import given
from hypothesis import strategies as st
from simulated import all_proposals, random_step
from small_problems import problem_or_reject

from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster
from placewise.core.contracts import Proposal
from placewise.core.problem import Problem
from placewise.formats.cluster_file import parse_cluster
from placewise.simulate.simulator import Simulator
from placewise.strategies import make
from placewise.strategies.list_scheduling.insertion import downward_ranks, upward_ranks
from placewise.strategies.list_scheduling.schedulers import critical_path
from placewise.strategies.list_scheduling.tasks import TOGETHER, build_tasks, mean_copy_seconds, mean_op_seconds, task_edges

NAMES = ("heft", "cpop", "critical-path")

TASK_SECONDS = (  # Topcuoglu et al. 2002, the example: the time of each task on each of three processors
    (14, 16, 9), (13, 19, 18), (11, 13, 19), (13, 8, 17), (12, 13, 10),
    (13, 16, 9), (7, 15, 11), (5, 11, 14), (18, 12, 20), (21, 7, 16),
)  # fmt: skip
TASK_EDGES = {  # and the time that the data of each edge takes between two processors
    (1, 2): 18, (1, 3): 12, (1, 4): 9, (1, 5): 11, (1, 6): 14, (2, 8): 19, (2, 9): 16, (3, 7): 23, (4, 8): 27, (4, 9): 23,
    (5, 9): 13, (6, 8): 15, (7, 10): 17, (8, 10): 11, (9, 10): 13,
}  # fmt: skip


def machine(*names: str, memory: int = 1000, kind: str = "gpu") -> Cluster:
    """Returns devices of these names; a copy takes 1 s for each byte."""
    fields = {"kind": kind, "memory": memory, "flops": 1, "bytes_per_second": 1}
    link = {"latency_seconds": 0, "bytes_per_second": 1}
    return parse_cluster({"name": "machine", "devices": [{"name": n, **fields} for n in names], "default_link": link})


def ten_tasks() -> Problem:
    """Returns the example of Topcuoglu et al. 2002."""
    edges = list(TASK_EDGES)
    rows = []
    for n, times in enumerate(TASK_SECONDS, start=1):
        reads, writes = ([i for i, edge in enumerate(edges) if edge[side] == n] for side in (1, 0))
        seconds = dict(zip(("p1", "p2", "p3"), times, strict=True))
        rows.append(op(f"task{n}", n - 1, reads, writes, seconds=seconds))
    tensors = [tensor(f"{a}->{b}", nbytes) for (a, b), nbytes in TASK_EDGES.items()]
    return Problem.of(graph_of(tensors, rows), machine("p1", "p2", "p3"))


def proposals(name: str, problem: Problem, **settings: str) -> list[Proposal]:
    """Returns all that a strategy proposes."""
    return all_proposals(make(name, settings).search(problem, np.random.default_rng(0)))


def test_the_ranks_of_the_papers_example() -> None:
    """As the paper lists them: rank_u of n1 is 108, n2 77, n3 80, n4 80, n5 69, n6 63.333, n7 42.667, n8 35.667, n9 44.333,
    n10 14.667; rank_d of n10 is 93.333."""
    problem = ten_tasks()
    tasks, everywhere = build_tasks(problem), np.ones(3, np.bool_)
    times = mean_op_seconds(problem, problem.allowed)
    upward = upward_ranks(tasks, times, mean_copy_seconds(problem, tasks.output_bytes, everywhere))
    downward = downward_ranks(tasks, times, mean_copy_seconds(problem, tasks.input_bytes, everywhere), False)
    expected = [108, 77, 80, 80, 69, 63 + 1 / 3, 42 + 2 / 3, 35 + 2 / 3, 44 + 1 / 3, 14 + 2 / 3]
    np.testing.assert_allclose(upward, expected)
    np.testing.assert_allclose(downward, [0, 31, 25, 22, 24, 27, 62 + 1 / 3, 66 + 2 / 3, 63 + 2 / 3, 93 + 1 / 3])
    assert (critical_path(tasks, upward + downward) + 1).tolist() == [1, 2, 9, 10]


def test_heft_on_the_papers_example() -> None:
    """The paper's makespan of 80. P1 has n2 (27-40), n8 (57-62); P2 n4 (18-26), n6 (26-42), n9 (56-68), n10 (73-80); P3
    n1 (0-9), n3 (9-28), n5 (28-38), n7 (38-49). n3 and n4 are equal in rank 80, and the lower one goes first."""
    first, second = proposals("heft", ten_tasks())
    assert first.notes["model_seconds"] == 80
    assert first.orders is None
    assert first.placements.tolist() == second.placements.tolist() == [[2, 0, 2, 1, 2, 1, 2, 0, 1, 1]]
    assert second.orders is not None
    assert (second.orders[0] + 1).tolist() == [1, 3, 4, 6, 2, 5, 7, 9, 8, 10]  # by start


def test_cpop_on_the_papers_example() -> None:
    """The paper's makespan of 86, with the path n1, n2, n9, n10 on P2, which takes 16 + 19 + 12 + 7 = 54 for it."""
    first, _ = proposals("cpop", ten_tasks())
    assert first.notes["model_seconds"] == 86
    assert [first.placements[0, n - 1] for n in (1, 2, 9, 10)] == [1, 1, 1, 1]


def test_sagas_path_is_the_entry_op_alone() -> None:
    """With its own time in place of that before it, the priority of n1 is 108 as before; n2's is 77 + 18 + 16.667, and no
    other is 108. So P2 is not forced on the path: n1 alone goes to the device that is fastest for it, P3 (9)."""
    first, _ = proposals("cpop", ten_tasks(), rank="saga")
    assert first.placements[0, 0] == 2
    assert first.notes["model_seconds"] < 86


def heft_slowly(problem: Problem) -> tuple[Ints, float]:
    """Returns HEFT's placement of the groups with ops (others: -1) and its makespan, from all intervals of all devices."""
    sources, targets, nbytes = task_edges(problem)
    inputs: list[list[tuple[int, float]]] = [[] for _ in range(problem.num_ops)]
    for a, b, size in zip(sources.tolist(), targets.tolist(), nbytes.tolist(), strict=True):
        inputs[b].append((a, size))
    tasks = build_tasks(problem)
    copies = mean_copy_seconds(problem, tasks.output_bytes, np.ones(problem.num_devices, np.bool_))
    ranks = upward_ranks(tasks, mean_op_seconds(problem, problem.allowed), copies).tolist()
    placement = np.full(problem.num_groups, -1)
    ends = [0.0] * problem.num_ops
    busy: list[list[tuple[float, float]]] = [[] for _ in range(problem.num_devices)]
    groups, latency, bandwidth = problem.op_groups, problem.cluster.latency_seconds, problem.cluster.bytes_per_second
    for n in sorted(range(problem.num_ops), key=lambda n: (-ranks[n], n)):
        best: tuple[float, int, float] = (np.inf, -1, 0.0)
        for d in range(problem.num_devices):
            if placement[groups[n]] == d or (placement[groups[n]] < 0 and problem.allowed[groups[n], d]):
                start, seconds = 0.0, float(problem.op_seconds[n, d])
                for m, size in inputs[n]:
                    there = placement[groups[m]]
                    moves = there != d and size != TOGETHER
                    start = max(start, ends[m] + (latency[there, d] + size / bandwidth[there, d] if moves else 0.0))
                for begin, end in sorted(busy[d]):
                    if seconds and end > start and begin - start < seconds:
                        start = end
                best = min(best, (start + seconds, d, start))
        ends[n], placement[groups[n]] = best[0], best[1]
        if best[0] > best[2]:
            busy[best[1]].append((best[2], best[0]))
    return placement, max(ends, default=0.0)


@given(st.integers(0, 10**6), st.integers(1, 25), st.integers(1, 4))
def test_heft_is_the_slow_one(seed: int, num_ops: int, num_devices: int) -> None:
    problem = random_step(seed, num_ops, num_devices, 60, "colocated")[0].problem
    placement, seconds = heft_slowly(problem)
    first = proposals("heft", problem)[0]
    has_ops = placement >= 0
    assert first.placements[0][has_ops].tolist() == placement[has_ops].tolist()
    assert first.notes["model_seconds"] == seconds


def test_critical_path_by_hand() -> None:
    """Six ops; gpu:1 takes twice as long as gpu:0. a -> b -> c of 4 s each is the longest path, and goes to gpu:0: 12 s.

    d and e, 3 s each: gpu:0 would have 12 + 3, gpu:1 has 6 and then 6 + 6: both to gpu:1. f, 1 s: gpu:0 would have
    12 + 1, gpu:1 12 + 2. Longest path first, the devices start a and d at 0 s, b at 4, e at 6, c at 8 and f at 12.
    """
    seconds = (4, 4, 4, 3, 3, 1)
    reads: dict[int, list[int]] = {1: [0], 2: [1]}
    rows = [
        op(f"op{n}", n, reads.get(n, []), [n], seconds={"gpu:0": time, "gpu:1": 2 * time}) for n, time in enumerate(seconds)
    ]
    problem = Problem.of(graph_of([tensor(f"t{n}", 1) for n in range(6)], rows), machine("gpu:0", "gpu:1"))
    first, second = proposals("critical-path", problem)
    assert first.placements.tolist() == [[0, 0, 0, 1, 1, 0]]
    assert second.orders is not None
    assert second.orders.tolist() == [[0, 3, 1, 4, 2, 5]]
    assert Simulator(problem)(first.placements).step_seconds[0] == 13


def test_critical_path_goes_on_where_there_is_room() -> None:
    """A chain of four ops that each make 4 bytes; gpu:0 has room for two, gpu:1 for one, and the last fits nowhere: it goes
    to the faster one."""
    rows = [op(f"op{n}", n, [n - 1] if n else [], [n], seconds={"gpu": 1}) for n in range(4)]
    fields = {"kind": "gpu", "flops": 1, "bytes_per_second": 1}
    devices = [{"name": "gpu:0", "memory": 9, **fields}, {"name": "gpu:1", "memory": 4, **fields}]
    link = {"latency_seconds": 0, "bytes_per_second": 1}
    cluster = parse_cluster({"name": "small", "devices": devices, "default_link": link})
    first, _ = proposals("critical-path", Problem.of(graph_of([tensor(f"t{n}", 4) for n in range(4)], rows), cluster))
    assert first.placements.tolist() == [[0, 0, 1, 0]]


def test_cpop_leaves_what_cannot_run_with_the_path() -> None:
    """a -> b -> c, a tenth of a second each on the GPU and b only on the CPU: the path's device is the GPU."""
    rows: list[dict[str, Any]] = [op(f"op{n}", n, [n - 1] if n else [], [n], flops=10) for n in range(3)]
    rows[1]["devices"] = ["cpu"]
    problem = Problem.of(graph_of([tensor(f"t{n}", 0) for n in range(3)], rows), mixed_cluster())
    assert proposals("cpop", problem)[0].placements.tolist() == [[0, 1, 0]]


def test_tensors_between_two_ops_are_one_edge() -> None:
    """a writes 3 and 4 bytes, b reads both and the first one twice; c of b's group reads b; d only comes after a."""
    rows = [
        op("a", 0, writes=[0, 1]), op("b", 1, [0, 1, 0], [2]), op("c", 1, [2]), op("d", 2, after=[0]),
    ]  # fmt: skip
    problem = Problem.of(graph_of([tensor("x", 3), tensor("y", 4), tensor("z", 5)], rows), machine("gpu:0"))
    sources, targets, nbytes = task_edges(problem)
    assert list(zip(sources.tolist(), targets.tolist(), nbytes.tolist(), strict=True)) == [
        (0, 1, 7.0), (1, 2, TOGETHER), (0, 3, TOGETHER),
    ]  # fmt: skip


def test_a_home_without_ops_is_with_its_first_reader() -> None:
    """The parameter's home is group 2, which has no op; op1 on gpu:1 is the first to read it."""
    rows = [
        op("op0", 0, [], [0], seconds={"gpu:0": 1, "gpu:1": 9}),
        op("op1", 1, [2], [1], seconds={"gpu:0": 9, "gpu:1": 1}),
        op("op3", 3, [2, 0], [], seconds={"gpu:0": 1, "gpu:1": 9}),
    ]
    tensors = [tensor("x"), tensor("y"), tensor("w", 1, "parameter", home=2)]
    problem = Problem.of(graph_of(tensors, rows), machine("gpu:0", "gpu:1"))
    assert proposals("heft", problem)[0].placements.tolist() == [[0, 1, 1, 0]]


@pytest.mark.parametrize("name", NAMES)
@given(graph=graphs())
def test_any_graph_is_placed(name: str, graph: Any) -> None:
    problem = problem_or_reject(graph, mixed_cluster())
    first, second = proposals(name, problem)
    again, _ = proposals(name, problem)
    problem.check_placements(first.placements)
    assert second.orders is not None
    problem.check_order(second.orders[0])
    assert first.placements.tolist() == second.placements.tolist() == again.placements.tolist()
    json.dumps(dict(first.notes), allow_nan=False)
