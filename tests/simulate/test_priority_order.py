"""The priority order is that of a list schedule, and it is used if it is better than the program order."""

import numpy as np
import pytest
from builders import graph_data, tensor
from hypothesis import given, settings
from list_schedule import ListSchedule
from simulated import Step, gpus, random_placements, random_step, steps, takes

from placewise.core.arrays import Ints
from placewise.core.problem import Problem
from placewise.simulate.dependencies import build_dependencies
from placewise.simulate.priority import new_priority_workspace, priority_order
from placewise.simulate.simulator import Simulator


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def kernel_order(problem: Problem, placement: Ints) -> list[int]:
    """The order that the kernel makes, whether or not it is better than the program order."""
    simulator = Simulator(problem, threads=1)
    work = simulator._workspace()
    waits = build_dependencies(problem)
    schedule = new_priority_workspace(simulator.flat, waits)
    work.times.devices[:] = placement
    for _ in range(2):  # a used workspace is as good as a new one
        schedule.order[:] = -1
        priority_order(simulator.flat, waits, work.times, schedule)
    order: list[int] = schedule.order.tolist()
    return order


def better_of(step: Step, placement: Ints, order: list[int]) -> Ints:
    """The program order, unless this one fits and the program order does not, or is faster and fits no worse."""
    by_program, by_order = step.reference(placement), step.reference(placement, ints(*order))
    if by_program["fits"] != by_order["fits"]:
        keeps_program = by_program["fits"]
    else:
        keeps_program = by_program["step_seconds"] <= by_order["step_seconds"]
    return np.arange(len(order)) if keeps_program else ints(*order)


# --- the order ---


@settings(max_examples=500)
@given(steps())
def test_the_order_is_the_list_schedules(drawn: tuple[Step, np.random.Generator]) -> None:
    step, rng = drawn
    placement = random_placements(step.problem, rng, 1)[0]
    order = kernel_order(step.problem, placement)
    assert order == ListSchedule(step.problem, placement).order()
    step.problem.check_order(ints(*order))


@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_larger_steps_is_the_list_schedules(seed: int) -> None:
    step, rng = random_step(seed, 120, 2 + seed % 3, 60, "colocated")
    placement = random_placements(step.problem, rng, 1)[0]
    order = kernel_order(step.problem, placement)
    assert order == ListSchedule(step.problem, placement).order()
    step.problem.check_order(ints(*order))


def test_an_order_by_hand() -> None:
    """Two GPUs, a copy of 1 byte takes 2 s. On gpu:0 a (1 s), b (3 s), d (2 s); c (4 s) on gpu:1 reads a's byte; e (1 s)
    on gpu:0 reads c's byte.

    Remaining paths: e 1; c 4 + 2 + 1 = 7; a 1 + 2 + 7 = 10; b 3; d 2. At 0 gpu:0 starts a; at 1 b, whose path is longer
    than d's; at 3 a's byte is on gpu:1: c; at 4 d; at 7 c ends, and its byte arrives at 9: e. So a, b, c, d, e.
    """
    rows = [takes(2, 0), takes(3, 0), takes(1, 0, [], [0]), takes(4, 1, [0], [1]), takes(1, 0, [1])]
    step = Step.of(graph_data([tensor("t", 1), tensor("u", 1)], rows), gpus(2))
    expected = [2, 1, 3, 0, 4]
    assert ListSchedule(step.problem, ints(0, 1)).path == [2, 3, 10, 7, 1]
    assert ListSchedule(step.problem, ints(0, 1)).order() == expected
    assert kernel_order(step.problem, ints(0, 1)) == expected
    assert Simulator(step.problem).order_of(ints(0, 1)).tolist() == expected


def test_ties_go_to_the_lowest_index_and_devices_start_in_their_order() -> None:
    """Four equal ops; the even ones on gpu:1, the odd ones on gpu:0: at 0 ops 1 and 0 start, at 1 ops 3 and 2."""
    step = Step.of(graph_data([], [takes(1, n % 2) for n in range(4)]), gpus(2))
    assert kernel_order(step.problem, ints(1, 0)) == [1, 0, 3, 2]


def test_tensors_made_at_one_moment_use_a_channel_by_device_then_by_number() -> None:
    """One bus. gpu:1 makes t0, gpu:0 makes t1 and t2, all at 1, of 1 byte, for gpu:2: t1 arrives at 3, t2 at 5, t0 at 7."""
    rows = [takes(1, 0, [], [0]), takes(1, 1, [], [1, 2]), takes(1, 2, [0]), takes(1, 2, [2]), takes(1, 2, [1])]
    step = Step.of(graph_data([tensor(f"t{t}", 1) for t in range(3)], rows), gpus(3, channel="bus"))
    expected = [1, 0, 4, 3, 2]
    assert kernel_order(step.problem, ints(1, 0, 2)) == ListSchedule(step.problem, ints(1, 0, 2)).order() == expected


def test_ops_that_take_no_time() -> None:
    """A chain of three that take no time on two devices without latency, and another op of 1 s: all start at 0."""
    rows = [takes(1, 0), takes(0, 0, [], [0]), takes(0, 1, [0], [1]), takes(0, 0, [1])]
    cluster = gpus(2)
    cluster["default_link"]["latency_seconds"] = 0
    step = Step.of(graph_data([tensor("t", 0), tensor("u", 0)], rows), cluster)
    assert kernel_order(step.problem, ints(0, 1)) == ListSchedule(step.problem, ints(0, 1)).order() == [0, 1, 2, 3]


# --- the order that counts ---


@settings(max_examples=300)
@given(steps(memory=25))
def test_the_better_of_both_orders_counts(drawn: tuple[Step, np.random.Generator]) -> None:
    step, rng = drawn
    placements = random_placements(step.problem, rng, 3)
    seconds, peaks, orders = Simulator(step.problem, threads=1).simulate(placements, keep_orders=True)
    assert orders is not None
    for row, placement in enumerate(placements):
        order = better_of(step, placement, ListSchedule(step.problem, placement).order())
        expected = step.reference(placement, order)
        assert orders[row].tolist() == order.tolist()
        assert seconds[row] == expected["step_seconds"]
        assert peaks[row].tolist() == list(expected["peak_bytes"].values())


def test_what_fits_goes_before_what_is_faster() -> None:
    """a and b make 4 bytes each on gpu:0; a's reader is there and takes 1 s, b's is on gpu:1 and takes 5 s.

    By program a, its reader and b follow one another, and gpu:0 never holds more than 4 + 0 bytes; the list schedule
    starts b first (its path is 1 + 5 + 5), then a while b's copy is launched with its reader: 8 bytes, but 11 s, not 13.
    """
    rows = [takes(1, 0, [], [0]), takes(1, 0, [0]), takes(1, 0, [], [1]), takes(5, 1, [1])]
    graph = graph_data([tensor("t", 4), tensor("u", 4)], rows)
    for memory, order, seconds, peak in ((8, [2, 0, 1, 3], 11, 8), (7, [0, 1, 2, 3], 13, 4), (3, [2, 0, 1, 3], 11, 8)):
        simulator = Simulator(Step.of(graph, gpus(2, memory=memory)).problem)
        measured = simulator.simulate(ints(0, 1)[None], keep_orders=True)
        assert measured.orders is not None
        assert measured.orders[0].tolist() == order
        assert measured.step_seconds.tolist() == [seconds]
        assert measured.peak_bytes[0, 0] == peak


def test_a_tie_goes_to_the_program_order() -> None:
    """On one device both orders take 3 s; the list schedule would start the longer op first."""
    step = Step.of(graph_data([], [takes(1, 0), takes(2, 1)]), gpus(1))
    assert kernel_order(step.problem, ints(0, 0)) == [1, 0]
    assert Simulator(step.problem).order_of(ints(0, 0)).tolist() == [0, 1]
