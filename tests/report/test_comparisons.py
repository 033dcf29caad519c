"""What plans are compared with."""

from builders import graph_data, op, tensor
from chain_schedules import chain, two
from simulated import Step, gpus

from placewise.core.problem import Problem
from placewise.report.comparisons import Comparisons, other_plans, simulate_comparisons
from placewise.search.advice import fastest_alone


def test_plans_are_compared_with_one_device_and_the_expert() -> None:
    """Both ops on one device take 8 s; the expert has a module on each: 10 s. A byte of memory is too little for either."""
    assert simulate_comparisons(two().problem) == Comparisons(("gpu:0", 8.0), 10.0)
    assert simulate_comparisons(chain(["a.mm", "b.mm"], [3.0, 5.0], [0, 1], memory=1).problem) == Comparisons(None, None)


def test_everything_may_fit_on_no_device() -> None:
    def problem(memory: int) -> Problem:
        rows = [op("a", 0, [], [0], seconds={"gpu": 1.0}), op("b", 1, [0], [1], seconds={"gpu": 1.0})]
        return Step.of(graph_data([tensor(nbytes=2), tensor(nbytes=3)], rows), gpus(2, memory)).problem

    assert fastest_alone(problem(5)) == ("gpu:0", 2.0)
    assert fastest_alone(problem(4)) is None


def test_a_page_has_other_plans_of_the_step() -> None:
    schedule = two()
    others = other_plans(schedule.problem, (schedule.placement, schedule.order))
    assert [(name, one.step_seconds) for name, one in others] == [("gpu:0", 8.0), ("expert", 10.0), ("fastest", 10.0)]
