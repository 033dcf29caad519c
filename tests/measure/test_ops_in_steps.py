"""Ops timed inside whole steps."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_steps import signatures_of, two_cpus, words_step

from placewise.core.profile import Timing
from placewise.measure import ops_in_steps
from placewise.measure.ops_in_steps import (
    STEPS,
    launched_op_seconds,
    op_timings_in_steps,
    timings_of_steps,
    traced_op_seconds,
)
from placewise.measure.profiler import measure_profile
from placewise.run.devices import real_devices
from placewise.run.lower.instructions import RunOp
from placewise.run.step.residents import Residents


def test_ops_of_a_cpu_are_timed_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is trained meanwhile."""
    monkeypatch.setattr(ops_in_steps, "ENOUGH_SECONDS", np.inf)
    step = words_step()
    before = [parameter.detach().clone() for parameter in step.step.model.parameters()]
    profile = measure_profile(step, two_cpus(), runs_step=True).profile
    assert any(not torch.equal(a, b) for a, b in zip(before, step.step.model.parameters(), strict=True))
    found = Counter(signatures_of(step))
    assert {signature: timings["cpu:0"].count for signature, timings in profile.timings.items()} == {
        signature: STEPS * count for signature, count in found.items()
    }


def test_an_op_takes_until_the_next_one_starts_and_all_of_them_a_step() -> None:
    """Op 7 runs from 0 to 2 s, op 8 from 3 to 4 s and op 9 from 5 to 7 s: 7 s, of which a usual step takes 5.5 s.

    So tracing adds 0.5 s to each. That leaves 2.5 s for op 7 and 1.5 s for op 8. Op 9 has no pause: it keeps its 2 s.
    """
    sequence = (RunOp(7, 0), RunOp(8, 0), RunOp(9, 0))
    trace = SimpleNamespace(times={1: (3.0, 4.0), 0: (0.0, 2.0), 2: (5.0, 7.0)})
    placed = SimpleNamespace(instructions=SimpleNamespace(sequence=sequence))
    train_step: Any = SimpleNamespace(placed=placed, trace=lambda batch: trace)
    assert traced_op_seconds(train_step, None, 5.5) == {7: 2.5, 8: 1.5, 9: 2.0}
    assert traced_op_seconds(train_step, None, 8.0) == {7: 3.0, 8: 2.0, 9: 2.0}


def test_what_stalls_an_op_now_and_then_is_part_of_all() -> None:
    """In three steps a takes 1 s, two ops b take 2 s each but for one stall of 8 s: medians of 1 s and 2 s, 5 s together.

    A step takes 7.5 s, because another op is stalled in most of them: all take half as much again. A step of 4 s
    takes nothing off.
    """
    found = {"a": [1.0, 1.0, 1.0], "b": [2.0, 2.0, 2.0, 8.0, 2.0, 2.0]}
    assert timings_of_steps(found, 3, 7.5) == {"a": Timing(1.5, 3), "b": Timing(3.0, 6)}
    assert timings_of_steps(found, 3, 4.0) == {"a": Timing(1.0, 3), "b": Timing(2.0, 6)}


def test_the_ops_of_a_row_share_its_time_by_bytes() -> None:
    """Op 7 takes 3 s; ops 8 and 9, which move 10 and 30 bytes, 4 s together."""
    sequence = (RunOp(7, 0), RunOp(8, 0), RunOp(9, 0))
    moved = np.zeros(10)
    moved[[8, 9]] = 10, 30
    graph = SimpleNamespace(ops=SimpleNamespace(bytes_moved=moved))
    placed: Any = SimpleNamespace(instructions=SimpleNamespace(sequence=sequence), resolved=SimpleNamespace(graph=graph))
    trace: Any = SimpleNamespace(times={0: (1.0, 4.0), 1: (4.0, 8.0)}, rows={1: (1, 2), 2: (1, 2)})
    assert launched_op_seconds(placed, trace) == {7: 3.0, 8: 1.0, 9: 3.0}


def test_a_device_without_memory_for_whole_steps_has_no_times_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the model may have a place there."""

    def has_no_place(residents: Residents, batch: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    step, cluster = words_step(), two_cpus()
    monkeypatch.setattr(Residents, "gather", has_no_place)
    assert op_timings_in_steps(step, cluster.devices[0], real_devices(cluster)[0], signatures_of(step)) == {}
