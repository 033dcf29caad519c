"""Steps under drawn disturbances, against the plain simulator."""

import numpy as np
import pytest
from builders import graph_data, tensor
from hypothesis import given
from simulated import Step, gpus, random_order, random_placements, steps, takes

from placewise.core.errors import InputError
from placewise.simulate.disturbances import BUSY_SLOWDOWN, Disturbances, interval_of
from placewise.simulate.simulator import Simulator


@given(steps(min_ops=1))
def test_without_disturbances_it_is_the_simulator(drawn: tuple[Step, np.random.Generator]) -> None:
    step, rng = drawn
    simulator = Simulator(step.problem, threads=1)
    placements = random_placements(step.problem, rng, 3)
    orders = np.stack([random_order(step.problem, rng) for _ in placements])
    seconds = Disturbances(0.0, draws=2).step_seconds(simulator, placements, orders, rng)
    assert (seconds == simulator(placements, orders).step_seconds[:, None]).all()


@given(steps(min_ops=1))
def test_no_step_is_off_by_more_than_its_parts(drawn: tuple[Step, np.random.Generator]) -> None:
    """Every op, copy and launch takes from 1 - 20% to 1.5 x (1 + 20%) of its time, so the whole step does."""
    step, rng = drawn
    simulator = Simulator(step.problem, threads=1)
    placements, order = random_placements(step.problem, rng, 1), random_order(step.problem, rng)[None]
    exact = simulator(placements, order).step_seconds[0]
    seconds = Disturbances(0.1).step_seconds(simulator, placements, order, rng)
    assert (seconds >= exact * 0.8 - 1e-9).all()
    assert (seconds <= exact * 1.2 * BUSY_SLOWDOWN + 1e-9).all()


def test_all_placements_meet_the_same_draws() -> None:
    """Two ops of one kind on one of two equal GPUs: a draw makes both placements longer by the factors of their own GPU."""
    step = Step.of(graph_data([tensor()], [takes(4, 0, (), (0,)), takes(6, 0, (0,))]), gpus(2))
    simulator, order = Simulator(step.problem), np.array([[0, 1]])
    both = Disturbances().step_seconds(simulator, np.array([[0], [1]]), order, np.random.default_rng(0))
    alone = Disturbances().step_seconds(simulator, np.array([[1]]), order, np.random.default_rng(0))
    assert (both[1] == alone[0]).all()
    assert both.shape == (2, 32)
    assert (both[0] != both[1]).all()
    assert 9 <= both.min() < 9.8
    assert 10.2 < both.max() <= 11


def test_a_slower_link_moves_fewer_bytes_a_second() -> None:
    """Ops without work, and a copy of 10 bytes at 1 B/s with a latency of 0: 10 s, off by up to 20%, twice as far as ops."""
    cluster = gpus(2)
    cluster["default_link"] = {"latency_seconds": 0, "bytes_per_second": 1}
    step = Step.of(graph_data([tensor("t", 10)], [takes(0, 0, (), (0,)), takes(0, 1, (0,))]), cluster)
    draw = Disturbances(0.1).step_seconds(
        Simulator(step.problem), np.array([[0, 1]]), np.array([[0, 1]]), np.random.default_rng(0)
    )
    assert 8 <= draw.min() < 9
    assert 11 < draw.max() <= 12


def test_a_busy_cpu_takes_longer() -> None:
    """An op of 10 s: on a GPU it takes at most 11 s, on a CPU that is busy in some of the draws up to 16.5 s."""
    cluster = gpus(1)
    cluster["devices"].append({"name": "cpu:0", "kind": "cpu", "memory": 100, "flops": 1, "bytes_per_second": 1})
    step = Step.of(graph_data([], [takes(10, 0) | {"seconds": {"gpu": 10, "cpu": 10}}]), cluster)
    gpu, cpu = Disturbances(0.1).step_seconds(
        Simulator(step.problem), np.array([[0], [1]]), np.array([[0], [0]]), np.random.default_rng(0)
    )
    assert gpu.max() <= 11
    assert cpu.min() < 11
    assert 13.5 <= cpu.max() <= 16.5


def test_the_interval_has_eight_of_ten_draws() -> None:
    assert interval_of(np.arange(11.0)) == (1.0, 9.0)


@pytest.mark.parametrize(("ops", "draws"), [(0.5, 32), (-0.1, 32), (float("nan"), 32), (0.1, 0)])
def test_wrong_disturbances_are_refused(ops: float, draws: int) -> None:
    with pytest.raises(InputError, match="must be at least"):
        Disturbances(ops, draws)
