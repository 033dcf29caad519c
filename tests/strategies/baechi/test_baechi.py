"""m-TOPO, m-ETF and m-SCT: examples by hand, memory, and the model compared with the simulator."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from builders import graph_data, graph_of, graphs, mixed_cluster, tensor
from hypothesis import given
from hypothesis import strategies as st
from simulated import Step, all_proposals, gpus, random_step, takes
from small_problems import problem_or_reject

from placewise.core.arrays import Ints
from placewise.core.contracts import Proposal
from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.simulate.simulator import Simulator
from placewise.strategies import make
from placewise.strategies.baechi.baechi import breadth_first, longest_path_first
from placewise.strategies.baechi.favourite_children import favourite_children

NAMES = ("m-topo", "m-etf", "m-sct")


def proposals(name: str, problem: Problem, **settings: str) -> list[Proposal]:
    """Returns all that a strategy proposes."""
    return all_proposals(make(name, settings).search(problem, np.random.default_rng(0)))


def placed(name: str, problem: Problem, **settings: str) -> list[int]:
    """Returns the first placement that a strategy proposes."""
    placement: list[int] = proposals(name, problem, **settings)[0].placements[0].tolist()
    return placement


def problem_of(
    sizes: list[int], ops: list[dict[str, Any]], num_gpus: int = 2, memory: int = 1000, outputs: Any = ()
) -> Problem:
    """Returns ops on GPUs between which a copy takes 1 s and 1 s more for each byte."""
    tensors = [tensor(f"t{n}", nbytes) for n, nbytes in enumerate(sizes)]
    return Step.of(graph_data(tensors, ops, outputs), gpus(num_gpus, memory)).problem


def test_m_topo_by_hand() -> None:
    """Ops make 3, 2, 2, 3 and 2 bytes: 12 in all, 6 for each of two devices, and with the largest 9. The first three are 7
    bytes, a fourth would be 10."""
    ops = [takes(1, n, [n - 1] if n else [], [n]) for n in range(5)]
    assert placed("m-topo", problem_of([3, 2, 2, 3, 2], ops)) == [0, 0, 0, 1, 1]


def test_m_topo_keeps_to_the_memory() -> None:
    """3 and 2 bytes fill gpu:0, which has 5; the ops of 4 bytes leave 1 on the others. The last, of 2 bytes, fits nowhere,
    and goes to the first of those with most room."""
    ops = [takes(1, n, [n - 1] if n else [], [n]) for n in range(5)]
    assert placed("m-topo", problem_of([3, 2, 4, 4, 2], ops, num_gpus=3, memory=5)) == [0, 0, 1, 2, 1]


def test_m_topo_places_a_step_whose_bytes_no_share_can_count() -> None:
    """One tensor of 2**62 bytes: all of them and the largest group are together more than 2**63."""
    ops = [takes(1, n, [n - 1] if n else [], [n]) for n in range(2)]
    assert len(placed("m-topo", problem_of([2**62, 2], ops, num_gpus=1))) == 2


def fork() -> Problem:
    """Returns a (2 s) -> b, c (2 s each) -> e (1 s), and d (3 s) alone; a copy takes 1 s."""
    ops = [takes(2, 0, [], [0]), takes(2, 1, [0], [1]), takes(2, 2, [0], [2]), takes(3, 3), takes(1, 4, [1, 2])]
    return problem_of([0, 0, 0], ops)


def test_m_etf_by_hand() -> None:
    """a starts at 0 s on gpu:0, d at 0 on gpu:1, b at 2 on gpu:0 (gpu:1: 3), c at 3 on gpu:1 (gpu:0: 4). e could start on
    gpu:0 at 6, when c (5 s) has been copied, and on gpu:1 at 5, as b (4 s) has been. The end is at 6 s."""
    first, second = proposals("m-etf", fork())
    assert first.placements.tolist() == second.placements.tolist() == [[0, 0, 1, 1, 1]]
    assert second.orders is not None
    assert second.orders.tolist() == [[0, 3, 1, 2, 4]]
    assert first.notes["model_seconds"] == 6


def favourite() -> Problem:
    """Returns a (1 s) -> b, c (3 s each): b's input takes 1 s to copy, c's 19 s."""
    return problem_of([0, 18], [takes(1, 0, [], [0, 1]), takes(3, 1, [0]), takes(3, 2, [1])])


def test_m_sct_by_hand() -> None:
    """m-ETF starts b at 1 s on gpu:0, and c has to wait for it until 4: 7 s. One of x_ab + x_ac >= 1 must be a copy, and
    4 + x_ab = 4 + 19 x_ac is least with x_ac = 1/20: c is the favourite child. It starts at 1 s on gpu:0, b at 2 on
    gpu:1: 5 s."""
    assert placed("m-etf", favourite()) == [0, 0, 0]
    first, second = proposals("m-sct", favourite())
    assert first.placements.tolist() == [[0, 1, 0]]
    assert second.orders is not None
    assert second.orders.tolist() == [[0, 2, 1]]
    assert first.notes == {"model_seconds": 5.0, "num_favourites": 1}
    assert proposals("m-etf", favourite())[0].notes["model_seconds"] == 7


def test_m_sct_without_favourites_is_m_etf() -> None:
    """1/20 is not below 0.04; and a program that may not take a single iteration has no answer."""
    assert placed("m-sct", favourite(), threshold="0.04") == [0, 0, 0]
    problem = random_step(3, 60, 3, 10**6, "colocated")[0].problem
    full, plain = proposals("m-sct", problem)[0], proposals("m-etf", problem)[0]
    assert full.notes["num_favourites"] > 0
    assert proposals("m-sct", problem, lp_iterations="0")[0].placements.tolist() == plain.placements.tolist()


def test_a_device_waits_for_a_favourite_unless_another_op_is_urgent() -> None:
    """a (1 s, gpu:0) and b (4 s, gpu:1) -> c (1 s), whose input from a is large: c is a's favourite, and can start on gpu:0
    at 5 s, when b's output has come. d (1 s) has the lowest claim, but could start on gpu:0 at 1 s, and on gpu:1 not
    before 4 s: it is urgent at 4 s, and takes gpu:0 from then, before c. Program order: a, b, c, d."""
    ops = [takes(1, 0, [], [0]), takes(4, 1, [], [1]), takes(1, 2, [0, 1]), takes(1, 3)]
    problem = problem_of([90, 0], ops)
    first, second = proposals("m-sct", problem)
    assert first.placements.tolist() == [[0, 1, 0, 0]]
    assert second.orders is not None
    assert second.orders.tolist() == [[0, 1, 3, 2]]
    assert first.notes["model_seconds"] == 6


def baechis_own(problem: Problem, readers: list[list[int]], ranks: list[int]) -> tuple[list[int], float]:
    """Returns the devices and the end of Baechi's m-ETF where memory is plentiful, from all pairs of an op and a device.

    A device has one queue for what it sends and receives. A copy takes 1 s and 1 s for each byte; op n reads the tensors
    of the ops `readers[n]`.
    """
    devices, ends = [-1] * problem.num_ops, [0.0] * problem.num_ops
    free, queue = [0.0] * problem.num_devices, [0.0] * problem.num_devices
    arrived: dict[tuple[int, int], float] = {}

    def arrival(m: int, d: int) -> tuple[float, float, float]:
        """Returns when op m's tensor is on device d, when its sender is free again, and its receiver."""
        if devices[m] == d or (m, d) in arrived:
            return arrived.get((m, d), ends[m]), queue[devices[m]], queue[d]
        seconds = 1.0 + problem.graph.tensors.nbytes[m]
        sent = max(ends[m], queue[devices[m]])
        received = max(sent, queue[d]) + seconds
        return received, sent + seconds, received

    left = set(range(problem.num_ops))
    while left:
        ready = [n for n in sorted(left, key=ranks.__getitem__) if not left & set(readers[n])]
        pairs = [
            (max([free[d], *(arrival(m, d)[0] for m in readers[n])]), ranks[n], d, n)
            for n in ready
            for d in range(problem.num_devices)
        ]
        _, _, d, n = min(pairs)
        start = free[d]
        for m in readers[n]:
            here, queue[devices[m]], queue[d] = arrival(m, d)
            if devices[m] != d:
                arrived[m, d] = here
            start = max(start, here)
        devices[n], ends[n] = d, start + float(problem.op_seconds[n, d])
        free[d] = ends[n]
        left.remove(n)
    return devices, max(ends, default=0.0)


RANKS: dict[str, Callable[[Problem], Ints]] = {
    "program": lambda problem: np.arange(14),
    "breadth": breadth_first,
    "path": longest_path_first,
}


@pytest.mark.parametrize("ties", RANKS)
@given(seed=st.integers(0, 10**6))
def test_one_queue_for_a_device_is_baechis_own_rule(ties: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    readers = [sorted({int(rng.integers(n)) for _ in range(rng.integers(3))}) if n else [] for n in range(14)]
    ops = [takes(int(rng.integers(1, 6)), n, readers[n], [n]) for n in range(14)]
    problem = problem_of(rng.integers(0, 5, 14).tolist(), ops, num_gpus=3, memory=10**6)
    ranks = RANKS[ties](problem).tolist()
    first, _ = proposals("m-etf", problem, queue="device", ties=ties)
    devices, end = baechis_own(problem, readers, ranks)
    assert first.placements[0].tolist() == devices
    assert first.notes["model_seconds"] == end


def test_ties_breadth_first_by_hand() -> None:
    """a -> b -> c and d -> e: a and d have their inputs first, then what they let run, b and e, and then c."""
    ops = [takes(1, n, reads, [n]) for n, reads in enumerate(([], [0], [1], [], [3]))]
    assert breadth_first(problem_of([1] * 5, ops)).tolist() == [0, 2, 4, 1, 3]


def test_ties_longest_path_first_by_hand() -> None:
    """a (1 s), b (2 s), and c (1 s) -> d (3 s) with a copy of 1 + 1 s: the paths behind them take 1, 2, 6 and 3 s."""
    ops = [takes(1, 0, [], [0]), takes(2, 1, [], [1]), takes(1, 2, [], [2]), takes(3, 3, [2], [3])]
    assert longest_path_first(problem_of([1] * 4, ops)).tolist() == [3, 2, 0, 1]


def test_settings_are_checked() -> None:
    with pytest.raises(StrategyError, match=r"threshold must be from 0 to 0\.5, it is 0\.6"):
        make("m-sct", {"threshold": "0.6"})
    with pytest.raises(StrategyError, match="lp_iterations must be at least 0, it is -1"):
        make("m-sct", {"lp_iterations": "-1"})


def tight() -> Problem:
    """Returns a, which makes 5 bytes to keep and 1 for b, which makes 5 to keep; devices have 10 bytes."""
    return problem_of([5, 1, 5], [takes(1, 0, [], [0, 1]), takes(1, 1, [1], [2])], memory=10, outputs=[0, 2])


@pytest.mark.parametrize("name", ["m-etf", "m-sct"])
def test_memory_is_respected(name: str) -> None:
    """b would start earlier on a's device, but 6 + 5 bytes are more than 10. With 11 bytes it does."""
    assert placed(name, tight()) == [0, 1]
    assert Simulator(tight())(np.array([[0, 0], [0, 1]])).overflow_bytes.tolist() == [1, 0]
    ops = [takes(1, 0, [], [0, 1]), takes(1, 1, [1], [2])]
    assert placed(name, problem_of([5, 1, 5], ops, memory=11, outputs=[0, 2])) == [0, 0]


@pytest.mark.parametrize("name", ["m-etf", "m-sct"])
def test_memory_that_is_given_back_can_be_used(name: str) -> None:
    """Each op of a chain makes 5 of 10 bytes, and is the last to read what the one before it made."""
    ops = [takes(1, n, [n - 1] if n else [], [n]) for n in range(4)]
    assert placed(name, problem_of([5] * 4, ops, memory=10)) == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["m-etf", "m-sct"])
def test_what_fits_nowhere_goes_where_most_is_left(name: str) -> None:
    """c makes 20 bytes. Of 11 bytes, a leaves 5 on gpu:0 when b has read its other tensor, and b 6 on gpu:1."""
    ops = [takes(1, 0, [], [0, 1]), takes(1, 1, [1], [2]), takes(1, 2, [2], [3])]
    assert placed(name, problem_of([6, 1, 5, 20], ops, memory=11, outputs=[0, 2])) == [0, 1, 1]


@pytest.mark.parametrize("name", ["m-etf", "m-sct"])
def test_a_parameter_is_where_it_is_read_first(name: str) -> None:
    """a and b (9 s each) start at once; the update of b's parameter can only follow it on gpu:1, though gpu:0 is free from
    a's end on as well and is the lower one."""
    ops = [takes(9, 0), takes(9, 1, [0], [1]), takes(1, 2, [0, 1], [2])]
    tensors = [tensor("w", 1, "parameter", home=2), tensor("g", 0), tensor("w'", 1, "parameter", alias_of=0)]
    ops[2]["after"] = [1]
    assert placed(name, Step.of(graph_data(tensors, ops), gpus(2)).problem) == [0, 1, 1]


@pytest.mark.parametrize("name", NAMES)
def test_the_cpu_is_for_what_only_it_can_run(name: str) -> None:
    """Of two ops that start at once one would go to the CPU; `devices=all` lets it."""
    ops = [{**takes(1, n), "seconds": {"gpu": 1, "cpu": 1}} for n in range(3)]
    ops[2]["devices"] = ["cpu"]
    problem = Problem.of(graph_of([], ops), mixed_cluster())
    assert placed(name, problem) == [0, 0, 1]
    if name != "m-topo":  # which has nothing to balance
        assert placed(name, problem, devices="all") == [0, 1, 1]


def test_favourites_are_at_most_one_child_and_one_parent() -> None:
    """A chain has all its edges; of a complete bipartite graph with equal costs no edge can be near 0 but a matching."""
    times, copies = np.ones(4), np.ones(4)
    chain = favourite_children(np.ones(3), np.array([0, 1]), np.array([1, 2]), np.ones(2), 0.1, 100)
    assert chain is not None
    assert chain.tolist() == [1, 2, -1]
    pairs = favourite_children(times, np.array([0, 0, 1, 1]), np.array([2, 3, 2, 3]), copies, 0.1, 100)
    assert pairs is not None
    named = pairs[pairs >= 0].tolist()
    assert len(named) == len(set(named))
    assert favourite_children(np.ones(1), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), 0.1, 0) is not None


@given(st.integers(0, 10**6), st.integers(0, 30), st.integers(1, 4))
def test_the_model_of_m_etf_is_the_simulator(seed: int, num_ops: int, num_devices: int) -> None:
    """Where launches take no time and every group can go everywhere, the schedule is what its order makes."""
    problem = random_step(seed, num_ops, num_devices, 60, "colocated")[0].problem
    if problem.cluster.dispatch_seconds or not problem.allowed.all():
        return
    first, second = proposals("m-etf", problem, devices="all")
    seconds = Simulator(problem)(second.placements, second.orders).step_seconds[0]
    assert first.notes["model_seconds"] == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
@given(graph=graphs())
def test_any_graph_is_placed(name: str, graph: Any) -> None:
    problem = problem_or_reject(graph, mixed_cluster())
    found, again = proposals(name, problem), proposals(name, problem)
    for proposal, other in zip(found, again, strict=True):
        problem.check_placements(proposal.placements)
        assert proposal.placements.tolist() == other.placements.tolist()
        if proposal.orders is not None:
            problem.check_order(proposal.orders[0])
