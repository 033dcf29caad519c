"""Schedules explained: every text here is worked out by hand."""

from typing import Any

import numpy as np
import pytest
from builders import graph_data, op, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Step, gpus, random_order, random_placements, steps

from placewise.bounds.best_bound import Bound, bound
from placewise.report.explanation import explain
from placewise.simulate.simulator import Simulator


def said(ops: list[tuple[str, float]], placement: list[int], limit: Bound | None = None, **machine: Any) -> tuple[str, ...]:
    """Returns the words for a chain of ops, each with its name and its seconds on any GPU, on as many GPUs as are used.

    Every op reads the byte that the one before it writes; where it is elsewhere, the copy takes 1 + 1 s.
    """
    rows = [
        op(name, n, [n - 1] if n else [], [n], seconds={"gpu": seconds}, micro_batch=machine.get("batches", {}).get(n, 0))
        for n, (name, seconds) in enumerate(ops)
    ]
    machine.pop("batches", None)
    cluster = gpus(max(placement) + 1, **machine)
    problem = Step.of(graph_data([tensor(f"t{n}") for n in range(len(ops))], rows), cluster).problem
    return explain(problem, Simulator(problem, "program").schedule(np.array(placement)), limit)


# --- what runs where ---


def where(ops: list[tuple[str, float]], placement: list[int], **machine: Any) -> str:
    return said(ops, placement, **machine)[0]


def test_the_largest_modules_on_one_device_are_named() -> None:
    """The decoder's layers are both on gpu:1, so it is named as a whole; the projection's 10 s are 6 and 4."""
    ops = [
        ("encoder.0.mm", 20.0), ("encoder.1.mm", 10.0), ("decoder.0.mm", 5.0), ("decoder.1.mm", 20.0),
        ("projection.mm", 6.0), ("projection.add", 4.0),
    ]  # fmt: skip
    expected = "encoder on gpu:0; decoder on gpu:1; projection split over gpu:0 and gpu:1 (60/40 by time); 3 copies, 3 B"
    assert where(ops, [0, 0, 1, 1, 0, 1]) == expected


def test_a_mixed_module_is_explained_by_its_submodules() -> None:
    """The encoder's layers are apart; that of the decoder with 19 of 20 s on gpu:1 is mostly there."""
    ops = [
        ("encoder.0.mm", 20.0), ("encoder.1.mm", 20.0), ("encoder.add", 3.0), ("decoder.0.mm", 19.0), ("decoder.0.add", 1.0),
    ]  # fmt: skip
    expected = "encoder.1 and decoder mostly on gpu:1; encoder.0 and encoder itself on gpu:0; 4 copies, 4 B"
    assert where(ops, [0, 1, 0, 1, 0]) == expected


def test_numbers_that_follow_each_other_are_one_name() -> None:
    """Five names on gpu:1, four of them as long as each other, three of which are only counted."""
    ops = [(f"blocks.{n}.mm", 9.0) for n in range(7)] + [(f"{name}.mm", 8.0) for name in ("a", "b", "c", "d")]
    expected = "blocks.3 to blocks.6, a and 3 more on gpu:1; blocks.0 to blocks.2 on gpu:0; 1 copy, 1 B"
    assert where(ops, [0, 0, 0, *[1] * 8]) == expected


def test_one_device_has_everything_or_nearly() -> None:
    assert where([("a.mm", 3.0), ("b.mm", 1.0)], [0, 0]) == "everything on gpu:0; no copies"
    text = where([("a.mm", 1.0), ("b.mm", 19.0), ("c.view", 0.0)], [0, 1, 2])
    assert text == "nearly everything on gpu:1 (95% of the time), the rest on gpu:0 and gpu:2; 2 copies, 2 B"


def test_at_most_six_clauses_and_small_ones_are_the_rest() -> None:
    """Eight devices: the seventh and eighth are the rest, 5 of 100 s. Ops in no module are named too."""
    ops = [("mm", 25.0)] + [(f"m{n}.mm", 14.0) for n in range(5)] + [("x.mm", 4.0), ("y.mm", 1.0)]
    text = where(ops, [0, 2, 1, 3, 4, 5, 6, 7])
    clauses = text.split("; ")
    assert clauses[0] == "ops in no module on gpu:0"
    assert clauses[1:3] == ["m0 on gpu:2", "m1 on gpu:1"]  # as long as each other: in program order
    assert clauses[6:] == ["the rest (5% of the time) on gpu:6 and gpu:7", "7 copies, 7 B"]
    two = [("a.mm", 60.0), ("b.mm", 39.0), ("c.mm", 0.5), ("c.add", 0.5)]
    expected = "a on gpu:0; b on gpu:1; the rest (1% of the time) on gpu:0 and gpu:1; 3 copies, 3 B"
    assert where(two, [0, 1, 0, 1]) == expected


def test_data_parallelism_is_explained_by_micro_batch() -> None:
    """Both modules are half here, half there; each micro-batch is on one device."""
    ops = [(f"{name}.mm_{n}", 1.0) for n in range(4) for name in ("a", "b")]
    batches = {n: n // 2 for n in range(8)}
    text = where(ops, [0, 0, 0, 0, 1, 1, 1, 1], batches=batches)
    expected = "micro-batch 0 to micro-batch 1 on gpu:0; micro-batch 2 to micro-batch 3 on gpu:1; 1 copy, 1 B"
    assert text == expected


def test_many_devices_are_counted() -> None:
    """One module alone, mixed: there is nothing better to say."""
    text = where([(f"a.mm_{n}", 1.0) for n in range(5)], [0, 1, 2, 3, 4])
    assert text == "a split over 5 devices (20/20/20/20/20 by time); 4 copies, 4 B"


# --- what limits it ---


def test_the_critical_path_the_busiest_and_the_fullest() -> None:
    """3 s on gpu:0, a copy of 2 s, 5 s on gpu:1; of 2 bytes gpu:1 needs 2, for its input and output, gpu:0 1."""
    ops = [("a.mm", 3.0), ("b.mm", 5.0)]
    why = "critical path: 80% ops, 20% copies; gpu:1 is busy 50% of the step, channel gpu:0->gpu:1 20%"
    assert said(ops, [0, 1])[1] == why
    assert said(ops, [0, 1], memory=2)[1] == f"{why}; gpu:1 has 0% of its memory left"
    assert said(ops, [0, 1], memory=1)[1] == f"{why}; gpu:0 has 0% of its memory left; gpu:1 lacks 1 B of memory"


def test_launching_may_hold_it_back() -> None:
    """Each launch takes 1 s: the second op is launched at 2 s and ends at 2.5 s."""
    text = said([("a.mm", 0.5), ("b.mm", 0.5)], [0, 0], dispatch=1.0)[1]
    assert text == "critical path: 20% ops, 80% launching; gpu:0 is busy 40% of the step"


# --- what can still be gained ---


def test_the_bound_and_one_device_that_is_near_it() -> None:
    """8 s on one device, 10 s found. A bound of 8 s: nothing helps; of 7 s: 12.5% can be saved; 6 s are too far away."""
    ops, placement = [("a.mm", 3.0), ("b.mm", 5.0)], [0, 1]
    left = said(ops, placement, Bound(8.0, "path", {}))[2]
    assert left == (
        "no placement can be more than 25.0% faster: the longest chain of ops takes at least 8 s; "
        "gpu:0 alone takes 8 s: more devices can't help"
    )
    left = said(ops, placement, Bound(7.0, "work", {}))[2]
    assert left == (
        "no placement can be more than 42.9% faster: the work that the devices share takes at least 7 s; "
        "gpu:0 alone takes 8 s: more devices can save at most 12.5%"
    )
    left = said(ops, placement, Bound(6.0, "host", {}))[2]
    assert left == "no placement can be more than 66.7% faster: launching the ops takes at least 6 s"
    assert said(ops, [0, 0], Bound(8.0, "path", {}))[2].startswith("no placement is faster: the longest chain")
    assert "no useful bound" in said(ops, [0, 0], Bound(0.0, "path", {}))[2]
    assert len(said(ops, placement)) == 2


def test_an_empty_step_takes_no_time() -> None:
    problem = Step.of(graph_data([], []), gpus(1)).problem
    assert explain(problem, Simulator(problem).schedule(np.zeros(0, np.int64)), bound(problem)) == ("no op takes any time",)


@given(steps(), st.booleans())
@settings(max_examples=40)
def test_whatever_is_placed_there_are_words_for_it(drawn: tuple[Step, np.random.Generator], is_ordered: bool) -> None:
    step, rng = drawn
    problem = step.problem
    placement = random_placements(problem, rng, 1)[0]
    schedule = Simulator(problem, "program").schedule(placement, random_order(problem, rng) if is_ordered else None)
    lines = explain(problem, schedule, bound(problem))
    assert len(lines) == (3 if schedule.step_seconds else 1)
    assert all(line and line == " ".join(line.split()) and "nan" not in line for line in lines)
    assert explain(problem, schedule, bound(problem)) == lines


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_where_only_copies_take_time_ops_are_counted(seconds: float) -> None:
    assert where([("a.mm", seconds), ("b.mm", seconds)], [0, 1]) == "a on gpu:0; b on gpu:1; 1 copy, 1 B"
