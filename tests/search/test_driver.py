"""The driver: budgets, the best that fits, replay, and Ctrl-C."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from builders import wired

from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster, Device, Link
from placewise.core.contracts import Evaluation, Proposal, Search
from placewise.core.errors import StoreError, StrategyError
from placewise.core.problem import Problem
from placewise.search.budget import Budget
from placewise.search.driver import JudgedBatch, Progress, search
from placewise.simulate.simulator import Simulator


def chain(memory_bytes: int = 100) -> Problem:
    """Three ops of 1 s in a chain, their tensors of 1, 2 and 3 bytes, on two equal devices with slow links."""
    devices = tuple(Device(f"gpu:{i}", "gpu", memory_bytes, 1.0, 1.0) for i in range(2))
    links = (Link("gpu:0", "gpu:1", 1.0, 0.0), Link("gpu:1", "gpu:0", 1.0, 0.0))
    graph = wired([(0, 1), (1, 2)], 3, seconds=[{"gpu": 1.0}] * 3)
    return Problem.of(graph, Cluster("two", devices, links))


@dataclass(frozen=True)
class Listed:
    """Proposes given batches, and keeps their evaluations."""

    batches: tuple[Any, ...]
    told: list[Evaluation]

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        for number, batch in enumerate(self.batches):
            self.told.append((yield Proposal(np.array(batch), notes={"number": number})))


@dataclass(frozen=True)
class Endless:
    """Draws for ever, one placement at a time."""

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        while True:
            yield Proposal(rng.integers(problem.num_devices, size=(1, problem.num_groups)))


ALL_HERE, SPLIT, ALTERNATE = [0, 0, 0], [0, 0, 1], [0, 1, 0]  # 3 s; 3 + 2 s; 3 + 1 + 2 s


def test_the_best_is_kept_and_ties_go_to_the_earlier_one() -> None:
    """The chain takes 3 s on one device, 5 s with the last op elsewhere (2 bytes at 1 B/s), 6 s there and back."""
    strategy = Listed(([ALTERNATE, SPLIT], [ALL_HERE], [[1, 1, 1]]), [])
    outcome = search(chain(), strategy, Simulator(chain(), "program", 1), budget=Budget(), seed=0)
    assert outcome.status == "finished"
    assert outcome.history == ((2, 5.0), (3, 3.0), (4, 3.0))
    assert outcome.placement is not None
    assert outcome.placement.tolist() == ALL_HERE
    assert [evaluation.step_seconds.tolist() for evaluation in strategy.told] == [[6.0, 5.0], [3.0], [3.0]]


@pytest.mark.parametrize("fitting", [0, 1, 2])
def test_what_does_not_fit_is_never_the_answer(fitting: int) -> None:
    """Even if an evaluator gives it the least cost, in the batch of one that fits and in one of its own."""

    def judge(placements: Ints, orders: Ints | None = None) -> Evaluation:
        fits = np.arange(len(placements)) == fitting
        return Evaluation(np.where(fits, 9.0, 1.0), np.where(fits, 9.0, 1.0), np.where(fits, 0, 5))

    batch = [ALL_HERE, SPLIT, ALTERNATE]
    outcome = search(chain(), Listed((batch[: fitting + 1], batch, batch[:0]), []), judge, budget=Budget(), seed=0)
    assert outcome.placement is not None
    assert outcome.placement.tolist() == batch[fitting]
    assert outcome.step_seconds == 9.0
    assert {best for _, best in outcome.history} == {9.0}


def test_a_batch_is_cut_at_the_budget() -> None:
    strategy = Listed(([ALTERNATE], [SPLIT, ALL_HERE, ALL_HERE]), [])
    outcome = search(chain(), strategy, Simulator(chain(), "program", 1), budget=Budget(evaluations=2), seed=0)
    assert (outcome.status, outcome.evaluations, outcome.step_seconds) == ("evaluations", 2, 5.0)
    assert len(strategy.told) == 1  # what was cut is not told


@pytest.mark.parametrize(
    ("budget", "status"),
    [
        (Budget(evaluations=7), "evaluations"),
        (Budget(seconds=0.05), "seconds"),
        (Budget(patience=50), "patience"),
        (Budget(target_gap=0.0), "gap"),
    ],
)
def test_every_limit_ends_the_search(budget: Budget, status: str) -> None:
    problem = chain()
    outcome = search(problem, Endless(), Simulator(problem, "program", 1), budget=budget, seed=0, bound_seconds=3.0)
    assert outcome.status == status


def test_patience_counts_from_the_best_so_far() -> None:
    """The third is the best of all, so the search waits for two more than that."""
    problem = chain()
    strategy = Listed(([ALTERNATE], [SPLIT], [ALL_HERE], [SPLIT], [SPLIT], [SPLIT]), [])
    outcome = search(problem, strategy, Simulator(problem, "program", 1), budget=Budget(patience=2), seed=0)
    assert (outcome.status, outcome.evaluations) == ("patience", 5)


@pytest.mark.parametrize("wrong", [{"evaluations": 0}, {"seconds": -1.0}, {"patience": 0}, {"target_gap": float("nan")}])
def test_a_wrong_budget_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(StrategyError, match=f"budget: {next(iter(wrong))} must be at least"):
        Budget(**wrong)


def test_a_placement_that_does_not_fit_is_never_the_answer() -> None:
    """One device has to hold t0 and t1 (3 bytes) or t1 and t2 (5 bytes) at once: with 4 bytes each, only a split could."""
    problem = chain(4)
    outcome = search(problem, Listed(([ALL_HERE],), []), Simulator(problem, "program", 1), budget=Budget(), seed=0)
    assert outcome.placement is None
    assert outcome.step_seconds == np.inf
    assert outcome.closest is not None
    assert (outcome.closest.tolist(), outcome.overflow_bytes) == (ALL_HERE, 1)


class Kept:
    """A record in a list."""

    def __init__(self, kept: list[JudgedBatch]) -> None:
        self.kept = kept

    def batches(self) -> Iterator[JudgedBatch]:
        return iter(list(self.kept))

    def add(self, batch: JudgedBatch) -> None:
        self.kept.append(batch)


class Fails:
    """An evaluator that must not be asked."""

    def __call__(self, placements: Ints, orders: Ints | None = None) -> Evaluation:
        raise AssertionError


def test_a_record_is_replayed_as_if_the_search_had_never_stopped() -> None:
    problem = chain()
    simulator = Simulator(problem, "program", 1)
    whole = Kept([])
    once = search(problem, Endless(), simulator, budget=Budget(evaluations=40), seed=3, record=whole)
    half = Kept(whole.kept[:17])
    again = search(problem, Endless(), simulator, budget=Budget(evaluations=40), seed=3, record=half)
    assert again.history == once.history
    assert [batch.digest for batch in half.kept] == [batch.digest for batch in whole.kept]
    finished = search(problem, Endless(), Fails(), budget=Budget(evaluations=40), seed=3, record=Kept(whole.kept))
    assert finished.history == once.history


def test_a_record_made_in_parts_goes_on_in_others() -> None:
    """Batches of 7 are recorded two at a time, then three, then whole, as on 2 machines, on 3, and in a simulator."""

    class Batches(Endless):
        def search(self, problem: Problem, rng: np.random.Generator) -> Search:
            while True:
                yield Proposal(rng.integers(0, 2, (7, problem.num_groups)))

    problem = chain()
    simulator = Simulator(problem, "program", 1)
    expected = search(problem, Batches(), simulator, budget=Budget(evaluations=30), seed=3)
    record = Kept([])
    for evaluations, at_once in ((9, 2), (20, 3), (30, None)):
        budget = Budget(evaluations=evaluations)
        found = search(problem, Batches(), simulator, budget=budget, seed=3, record=record, at_once=at_once)
    assert [len(batch.evaluation.cost) for batch in record.kept] == [2, 2, 2, 1, 2, 3, 2, 3, 3, 1, 7, 2]
    assert (found.step_seconds, found.evaluations) == (expected.step_seconds, 30)


def test_replaying_does_not_count_against_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draw takes 1 s, so 10 s are 10 draws: also when 5 of them are drawn again to replay them."""
    clock = [0.0]
    monkeypatch.setattr("placewise.search.driver.time.monotonic", lambda: clock[0])

    class Slow(Endless):
        def search(self, problem: Problem, rng: np.random.Generator) -> Search:
            for proposal in super().search(problem, rng):
                clock[0] += 1.0
                yield proposal

    problem = chain()
    simulator = Simulator(problem, "program", 1)
    whole = Kept([])
    once = search(problem, Slow(), simulator, budget=Budget(seconds=10.0), seed=3, record=whole)
    assert (once.status, once.evaluations) == ("seconds", 10)
    clock[0] = 1000.0
    again = search(problem, Slow(), simulator, budget=Budget(seconds=10.0), seed=3, record=Kept(whole.kept[:5]))
    assert (again.status, again.history, again.seconds) == ("seconds", once.history, once.seconds)


def test_a_record_of_another_search_is_refused() -> None:
    problem = chain()
    record = Kept([])
    search(problem, Endless(), Simulator(problem, "program", 1), budget=Budget(evaluations=9), seed=3, record=record)
    with pytest.raises(StoreError, match="can't be resumed: its batch 0"):
        search(problem, Endless(), Fails(), budget=Budget(evaluations=9), seed=5, record=record)


def test_ctrl_c_keeps_what_was_found() -> None:
    problem = chain()
    seen: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == 5:
            raise KeyboardInterrupt

    outcome = search(problem, Endless(), Simulator(problem, "program", 1), budget=Budget(), seed=0, on_batch=interrupt)
    assert (outcome.status, outcome.evaluations) == ("stopped", 5)
    assert outcome.placement is not None
    assert [progress.evaluations for progress in seen] == [1, 2, 3, 4, 5]
