"""The schedule as a picture in text, and the table of devices."""

import numpy as np
import pytest
from builders import graph_data, tensor
from chain_schedules import chain, two
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Step, gpus, random_placements, steps, takes

from placewise.report.terminal_picture import axis, busy_shares, device_table, picture
from placewise.simulate.simulator import Simulator


def test_the_picture_of_two_ops() -> None:
    """10 s in 20 columns: gpu:0 is busy in the first 6, gpu:1 in the last 10."""
    lines = picture(two(), 27).splitlines()
    assert lines[:2] == ["gpu:0  " + "█" * 6, "gpu:1  " + " " * 10 + "█" * 10]
    assert picture(two(), 27, in_blocks=False).splitlines()[0] == "gpu:0  %%%%%%"


def test_a_column_shows_its_busy_share() -> None:
    """10 s in 10 columns of 1 s: 2.5 s on gpu:0 are two columns and a half one, 5.5 s on gpu:1 half a column and five."""
    schedule = chain(["a.mm", "b.mm"], [2.5, 5.5], [0, 1])
    assert picture(schedule, 17).splitlines()[:2] == ["gpu:0  ██▄", "gpu:1      ▄█████"]


def test_phases_have_colours() -> None:
    text = picture(two(), 27, in_colour=True)
    assert "gpu:0  \x1b[34m██████" in text
    assert text.splitlines()[-1].split() == [
        f"\x1b[{c}m{p}\x1b[0m" for c, p in ((34, "forward"), (33, "backward"), (32, "update"))
    ]


def test_the_axis_has_round_times_in_their_places() -> None:
    """0.35 s in 70 columns: a column is 5 ms, so 100 ms are 20 columns."""
    text = axis(0.35, 70)
    assert text == "0" + " " * 19 + "100 ms" + " " * 14 + "200 ms" + " " * 14 + "300 ms"
    assert all(len(axis(seconds, columns)) <= columns for seconds in (1e-7, 3e-3, 0.99, 7200.0) for columns in (10, 33, 200))


@given(steps(), st.integers(10, 60))
@settings(max_examples=40)
def test_the_picture_has_all_of_the_busy_time(drawn: tuple[Step, np.random.Generator], columns: int) -> None:
    step, rng = drawn
    schedule = Simulator(step.problem, "program", 1).schedule(random_placements(step.problem, rng, 1)[0])
    if not schedule.step_seconds:
        assert picture(schedule, 80) == ""
        return
    for device in range(step.problem.num_devices):
        shares = busy_shares(schedule, device, columns)
        assert ((shares >= -1e-9) & (shares <= 1 + 1e-9)).all()
        assert shares.sum() * schedule.step_seconds / columns == pytest.approx(schedule.busy_seconds[device])
    assert len(picture(schedule, 80).splitlines()) == step.problem.num_devices + 1


def test_the_table_says_what_does_not_fit() -> None:
    assert "does not fit" not in device_table(two())
    assert device_table(chain(["a.mm", "b.mm"], [3.0, 5.0], [0, 1], memory=1)).splitlines()[2].endswith("does not fit")


@pytest.mark.parametrize(("num_gpus", "num_lines"), [(5, 5), (6, 6), (7, 2)])
def test_many_idle_devices_share_a_line(num_gpus: int, num_lines: int) -> None:
    """Up to four idle devices have their own lines; six others share one in the table, and have none in the picture."""
    problem = Step.of(graph_data([tensor("a", 1)], [takes(3, 0, [], [0]), takes(2, 1, [0], [])]), gpus(num_gpus)).problem
    schedule = Simulator(problem).schedule(np.array([0, 2 if num_gpus == 6 else 0]))
    lines = device_table(schedule).splitlines()[1:]
    assert len(lines) == num_lines
    if num_gpus == 7:
        assert lines[1].split() == ["6", "others", "0", "0", "s", "0%", "0", "s", "0", "B"]
        assert len(picture(schedule, 80).splitlines()) == 2
