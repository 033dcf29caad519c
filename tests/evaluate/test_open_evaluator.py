"""`open_evaluator` gives the evaluator that is asked for; tests/evaluate/test_ray.py has those on Ray."""

import pytest
from builders import tiny_cluster, tiny_graph
from evaluators import assert_same, ints

from placewise.core.errors import InputError, ProblemError
from placewise.core.problem import Problem
from placewise.evaluate import open_evaluator
from placewise.evaluate.cached import Cached
from placewise.evaluate.measured import Measure, Measurer
from placewise.evaluate.pool import ProcessPool
from placewise.simulate.simulator import Simulator


@pytest.fixture
def problem() -> Problem:
    return Problem.of(tiny_graph(), tiny_cluster())


def test_simulated_here_and_on_processes(problem: Problem) -> None:
    placements = ints(0, 0, 0, 1, 1, 0, 0, 1, 1).reshape(3, 3)
    expected = Simulator(problem, "program")(placements)
    with open_evaluator(problem, "program") as evaluator:
        assert isinstance(evaluator, Simulator)
        assert_same(evaluator(placements), expected)
    with open_evaluator(problem, "program", workers=1) as evaluator:
        assert isinstance(evaluator, ProcessPool)
        assert_same(evaluator(placements), expected)


def test_measured_and_remembered(problem: Problem) -> None:
    with open_evaluator(problem, measure=Measure(), step="no-such-model") as evaluator:  # loaded by the first measurement
        assert isinstance(evaluator, Cached)
        assert isinstance(evaluator.evaluator, Measurer)


def test_what_does_not_go_together_is_refused(problem: Problem) -> None:
    with pytest.raises(ProblemError, match="order must be one of"), open_evaluator(problem, "none", workers=1):
        pass
    with (
        pytest.raises(InputError, match="several workers can measure only on a Ray cluster"),
        open_evaluator(problem, measure=Measure(), step="cifar-cnn", workers=2),
    ):
        pass
