"""A setup that fails, dies or is stopped is a row, and the others are tried all the same."""

from dataclasses import replace

import pytest
from fatal_setups import find_fatal

from placewise.experiments.training_setups.agreement import EQUAL_BITS, FAILED, NOT_INSTALLED, Agreement
from placewise.experiments.training_setups.trials import Trial, try_setup, try_setups


def test_setups_that_die_are_rows_among_the_others() -> None:
    names = ["fine", "abort", "exit", "wrong", "fine"]
    trials, is_complete = try_setups([find_fatal(name) for name in names], find=find_fatal)
    assert is_complete
    assert [trial.setup.name for trial in trials] == names
    assert [trial.agreement for trial in trials] == [
        Agreement(EQUAL_BITS),
        Agreement(FAILED, why="the process died: SIGKILL"),
        Agreement(FAILED, why="the process died: exit code 3"),
        Agreement(FAILED, why="the eager loop fails: ValueError: no such model"),
        Agreement(EQUAL_BITS),
    ]


def test_ctrl_c_keeps_what_there_is() -> None:
    def stop(trial: Trial) -> None:
        raise KeyboardInterrupt

    trials, is_complete = try_setups([find_fatal("fine")] * 3, stop, find_fatal)
    assert [trial.agreement.result for trial in trials] == [EQUAL_BITS]
    assert not is_complete


def test_a_setup_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placewise.experiments.training_setups.trials.TIMEOUT_SECONDS", 0.0)
    trials, _ = try_setups([find_fatal("fine")], find=find_fatal)
    assert trials[0].agreement == Agreement(FAILED, why="takes more than 0 s")


def test_a_library_that_is_missing_is_said() -> None:
    missing = replace(find_fatal("fine"), library="no-such-library")
    assert try_setup(missing) == Agreement(NOT_INSTALLED, why="pip install no-such-library")
