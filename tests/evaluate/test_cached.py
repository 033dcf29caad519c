"""The cache changes no result, and evaluates each distinct row once."""

import numpy as np
import pytest
from evaluators import Sums, assert_same, ints
from hypothesis import given
from hypothesis import strategies as st
from simulated import Step, random_order, random_placements, steps

from placewise.core.errors import InputError, ProblemError
from placewise.evaluate.cached import Cached
from placewise.simulate.simulator import Simulator


def test_each_distinct_row_is_evaluated_once() -> None:
    """Rows a b a, then b c c: a, b and c are evaluated, and three rows are hits."""
    sums = Sums()
    cached = Cached(sums)
    a, b, c = [0, 1], [1, 2], [2, 2]
    assert cached(ints(*a, *b, *a).reshape(3, 2)).cost.tolist() == [1, 3, 1]
    assert cached(ints(*b, *c, *c).reshape(3, 2)).cost.tolist() == [3, 4, 4]
    assert sums.batches == [[a, b], [c]]
    assert (cached.hits, cached.misses) == (3, 3)


def test_orders_are_part_of_what_is_remembered() -> None:
    sums = Sums()
    cached = Cached(sums)
    placements = ints(0, 1, 0, 1).reshape(2, 2)
    assert cached(placements).cost.tolist() == [1, 1]
    assert cached(placements, ints(0, 1, 1, 0).reshape(2, 2)).cost.tolist() == [1, 101]
    assert cached(placements, ints(1, 0).reshape(1, 2)).cost.tolist() == [101, 101]
    assert (cached.hits, cached.misses) == (3, 3)


@pytest.mark.parametrize("known", [[0], [1], [2], [0, 1], [1, 2], [0, 2]])
def test_rows_that_are_known_take_their_orders_along(known: list[int]) -> None:
    """Each row has an order of its own, and only those of the rows that are evaluated go to the evaluator."""
    cached, placements = Cached(Sums()), ints(3, 4, 5, 3, 4, 5, 3, 4, 5).reshape(3, 3)
    orders = ints(0, 1, 2, 1, 0, 2, 2, 0, 1).reshape(3, 3)
    cached(placements[known], orders[known])
    assert cached(placements, orders).cost.tolist() == [12, 112, 212]


def test_the_least_recently_used_row_is_forgotten_first() -> None:
    """Room for two rows: 0 and 1 come, 0 is used again, so 2 drives 1 out, and 0 is still known."""
    cached = Cached(Sums(), max_rows=2)
    for row in (0, 1, 0, 2, 0):
        cached(ints(row).reshape(1, 1))
    assert (cached.hits, cached.misses) == (2, 3)
    cached(ints(1).reshape(1, 1))
    assert cached.misses == 4
    assert cached(ints(5, 6, 7, 8, 5).reshape(5, 1)).cost.tolist() == [5, 6, 7, 8, 5]  # more than there is room for
    with pytest.raises(InputError, match="max_rows must be at least 1, it is 0"):
        Cached(Sums(), max_rows=0)


def test_a_refused_batch_names_its_own_row_and_is_not_remembered() -> None:
    cached = Cached(Sums())
    cached(ints(1).reshape(1, 1))
    with pytest.raises(ProblemError, match="placement 2 is negative"):
        cached(ints(1, 5, -1).reshape(3, 1))
    assert (cached.hits, cached.misses) == (0, 1)


@given(steps(), st.integers(0, 9), st.booleans())
def test_a_cache_changes_nothing(case: tuple[Step, np.random.Generator], rows: int, with_orders: bool) -> None:
    step, rng = case
    problem = step.problem
    simulator = Simulator(problem, threads=1)
    cached = Cached(simulator, max_rows=3)
    few = random_placements(problem, rng, 3)
    for _ in range(3):
        placements = few[rng.integers(3, size=rows)]
        orders = np.array([random_order(problem, rng) for _ in range(rows)]) if with_orders and rows else None
        assert_same(cached(placements, orders), simulator(placements, orders))
