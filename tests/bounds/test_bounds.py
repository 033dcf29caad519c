"""Bounds never exceed the best step, and their certificates hold; falsified ones do not."""

import copy
import json
from typing import Any

import numpy as np
import pytest
from builders import graph_data, graph_of, tensor, tiny_cluster
from captured import captured_problem
from exhaustive import best_step
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from simulated import GROUPINGS, Step, gpus, leave_some_out, random_placements, random_step, takes

from placewise.bounds.best_bound import Bound, bound
from placewise.bounds.certain_part import certain_part
from placewise.bounds.check.certificates import check
from placewise.bounds.limits import LIMITS
from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.simulate.simulator import Simulator

THOROUGH = 12.0  # seconds of effort: all bounds, with branching


def part(problem: Problem, name: str, seconds: float | None = None) -> Bound:
    """Returns one of the bounds."""
    return next(one for one in bound(problem, seconds=seconds).parts if one.name == name)


def chain_and_branch(copied_bytes: int, branch: float) -> Problem:
    """Returns a fork and a join: op 0 (1 s), then op 1 (3 s) next to op 2, then op 3 (1 s), on two GPUs.

    A copy takes 1 s, and 1 s for each byte.
    """
    tensors = [tensor(f"t{n}", copied_bytes) for n in range(3)]
    ops = [takes(1, 0, [], [0]), takes(3, 1, [0], [1]), takes(branch, 2, [0], [2]), takes(1, 3, [1, 2])]
    return Step.of(graph_data(tensors, ops), gpus(2)).problem


def test_a_path_pays_for_the_copies_that_cannot_be_avoided() -> None:
    """Op 0 runs on the CPU alone, op 1 on the GPU alone; a copy of 2 bytes at 1 B/s takes 1 + 2 s: 1 + 3 + 2 = 6 s."""
    cluster = gpus(1)
    cluster["devices"].append({"name": "cpu:0", "kind": "cpu", "memory": 100, "flops": 1, "bytes_per_second": 1})
    ops = [takes(0, 0, [], [0], devices=["cpu"]), takes(2, 1, [0], devices=["gpu"])]
    ops[0]["seconds"] = {"cpu": 1}
    problem = Step.of(graph_data([tensor("t", 2)], ops), cluster).problem
    assert part(problem, "path").seconds == pytest.approx(6.0)
    assert best_step(problem) == pytest.approx(6.0)


def test_work_is_shared() -> None:
    """Four ops of 1 s, 2 s, 3 s and 4 s that have nothing to do with each other need 5 s on two GPUs."""
    problem = Step.of(graph_data([], [takes(n + 1, n) for n in range(4)]), gpus(2)).problem
    assert part(problem, "work").seconds == pytest.approx(5.0)
    assert best_step(problem) == pytest.approx(5.0)


def test_work_is_not_shared_with_devices_that_cannot_do_it() -> None:
    """Two ops of 1 s that only the CPU can run need 2 s, however fast a GPU would be."""
    cluster = gpus(1)
    cluster["devices"].append({"name": "cpu:0", "kind": "cpu", "memory": 100, "flops": 1, "bytes_per_second": 1})
    ops = [takes(0, n, devices=["cpu"]) | {"seconds": {"cpu": 1, "gpu": 0}} for n in range(2)]
    problem = Step.of(graph_data([], ops), cluster).problem
    assert part(problem, "work").seconds == pytest.approx(2.0)
    assert best_step(problem) == pytest.approx(2.0)


def test_times_that_are_far_apart_have_a_bound() -> None:
    """1e290 s, then forty independent ops of 1e-30 s that come after it: their start is 1e320 times their work."""
    ops = [takes(1e290, 0, [], [0]), *(takes(1e-30, n, [0]) for n in range(1, 41))]
    problem = Step.of(graph_data([tensor("t", 0)], ops), gpus(2)).problem
    assert part(problem, "window").seconds == pytest.approx(1e290)
    assert bound(problem).seconds == pytest.approx(1e290)


def test_a_step_of_10_to_the_290_seconds_has_its_proof() -> None:
    problem = Step.of(graph_data([], [takes(1e290, n) for n in range(4)]), gpus(2)).problem
    one = part(problem, "work")
    assert one.seconds == pytest.approx(2e290)
    check(problem, one.name, one.seconds, one.certificate)


def test_memory_keeps_work_from_the_faster_device() -> None:
    """Three ops with 10 bytes each; gpu:0 takes 1 s for each but holds two of them, gpu:1 takes 2 s: 2 s at least.

    Without memory the time is 3 / (1 + 1/2) = 2 s too, so gpu:1 takes 8 s here: two thirds of 1 s and a third of 8 s
    would be 24 / 9 s, but one whole op has to be on gpu:1: 8 s.
    """
    cluster = gpus(2, memory=20)
    parameters = [tensor(f"w{n}", 10, "parameter", home=n) for n in range(3)]
    ops = [takes(0, n, [n]) | {"seconds": {"gpu:0": 1, "gpu:1": 8}} for n in range(3)]
    problem = Step.of(graph_data(parameters, ops), cluster).problem
    assert part(problem, "work").seconds == pytest.approx(8.0)
    assert best_step(problem) == pytest.approx(8.0)
    roomy = Step.of(graph_data(parameters, ops), gpus(2)).problem
    assert part(roomy, "work").seconds == pytest.approx(24 / 9)


def test_a_window_adds_what_comes_before_and_after() -> None:
    """1 s, then four ops of 1 s, then 1 s, on two GPUs, copies free: 1 + 4 / 2 + 1 = 4 s; path 3 s, work 3 s."""
    ops = [takes(1, 0, [], [0]), *(takes(1, n, [0], [n]) for n in range(1, 5)), takes(1, 5, [1, 2, 3, 4])]
    cluster = gpus(2)
    cluster["default_link"] = {"latency_seconds": 0, "bytes_per_second": 1}
    problem = Step.of(graph_data([tensor(f"t{n}", 0) for n in range(5)], ops), cluster).problem
    found = {one.name: one.seconds for one in bound(problem).parts}
    assert found["path"] == pytest.approx(3.0)
    assert found["work"] == pytest.approx(3.0)
    assert found["window"] == pytest.approx(4.0)
    assert best_step(problem) == pytest.approx(4.0)


def test_a_fork_is_on_one_device_or_pays_for_copies() -> None:
    """A branch of 2 s next to one of 3 s. Copies of 1 byte take 2 s: elsewhere the branch takes 2 + 2 + 2 s, here 3 + 2 s.

    So the step takes 1 + 5 + 1 = 7 s, while the longest path is 5 s and the work 7 / 2 s.
    """
    problem = chain_and_branch(1, 2.0)
    found = bound(problem, seconds=THOROUGH)
    assert found.name == "segments"
    assert found.seconds == pytest.approx(7.0, rel=1e-5)
    assert best_step(problem) == pytest.approx(7.0)


def test_the_host_launches_every_op() -> None:
    """Three ops of 1 s on three GPUs, a launch takes 2 s: the last one starts after 6 s."""
    problem = Step.of(graph_data([], [takes(1, n) for n in range(3)]), gpus(3, dispatch=2)).problem
    found = bound(problem)
    assert found.seconds == pytest.approx(7.0)
    assert best_step(problem) == pytest.approx(7.0)


@given(
    st.integers(0, 2**32 - 1), st.integers(0, 5), st.integers(1, 3), st.sampled_from([20, 60]), st.sampled_from(GROUPINGS)
)
@settings(max_examples=60)
def test_no_bound_exceeds_the_best_step(seed: int, num_ops: int, num_devices: int, memory: int, grouping: str) -> None:
    problem = random_step(seed, num_ops, num_devices, memory, grouping)[0].problem
    best = best_step(problem)
    found = bound(problem, seconds=THOROUGH)
    for one in found.parts:
        check(problem, one.name, one.seconds, json.loads(json.dumps(one.certificate)))
    assume(np.isfinite(best))
    assert found.seconds <= best
    assert found.seconds == max(one.seconds for one in found.parts)


@given(st.integers(0, 2**32 - 1), st.integers(4, 16), st.integers(1, 4))
@settings(max_examples=60)
def test_no_bound_exceeds_a_step_with_optional_ops(seed: int, num_ops: int, num_devices: int) -> None:
    step, rng = random_step(seed, num_ops, num_devices, 10**6, "colocated", options=True)
    problem = step.problem
    placements = leave_some_out(problem, random_placements(problem, rng, 200), rng)
    found = bound(problem, seconds=THOROUGH)
    assert found.seconds <= Simulator(problem, threads=1)(placements).step_seconds.min()
    for one in found.parts:
        check(certain_part(problem), one.name, one.seconds, one.certificate)


@given(st.integers(0, 2**32 - 1), st.integers(6, 20), st.integers(1, 4))
@settings(max_examples=40)
def test_no_bound_exceeds_a_step_that_is_found(seed: int, num_ops: int, num_devices: int) -> None:
    step, rng = random_step(seed, num_ops, num_devices, 10**6, "colocated")
    problem = step.problem
    choices = [np.flatnonzero(row) for row in problem.allowed]
    placements = np.array([[rng.choice(row) for row in choices] for _ in range(200)])
    found = bound(problem, seconds=THOROUGH)
    assert found.seconds <= Simulator(problem, threads=1)(placements).step_seconds.min()
    for one in found.parts:
        check(problem, one.name, one.seconds, one.certificate)


def test_the_same_arguments_give_the_same_bound() -> None:
    problem = captured_problem()
    assert bound(problem, seconds=THOROUGH) == bound(problem, seconds=THOROUGH)
    assert bound(problem).seconds <= bound(problem, seconds=THOROUGH).seconds


def test_a_captured_step_is_bounded_and_checked() -> None:
    problem = captured_problem()
    found = bound(problem, seconds=THOROUGH)
    single = Simulator(problem)(np.zeros((1, problem.num_groups), np.int64)).step_seconds[0]
    assert 0.2 * single < found.seconds <= single
    for one in found.parts:
        check(problem, one.name, one.seconds, json.loads(json.dumps(one.certificate)))


def test_every_bound_has_words() -> None:
    assert [one.name for one in bound(chain_and_branch(1, 2.0), seconds=THOROUGH).parts] == list(LIMITS)


def test_an_empty_step_has_a_bound_of_nothing() -> None:
    problem = Problem.of(graph_of([], []), tiny_cluster())
    found = bound(problem, seconds=THOROUGH)
    assert found.seconds == 0.0
    for one in found.parts:
        check(problem, one.name, one.seconds, one.certificate)


def test_claims_beyond_a_certificate_are_refused() -> None:
    problem = Problem.of(captured_problem().graph, Cluster.load("4xV100-nvlink"))  # where launches cost time
    for one in bound(problem, seconds=THOROUGH).parts:
        assert one.seconds > 0.0
        with pytest.raises(ValueError, match="proves"):
            check(problem, one.name, one.seconds * 1.001, one.certificate)


FALSE: list[tuple[str, dict[str, Any]]] = [
    ("path", {"ops": [0]}),
    ("path", {"group": 2}),
    ("path", {"ops": []}),
    ("work", {"prices": [2.0, -1.0]}),
    ("work", {"prices": [0.0, 0.0]}),
    ("work", {"prices": [1.0, 0.0]}),
    ("work", {"memory_prices": [1.0, 1.0]}),
    ("window", {"head": 100.0}),
    ("window", {"prices": [1.0, 0.0]}),
    ("segments", {"proofs": [{}] * 9}),
    ("segments", {"proofs": [{"ops": [0], "devices": [0]}] * 9}),
    ("segments", {"proofs": [{"ops": [0, 1, 2], "devices": [1]}] * 9}),
    ("segments", {"proofs": [{"op": 0, "on": [[0, {}]]}] * 9}),
    ("segments", {"segments": [[]]}),
    ("segments", {"cuts": [1, 2]}),
    ("segments", {"cuts": []}),
]


@pytest.mark.parametrize(("name", "change"), FALSE)
def test_falsified_certificates_are_refused(name: str, change: dict[str, Any]) -> None:
    problem = chain_and_branch(1, 2.0)
    one = part(problem, name, THOROUGH)
    check(problem, name, one.seconds, one.certificate)
    with pytest.raises(ValueError, match=r"proves|refuted|overload|price|depend|device|left out|cuts"):
        check(problem, name, one.seconds, {**one.certificate, **change})


def test_devices_that_differ_are_not_taken_for_alike() -> None:
    cluster = gpus(2)
    cluster["links"] = [{"from": "gpu:0", "to": "gpu:1", "latency_seconds": 5, "bytes_per_second": 1}]
    tensors = [tensor(f"t{n}", 1) for n in range(3)]
    ops = [takes(1, 0, [], [0]), takes(3, 1, [0], [1]), takes(2, 2, [0], [2]), takes(1, 3, [1, 2])]
    problem = Step.of(graph_data(tensors, ops), cluster).problem
    one = part(problem, "segments", THOROUGH)
    falsified = copy.deepcopy(dict(one.certificate)) | {"classes": [0, 0]}
    with pytest.raises(ValueError, match="are not alike"):
        check(problem, "segments", one.seconds, falsified)
