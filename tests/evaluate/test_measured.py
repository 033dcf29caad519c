"""The evaluator that measures: it survives whatever a placement does, and its runs resume."""

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from builders import tiny_cluster, tiny_graph
from evaluators import Failing
from measuring import Ending, broken, no_memory, three_steps
from small_steps import MLP

from placewise.cli import main
from placewise.core.errors import ExecutionError, InputError, NothingFits, StoreError
from placewise.core.plan import Plan
from placewise.core.problem import Problem
from placewise.evaluate.cached import Cached
from placewise.evaluate.measured import Measure, Measurer, Runner
from placewise.run.step.failures import is_out_of_memory
from placewise.search.budget import Budget, budget_of
from placewise.search.driver import Progress
from placewise.search.planner import Planner
from placewise.search.request import Request, requested, specify
from placewise.search.store import RunFile

ALL = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]])  # none, one, two and three groups on device 1


def tiny_problem() -> Problem:
    return Problem.of(tiny_graph(), tiny_cluster())


@pytest.fixture
def failures() -> list[str]:
    return []


def measured(make: Any, failures: list[str], **others: Any) -> Measurer:
    return Measurer(tiny_problem(), make, report=failures.append, **others)


def test_what_was_measured_is_step_time_and_cost(tmp_path: Path, failures: list[str]) -> None:
    with measured(Ending(tmp_path / "ran"), failures) as evaluate:
        found = evaluate(ALL)
    assert found.step_seconds.tolist() == found.cost.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert found.overflow_bytes.tolist() == [0, 0, 0, 0]
    assert failures == []


def test_no_placements_are_none(tmp_path: Path, failures: list[str]) -> None:
    with measured(Ending(tmp_path / "ran"), failures) as evaluate:
        assert evaluate(ALL[:0]).cost.shape == (0,)


class HangTimer:
    """In place of threading.Timer: it ends when a placement hangs, not when some seconds have passed."""

    running: ClassVar[list["HangTimer"]] = []
    daemon = True

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        self.function = function

    def start(self) -> None:
        self.running.append(self)

    def cancel(self) -> None:
        self.running.remove(self)


def end_hangs(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a pipe; when a placement writes to it that it hangs, the deadline of its measurement passes."""
    os.mkfifo(pipe)
    monkeypatch.setattr("placewise.evaluate.measured.Timer", HangTimer)

    def listen() -> None:
        reader = os.open(pipe, os.O_RDWR)
        while os.read(reader, 100):
            HangTimer.running[0].function()

    threading.Thread(target=listen, daemon=True).start()
    return pipe


def test_memory_crash_and_hang_fail_and_the_next_is_measured(
    tmp_path: Path, failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group on device 1 has no memory, two end the process, three hang: none alone is measured after each."""
    pipe = end_hangs(tmp_path / "pipe", monkeypatch)
    make = Ending(tmp_path / "ran", {1: "memory", 2: "crash", 3: "hang"}, pipe)
    with measured(make, failures, timeout_seconds=1.0) as evaluate:
        found = evaluate(ALL[[1, 0, 2, 0, 3, 0]])
    assert found.step_seconds.tolist() == [np.inf, 1.0, np.inf, 1.0, np.inf, 1.0]
    assert found.overflow_bytes.tolist() == [5, 0, 1, 0, 1, 0]
    assert (found.cost[::2] > 1.0).all()  # more than the timeout, which nothing that is measured can exceed
    assert np.isfinite(found.cost).all()
    assert make.lines() == ["100", "000", "110", "000", "111", "000"]
    assert [line.partition(":")[2] for line in failures] == [
        " ran out of memory",
        " exit code 9; its process is replaced",
        " took over 1 s; its process is replaced",
    ]


def test_what_the_simulator_says_does_not_fit_is_not_run(tmp_path: Path, failures: list[str]) -> None:
    """The update's group has the parameter and its gradient: 8,000 bytes on device 1, which has 5,000."""
    cluster = tiny_cluster()
    small = replace(cluster, devices=(cluster.devices[0], replace(cluster.devices[1], memory_bytes=5000)))
    make = Ending(tmp_path / "ran")
    with Measurer(Problem.of(tiny_graph(), small), make, report=failures.append) as evaluate:
        found = evaluate(ALL)
    assert (found.overflow_bytes > 0).tolist() == np.isinf(found.step_seconds).tolist() == [False, False, True, True]
    assert make.lines() == ["000", "100"]


def test_a_worker_that_can_not_start_ends_the_search(failures: list[str]) -> None:
    with measured(Failing(InputError("there is no such model")), failures) as evaluate, pytest.raises(InputError):
        evaluate(ALL)


def test_a_step_that_can_not_travel_is_refused(failures: list[str]) -> None:
    with pytest.raises(InputError, match="can't be sent to the process that measures"):
        measured(lambda: None, failures)


def test_a_step_of_the_callers_own_script_is_refused(failures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It travels by name, and the process that measures has another `__main__`."""
    mine = type("Mine", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Mine", mine, raising=False)
    rule = r"can't load what it needs \(.*Mine.*\): define models, losses and evaluators in a module"
    with measured(mine, failures) as evaluate, pytest.raises(InputError, match=rule):
        evaluate(ALL)


# --- in the worker ---


def runner(run_steps: Any, steps: int = 3) -> Runner:
    return Runner(SimpleNamespace(), tiny_problem(), Measure(steps), run_steps)  # type: ignore[arg-type]


def test_the_median_counts() -> None:
    assert runner(three_steps)(ALL[:1]).step_seconds.tolist() == [2.0]


def test_a_peak_above_a_devices_memory_is_an_overflow() -> None:
    """Two devices with peaks of 10 bytes, of which the first has 4."""
    cluster = tiny_cluster()
    small = replace(cluster, devices=(replace(cluster.devices[0], memory_bytes=4), cluster.devices[1]))
    found = replace(runner(three_steps), problem=Problem.of(tiny_graph(), small))(ALL[:1])
    assert found.overflow_bytes.tolist() == [6]


def test_no_memory_is_a_failing_time_and_a_mistake_is_not() -> None:
    found = runner(no_memory)(ALL[:2])
    assert found.overflow_bytes.tolist() == [1, 1]
    assert np.isinf(found.step_seconds).all()
    with pytest.raises(ExecutionError, match="tiny: an op of the step fails: RuntimeError: a mistake"):
        runner(broken)(ALL[:1])
    assert is_out_of_memory(MemoryError())


# --- searches ---


def request(strategy: str, evaluations: int, **settings: str) -> Request:
    return Request(strategy, settings, Budget(evaluations), model="m", measure=Measure())


@pytest.mark.parametrize("strategy", ["random", "heft", "hill-climb", "post", "auto"])
def test_strategies_learn_from_measurements(strategy: str, tmp_path: Path, failures: list[str]) -> None:
    """The machine differs from the simulator: one group on device 1 crashes, none there is the best."""
    planner, make = Planner(tiny_problem(), request(strategy, 6)), Ending(tmp_path / "ran", {1: "crash"})
    with measured(make, failures) as evaluate:
        plan = planner.plan(planner.search(evaluator=Cached(evaluate)))
    assert plan.step_seconds == min([1.0 + line.count("1") for line in make.lines() if line.count("1") != 1])
    assert plan.predicted_seconds is not None
    assert "measured (predicted" in str(plan)
    if strategy == "auto":
        assert len(make.lines()) == len(set(make.lines())), "a placement that failed is not tried again"


def test_a_measured_run_resumes_without_measuring_again(tmp_path: Path, failures: list[str]) -> None:
    planner = Planner(tiny_problem(), request("random", 8, batch="3"))
    file, make = tmp_path / "runs.db", Ending(tmp_path / "ran")

    class Stopping:
        def __init__(self, evaluate: Measurer) -> None:
            self.evaluate, self.calls = evaluate, 0

        def __call__(self, placements: Any, orders: Any = None) -> Any:
            self.calls += 1
            if self.calls > 1:
                raise KeyboardInterrupt
            return self.evaluate(placements, orders)

    with measured(make, failures) as evaluate:
        assert planner.search(record=file, evaluator=Stopping(evaluate)).status == "stopped"
    before = make.lines()
    assert before
    with measured(make, failures) as evaluate:
        outcome = planner.search(record=file, evaluator=evaluate)
    assert outcome.evaluations == 8
    assert len(make.lines()) == 8
    with RunFile(file) as runs:
        assert requested(runs.runs()[0].specification).measure == Measure()


@pytest.mark.parametrize("cut", [4, (32, 64)])
def test_a_run_knows_how_gpus_were_cut(cut: int | tuple[int, ...]) -> None:
    measure = Measure(virtual={"cuda:0": cut})
    specification = specify(tiny_problem(), replace(request("random", 8), measure=measure))
    assert requested(specification).measure == measure
    specification.measured["virtual"]["cuda:0"] = "32+"
    with pytest.raises(StoreError, match=r"measured: virtual: cuda:0 must be a number of slices or .* got '32\+'"):
        requested(specification)


def test_a_stopped_batch_keeps_what_was_measured(tmp_path: Path, failures: list[str]) -> None:
    """`random` proposes all 8 at once. It is stopped after 3; the 5 others are measured when it goes on."""
    planner, file, make = Planner(tiny_problem(), request("random", 8)), tmp_path / "runs.db", Ending(tmp_path / "ran")

    def stop(progress: Progress) -> None:
        if progress.evaluations == 3:
            raise KeyboardInterrupt

    with measured(make, failures) as evaluate:
        outcome = planner.search(stop, record=file, evaluator=evaluate)
        assert (outcome.status, outcome.evaluations, len(make.lines())) == ("stopped", 3, 3)
        assert outcome.step_seconds == min(1.0 + line.count("1") for line in make.lines())
        resumed = planner.search(record=file, evaluator=evaluate)
        assert len(make.lines()) == 8
        whole = planner.search(evaluator=evaluate)
    assert resumed.history == whole.history
    assert make.lines()[:8] == make.lines()[8:]


def test_measured_and_simulated_runs_are_told_apart() -> None:
    simulated = request("random", 8)
    keys = {
        specify(tiny_problem(), entry).key
        for entry in (
            simulated,
            replace(simulated, measure=None),
            replace(simulated, measure=Measure(5)),
            replace(simulated, model="other"),
        )
    }
    assert len(keys) == 4


def test_nothing_that_runs_is_nothing_that_fits(tmp_path: Path, failures: list[str]) -> None:
    planner = Planner(tiny_problem(), request("random", 4))
    with measured(Ending(tmp_path / "ran", dict.fromkeys(range(4), "memory")), failures) as evaluate:
        outcome = planner.search(evaluator=evaluate)
    with pytest.raises(NothingFits, match="none could be run, though the simulator predicts that they fit"):
        planner.plan(outcome)


def test_the_command_measures_and_its_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of this folder on two CPU devices, run for real; the finished run is answered without a process."""
    monkeypatch.chdir(Path(__file__).parents[1])
    machine, runs, plan = (str(tmp_path / name) for name in ("two.toml", "runs.db", "plan.json"))
    assert main(["detect", "--cpus", "2", "-o", machine]) == 0
    capsys.readouterr()
    asked = ["--strategy", "random", "--budget", "2", "--steps", "2", "--run-file", runs, "-o", plan, "--json"]
    assert main(["place", MLP, "--cluster", machine, "--measure", *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["evaluations"] == 2
    assert found["step_seconds"] > 0
    assert found["step_seconds"] != found["predicted_seconds"] > 0
    assert found["gap"] is None
    assert main(["resume", "1", "--run-file", runs, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == found["step_seconds"]
    assert Plan.load(plan).predicted_seconds == found["predicted_seconds"]


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1 step"):
        Measure(steps=0)
    assert budget_of("auto", None, None, is_measured=True) == Budget(60)
