"""A pool changes no result, whatever the number of workers and whichever of them die."""

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from command_line import heed_ctrl_c
from evaluators import Dying, Failing, Leaving, Sums, assert_same, ints, kill, killer, simulators
from hypothesis import given
from hypothesis import strategies as st
from simulated import random_order, random_placements, random_step

from placewise.core.arrays import Ints
from placewise.core.errors import InputError, PlacewiseError, ProblemError
from placewise.core.problem import Problem
from placewise.evaluate.pool import PARTS_PER_WORKER, Answer, Death, PackedInts, Part, Pool, ProcessPool
from placewise.simulate.simulator import Simulator

ROWS = 13


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
def pool(request: pytest.FixtureRequest, batch: Batch) -> Iterator[ProcessPool]:
    with ProcessPool(simulators(batch.problem), request.param) as evaluator:
        yield evaluator


@pytest.mark.parametrize("rows", [ROWS, 3, 1, 0])
def test_the_number_of_workers_changes_nothing(pool: ProcessPool, batch: Batch, rows: int) -> None:
    simulator = Simulator(batch.problem)
    placements, orders = batch.placements[:rows], batch.orders[:rows]
    assert_same(pool(placements), simulator(placements))
    assert_same(pool(placements, batch.orders[:1]), simulator(placements, batch.orders[:1]))
    if rows:
        assert_same(pool(placements, orders), simulator(placements, orders))


def test_errors_are_those_of_one_evaluator(pool: ProcessPool, batch: Batch) -> None:
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
            pool(placements, orders)
        assert str(found.value) == str(expected.value)
    assert_same(pool(batch.placements), simulator(batch.placements))


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300)), st.sampled_from([np.int64, np.int32, np.uint8]))
def test_packed_numbers_come_back_as_they_were(numbers: list[int], dtype: type[np.int64]) -> None:
    values = np.array(numbers, np.int64).astype(dtype)
    back = PackedInts.of(values).unpack()
    assert back.dtype == values.dtype
    assert back.tolist() == values.tolist()


def test_few_bytes_are_sent() -> None:
    assert PackedInts.of(ints(0, 3, 255)).values.dtype == np.uint8
    assert PackedInts.of(ints(0, 40_000)).values.dtype == np.uint16


def test_a_problem_travels_exactly(batch: Batch) -> None:
    problem = pickle.loads(pickle.dumps(simulators(batch.problem), protocol=5)).args[0]
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
    with ProcessPool(Dying(tmp_path, times=2), 2) as pool:
        pool(placements[:4])
        before = pool.process_ids
        assert_same(pool(placements), Sums()(placements))
        assert pool.process_ids != before
        assert len(pool.process_ids) == 2
    assert len(list(tmp_path.glob("death-*"))) == 2
    (tmp_path / "pipe").write_text("stop")
    thread.join()


def test_workers_killed_between_batches_are_replaced() -> None:
    """A part has one attempt, so none is sent to a dead worker."""
    with ProcessPool(Sums, 3, attempts=1) as pool:
        placements = np.arange(12).reshape(12, 1)
        pool(placements)
        for pid in pool.process_ids:
            kill(pid)
        for pid in pool.process_ids:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert_same(pool(placements), Sums()(placements))


def test_a_stopped_worker_is_replaced(tmp_path: Path) -> None:
    """It is alive, but would never answer. The others give signs of life, however long they work."""
    thread = killer(tmp_path, end=lambda pid: os.kill(pid, signal.SIGSTOP))
    placements = np.arange(12).reshape(12, 1)
    with ProcessPool(Dying(tmp_path, times=1), 2, attempts=99, silent_seconds=1.0) as pool:
        before = pool.process_ids
        assert_same(pool(placements), Sums()(placements))
        assert len(set(before) - set(pool.process_ids)) >= 1
        idle = pool.process_ids[0]
        os.kill(idle, signal.SIGSTOP)
        assert_same(pool(placements), Sums()(placements))
        assert idle not in pool.process_ids
    (tmp_path / "pipe").write_text("stop")
    thread.join()


class InMemory(Pool[int]):
    """A pool of workers that are numbers; those in `dying` die as soon as they have said that they have started."""

    def __init__(self, workers: int, dying: set[int]) -> None:
        super().__init__(workers, attempts=1)
        self.dying, self.started = dying, 0
        self.sent: dict[int, Part | None] = {}

    def _start(self) -> int:
        self.started += 1
        return self.started

    def _send(self, worker: int, part: Part | None) -> None:
        self.sent[worker] = part

    def _receive(self, workers: Sequence[int], seconds: float | None) -> list[tuple[int, Answer | Death]]:
        return [(worker, self._answer(worker, part)) for worker, part in [*self.sent.items()] if worker in workers]

    def _answer(self, worker: int, part: Part | None) -> Answer | Death:
        del self.sent[worker]
        if part is None:
            return None
        return Death("it is dead") if worker in self.dying else Sums()(part.placements.unpack())

    def _find_death(self, worker: int) -> Death | None:
        return Death("it is dead") if worker in self.dying else None

    def _stop(self, worker: int) -> None:
        self.sent.pop(worker, None)


def test_workers_that_died_idle_get_no_part() -> None:
    """Workers 1 to 3 say that they have started, and die. So do 5 and 6, two of the three that replace them."""
    pool, placements = InMemory(3, {1, 2, 3, 5, 6}), np.arange(12).reshape(12, 1)
    assert_same(pool(placements), Sums()(placements))
    assert pool.started == 8


def test_a_part_that_kills_every_worker_is_given_up(tmp_path: Path) -> None:
    thread = killer(tmp_path)
    placements = np.arange(12).reshape(12, 1)
    with ProcessPool(Dying(tmp_path, times=99), 2, attempts=3) as pool:
        first = 12 // (2 * PARTS_PER_WORKER) * 3
        message = rf"3 workers died evaluating placements {first} to 11 of a batch, .* process \d+ was killed by signal 9"
        with pytest.raises(PlacewiseError, match=message):
            pool(placements)
        assert_same(pool(placements[:9]), Sums()(placements[:9]))  # and goes on with the next batch
    (tmp_path / "pipe").write_text("stop")
    thread.join()


def test_an_evaluator_that_can_not_be_made() -> None:
    with ProcessPool(Failing(ProblemError("no such thing")), 1) as pool:
        for _ in range(2):
            with pytest.raises(ProblemError, match="no such thing") as caught:
                pool(np.zeros((4, 1), np.int64))
            assert "In a worker:" in caught.value.__notes__[0]
    with ProcessPool(Leaving(), 1, attempts=2) as pool, pytest.raises(PlacewiseError, match=r"workers died .*: exit code 7"):
        pool(np.zeros((4, 1), np.int64))


def test_numbers_of_workers_and_attempts_are_checked() -> None:
    with pytest.raises(InputError, match="workers must be at least 1, there are 0"):
        ProcessPool(Sums, 0)
    with pytest.raises(InputError, match="attempts must be at least 1, it is 0"):
        ProcessPool(Sums, 1, attempts=0)


def test_a_closed_pool_has_no_processes_and_says_so() -> None:
    pool = ProcessPool(Sums, 2)
    pids = pool.process_ids
    pool.close()
    pool.close()
    assert pool.process_ids == ()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(PlacewiseError, match="closed"):
        pool(np.zeros((1, 1), np.int64))


SCRIPT = """
import sys
import numpy as np
sys.path.insert(0, {tests!r})
from pathlib import Path
from evaluators import Dying
from placewise.evaluate.pool import ProcessPool
with ProcessPool(Dying(Path({folder!r}), times=2), 2) as pool:
    try:
        pool(np.full((4, 1), 9))
    except KeyboardInterrupt:
        print(pool(np.zeros((2, 1), int)).cost.tolist(), flush=True)
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
    # communicate() returns only when the workers have ended, because they hold the script's standard error too
