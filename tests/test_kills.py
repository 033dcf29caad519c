"""A fixed part of `python -m tests.kills`: signals at given calls, not at moments of the clock."""

import functools
import signal

import pytest
from kills.harness import Left, check_after, check_finished, check_signalled, trial, undisturbed
from kills.scenarios import SCENARIOS, Scenario, placed

SMALL = placed("small", "--strategy annealing --budget 200")

STEP = next(scenario for scenario in SCENARIOS if scenario.name == "run")


@functools.cache
def reference_of(scenario: Scenario) -> Left:
    return undisturbed(scenario)[0]


KILL, CTRL_C, END = signal.SIGKILL, signal.SIGINT, signal.SIGTERM


@pytest.mark.parametrize(
    ("scenario", "phase", "event", "number"),
    [
        *((SMALL, "search", 2000, number) for number in (KILL, CTRL_C, END)),
        (SMALL, "recording", 150, KILL),
        (SMALL, "report", 40, KILL),
        (SMALL, "report", 40, CTRL_C),
        (STEP, "step", 900, CTRL_C),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_what_is_left_is_whole_and_the_next_run_finishes_it(
    scenario: Scenario, phase: str, event: int, number: signal.Signals
) -> None:
    with trial(scenario) as run:
        ended = run.run(f"{phase}:{int(number)}:{event}")
        assert ended.phase == phase or number != signal.SIGKILL
        if number == signal.SIGKILL:
            assert ended.code == -number
        else:
            check_signalled(ended, number, phase)
            assert run.strays() == []
        left = check_after(run, Left((), None), reference_of(scenario), may_be_part=ended.code == 0)
        check_finished(run, left, reference_of(scenario))


@pytest.mark.parametrize("phase", ["import", "rest", "bound"])
def test_ctrl_c_is_heeded_before_a_search_begins(phase: str) -> None:
    with trial(SMALL) as run:
        ended = run.run(f"{phase}:{int(signal.SIGINT)}:30")
        check_signalled(ended, signal.SIGINT, phase)
        assert ended.code == 130
        assert not run.left().rows
