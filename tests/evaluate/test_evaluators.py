"""Evaluators around an evaluator change no result: whatever the cache, the number of workers and who dies."""

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from builders import heed_ctrl_c
from evaluators import Dying, Failing, Leaving, Sums, kill, killer
from hypothesis import given
from hypothesis import strategies as st
from simulated import Step, random_order, random_placements, random_step, steps

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation
from placewise.core.errors import InputError, PlacewiseError, ProblemError
from placewise.core.problem import Problem
from placewise.evaluate.cached import Cached
from placewise.evaluate.processes import Pooled
from placewise.evaluate.simulated import SimulatorFactory, open_evaluator
from placewise.evaluate.worker_pool import PARTS_PER_WORKER
from placewise.evaluate.worker_process import Column
from placewise.simulate.simulator import Simulator

ROWS = 13


def assert_same(found: Evaluation, expected: Evaluation) -> None:
    for column, wanted in zip(found, expected, strict=True):
        assert column.dtype == wanted.dtype
        assert column.tobytes() == wanted.tobytes()


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


@dataclass(frozen=True, eq=False)
class Batch:
    """A problem, a batch for it, and a launch order for each row."""

    problem: Problem
    placements: Ints  # [ROWS, groups]
    orders: Ints  # [ROWS, ops]


@pytest.fixture(scope="module")
def batch() -> Batch:
    step, rng = random_step(seed=5, num_ops=40, num_devices=3, memory=120, grouping="colocated")
    placements = random_placements(step.problem, rng, ROWS)
    orders = np.array([random_order(step.problem, rng) for _ in range(ROWS)])
    assert len(set(Simulator(step.problem)(placements).cost.tolist())) > ROWS // 2  # rows that change places would show
    return Batch(step.problem, placements, orders)


@pytest.fixture(scope="module", params=[1, 2, 4])
def pooled(request: pytest.FixtureRequest, batch: Batch) -> Iterator[Pooled]:
    with Pooled(SimulatorFactory(batch.problem), request.param) as evaluator:
        yield evaluator


# Cached


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


# Pooled


@pytest.mark.parametrize("rows", [ROWS, 3, 1, 0])
def test_the_number_of_workers_changes_nothing(pooled: Pooled, batch: Batch, rows: int) -> None:
    simulator = Simulator(batch.problem)
    placements, orders = batch.placements[:rows], batch.orders[:rows]
    assert_same(pooled(placements), simulator(placements))
    assert_same(pooled(placements, batch.orders[:1]), simulator(placements, batch.orders[:1]))
    if rows:
        assert_same(pooled(placements, orders), simulator(placements, orders))


def test_errors_are_those_of_one_evaluator(pooled: Pooled, batch: Batch) -> None:
    simulator = Simulator(batch.problem)
    far, wrong = batch.placements.copy(), batch.orders.copy()
    far[ROWS - 2, 1], wrong[ROWS - 1] = 300, 0
    cases: list[tuple[Ints, Ints | None]] = [
        (far, None),
        (-far, None),
        (batch.placements[0], None),
        (np.array(3), None),
        (batch.placements * 1.0, None),  # type: ignore[list-item]
        (batch.placements, batch.orders[:2]),
        (batch.placements, wrong),
    ]
    for placements, orders in cases:
        with pytest.raises(ProblemError) as expected:
            simulator(placements, orders)
        with pytest.raises(ProblemError) as found:
            pooled(placements, orders)
        assert str(found.value) == str(expected.value)
    assert_same(pooled(batch.placements), simulator(batch.placements))


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300)), st.sampled_from([np.int64, np.int32, np.uint8]))
def test_packed_numbers_come_back_as_they_were(numbers: list[int], dtype: type[np.int64]) -> None:
    values = np.array(numbers, np.int64).astype(dtype)
    back = Column.of(values).unpack()
    assert back.dtype == values.dtype
    assert back.tolist() == values.tolist()


def test_few_bytes_are_sent() -> None:
    assert Column.of(ints(0, 3, 255)).values.dtype == np.uint8
    assert Column.of(ints(0, 40_000)).values.dtype == np.uint16


def test_a_problem_travels_exactly(batch: Batch) -> None:
    problem = pickle.loads(pickle.dumps(SimulatorFactory(batch.problem), protocol=5)).problem
    fresh = dataclasses.replace(problem, graph=dataclasses.replace(problem.graph))  # so that nothing cached came along
    assert fresh.digest == batch.problem.digest
    columns = [
        problem.merged,
        problem.op_seconds,
        problem.allowed,
        problem.graph.ops.reads.values,
        problem.graph.tensors.nbytes,
    ]
    assert not any(column.flags.writeable for column in columns)


def test_a_killed_worker_is_replaced_and_its_part_evaluated_again(tmp_path: Path) -> None:
    thread = killer(tmp_path)
    placements = np.arange(12).reshape(12, 1)
    with Pooled(Dying(tmp_path, times=2), 2) as pooled:
        pooled(placements[:4])
        before = pooled.process_ids
        assert_same(pooled(placements), Sums()(placements))
        assert pooled.process_ids != before
        assert len(pooled.process_ids) == 2
    assert len(list(tmp_path.glob("death-*"))) == 2
    (tmp_path / "pipe").write_text("stop")
    thread.join()


def test_workers_killed_between_batches_are_replaced() -> None:
    with Pooled(Sums, 3, attempts=1) as pooled:
        placements = np.arange(12).reshape(12, 1)
        pooled(placements)
        for pid in pooled.process_ids:
            kill(pid)
        for pid in pooled.process_ids:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        pooled.attempts = 2  # that a worker is gone may be heard only when it has a part
        assert_same(pooled(placements), Sums()(placements))


def test_a_part_that_kills_every_worker_is_given_up(tmp_path: Path) -> None:
    thread = killer(tmp_path)
    placements = np.arange(12).reshape(12, 1)
    with Pooled(Dying(tmp_path, times=99), 2, attempts=3) as pooled:
        first = 12 // (2 * PARTS_PER_WORKER) * 3
        message = rf"3 workers died evaluating placements {first} to 11 of a batch, .* process \d+ was killed by signal 9"
        with pytest.raises(PlacewiseError, match=message):
            pooled(placements)
        assert_same(pooled(placements[:9]), Sums()(placements[:9]))  # and goes on with the next batch
    (tmp_path / "pipe").write_text("stop")
    thread.join()


def test_an_evaluator_that_can_not_be_made() -> None:
    with Pooled(Failing(ProblemError("no such thing")), 1) as pooled:
        for _ in range(2):
            with pytest.raises(ProblemError, match="no such thing") as caught:
                pooled(np.zeros((4, 1), np.int64))
            assert "In a worker:" in caught.value.__notes__[0]
    with Pooled(Leaving(), 1, attempts=2) as pooled, pytest.raises(PlacewiseError, match=r"workers died .*: exit code 7"):
        pooled(np.zeros((4, 1), np.int64))


def test_numbers_of_workers_and_attempts_are_checked(batch: Batch) -> None:
    with pytest.raises(InputError, match="workers must be at least 1, there are 0"):
        Pooled(Sums, 0)
    with pytest.raises(InputError, match="attempts must be at least 1, it is 0"):
        Pooled(Sums, 1, attempts=0)
    with pytest.raises(ProblemError, match="order must be one of"), open_evaluator(batch.problem, "none", workers=1):
        pass


def test_a_closed_pool_has_no_processes_and_says_so() -> None:
    pooled = Pooled(Sums, 2)
    pids = pooled.process_ids
    pooled.close()
    pooled.close()
    assert pooled.process_ids == ()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(PlacewiseError, match="closed"):
        pooled(np.zeros((1, 1), np.int64))


SCRIPT = """
import sys
import numpy as np
sys.path.insert(0, {tests!r})
from pathlib import Path
from evaluators import Dying
from placewise.evaluate.processes import Pooled
with Pooled(Dying(Path({folder!r}), times=2), 2) as pooled:
    try:
        pooled(np.full((4, 1), 9))
    except KeyboardInterrupt:
        print(pooled(np.zeros((2, 1), int)).cost.tolist(), flush=True)
        raise
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind(tmp_path: Path, ending: signal.Signals) -> None:
    """A script without `if __name__ == "__main__"` waits for busy workers; Ctrl-C, or a kill, ends it and all of them."""
    os.mkfifo(tmp_path / "pipe")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path)))
    with subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    ) as process:
        pipe = os.open(tmp_path / "pipe", os.O_RDWR)  # open all the time: a reader that comes and goes misses some
        said = b""
        while said.count(b"\n") < 2:
            said += os.read(pipe, 100)
        os.close(pipe)
        os.killpg(process.pid, ending)  # as a terminal does: to all processes of its group
        out, err = process.communicate(timeout=60)
    if ending == signal.SIGINT:
        assert process.returncode == -signal.SIGINT
        assert out == "[0.0, 0.0]\n"
        assert err.count("Traceback") == 1
        assert err.rstrip().endswith("KeyboardInterrupt")
    # that communicate() has returned says that the workers are gone: they hold the script's standard error too


def test_open_evaluator_wires(batch: Batch) -> None:
    expected = Simulator(batch.problem, "program")(batch.placements)
    with open_evaluator(batch.problem, "program") as evaluator:
        assert isinstance(evaluator, Simulator)
        assert_same(evaluator(batch.placements), expected)
    with open_evaluator(batch.problem, "program", workers=1) as evaluator:
        assert isinstance(evaluator, Pooled)
        assert_same(evaluator(batch.placements), expected)
