"""The simulator is the definition: by hand, and equal to the reference at random; threads and batches change nothing."""

import importlib.util
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import graph_data, graph_rows, tensor, tiny_cluster_data, tiny_data
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher
from simulated import Step, gpus, leave_some_out, random_order, random_placements, random_step, steps, takes

from placewise.cli.simulate_command import schedule_json
from placewise.core.arrays import Ints
from placewise.core.cluster import copy_seconds
from placewise.core.errors import ProblemError
from placewise.simulate import kernels, priority, reference, timeline
from placewise.simulate.kernels import arrival_time, departure_time
from placewise.simulate.longest_step import longest_step_seconds
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import ORDERS, Simulator

DEFINITION = Path(__file__).parents[3] / "shared" / "reference" / "simulate.py"


def ints(*values: Any) -> Ints:
    return np.array(values, np.int64)


def copies_of(schedule: Schedule) -> list[dict[str, Any]]:
    """The schedule's copies, as the reference lists them."""
    names, t = schedule.problem.cluster.device_names, schedule.timeline
    columns = (schedule.copy_tensors, t.copy_source, t.copy_target, t.copy_start, t.copy_end, t.copy_reader)
    return [
        {"tensor": moved, "from": names[source], "to": names[target], "start": start, "end": end, "for": reader}
        for moved, source, target, start, end, reader in zip(*(column.tolist() for column in columns), strict=True)
    ]


def assert_equal(step: Step, placement: Ints, order: Ints | None = None) -> None:
    """Time, peaks, every op and every copy are the reference's, to the last bit."""
    simulator = Simulator(step.problem, "program", threads=1)
    expected = step.reference(placement, order)
    seconds, peaks, _ = simulator.simulate(placement[None], None if order is None else order[None])
    assert seconds.tolist() == [expected["step_seconds"]]
    assert peaks.tolist() == [list(expected["peak_bytes"].values())]
    schedule = simulator.schedule(placement, order)
    assert schedule.step_seconds == expected["step_seconds"]
    assert schedule.peak_bytes.tolist() == peaks[0].tolist()
    assert schedule.fits == expected["fits"]
    assert schedule.timeline.start.tolist() == expected["start"]
    assert schedule.timeline.end.tolist() == expected["end"]
    assert copies_of(schedule) == expected["copies"]


# --- the reference ---


@settings(max_examples=2000)
@given(steps(max_ops=12), st.booleans())
def test_equal_to_the_reference(drawn: tuple[Step, np.random.Generator], is_ordered: bool) -> None:
    step, rng = drawn
    placement = random_placements(step.problem, rng, 1)[0]
    assert_equal(step, placement, random_order(step.problem, rng) if is_ordered else None)


@settings(max_examples=1000)
@given(steps(max_ops=12, options=True), st.booleans())
def test_optional_ops_equal_to_the_definition(drawn: tuple[Step, np.random.Generator], is_ordered: bool) -> None:
    """With groups that are nowhere; by our reference, and by the definition itself where it is there."""
    step, rng = drawn
    problem = step.problem
    placement = leave_some_out(problem, random_placements(problem, rng, 1), rng)[0]
    present = problem.present(placement)
    order = present.restore_order(random_order(present.problem, rng)) if is_ordered else None
    simulator = Simulator(problem, "program", threads=1)
    seconds, peaks, _ = simulator.simulate(placement[None], None if order is None else order[None])
    schedule = simulator.schedule(placement, order)
    definitions = [reference.simulate] + ([load_definition().simulate] if DEFINITION.exists() else [])
    for simulate in definitions:
        launches = None if order is None else order.tolist()
        expected = simulate(step.graph, step.cluster, problem.expand(placement), launches)
        assert seconds.tolist() == [expected["step_seconds"]]
        assert peaks.tolist() == [list(expected["peak_bytes"].values())]
        assert schedule_json(schedule) == expected


@settings(max_examples=300)
@given(steps(max_ops=12, waits=True), st.booleans())
def test_hosts_that_wait_and_copies_that_take_work(drawn: tuple[Step, np.random.Generator], is_ordered: bool) -> None:
    step, rng = drawn
    placement = random_placements(step.problem, rng, 1)[0]
    assert_equal(step, placement, random_order(step.problem, rng) if is_ordered else None)
    assert Simulator(step.problem).schedule(placement).step_seconds <= longest_step_seconds(step.problem) * (1 + 1e-12)


def test_a_host_that_waits_launches_nothing_meanwhile() -> None:
    """op0 takes 5 s on gpu:1; op1 reads it on gpu:0, op2 there reads nothing. A copy of 1 byte takes 2 s, ops 1 s.

    op2 is on gpu:2: it starts at 0 s, or at 5 s if the host waits for op0 before it launches the copy and what comes after.
    """
    rows = [takes(5, 0, writes=[0]), takes(1, 1, reads=[0], writes=[1]), takes(1, 2, writes=[2])]
    graph = graph_data([tensor(f"t{i}", 1) for i in range(3)], rows)
    for waits, start in ((False, 0.0), (True, 5.0)):
        cluster = gpus(3)
        cluster["default_link"]["host_waits"] = waits
        step = Step.of(graph, cluster)
        schedule = Simulator(step.problem, "program").schedule(ints(1, 0, 2))
        assert schedule.timeline.start.tolist() == [0.0, 7.0, start]
        assert schedule.wait(2) == (("host", 0) if waits else ("nothing", -1))
        assert_equal(step, ints(1, 0, 2))


def test_copies_take_time_of_the_devices_at_both_ends() -> None:
    """op0 takes 5 s on gpu:1; op1 reads its byte on gpu:0, where op2 ran before; op3 follows on gpu:1. A copy takes 2 s.

    It leaves gpu:1 at 5 s and is on gpu:0 at 7 s. If it keeps gpu:1 for 0.5 s and 0.25 s a byte, op3 starts at 5.75 s. If it
    keeps gpu:0 for 3 s, op1 starts there at 7 s, because op2 ended at 1 s; for 8 s, at 9 s.
    """
    rows = [takes(5, 0, writes=[0]), takes(1, 2, writes=[2]), takes(1, 1, reads=[0], writes=[1]), takes(1, 3, writes=[3])]
    graph = graph_data([tensor(f"t{i}", 1) for i in range(4)], rows)
    for receiving, start in ((3.0, 7.0), (8.0, 9.0)):
        cluster = gpus(2)
        cluster["default_link"]["source_work"] = {"seconds": 0.5, "bytes_per_second": 4.0}
        cluster["default_link"]["target_work"] = {"seconds": receiving}
        step = Step.of(graph, cluster)
        schedule = Simulator(step.problem, "program").schedule(ints(1, 0, 0, 1))
        assert schedule.timeline.start.tolist() == [0.0, 0.0, start, 5.75]
        assert_equal(step, ints(1, 0, 0, 1))


def test_copies_that_are_on_their_way_leave_the_channel_to_others() -> None:
    """op0 and op1 end at 1 s and 2 s on gpu:1; op2 reads both on gpu:0. A copy takes 2 s on the channel, and 4 s more.

    The first copy is on the channel from 1 s to 3 s, the second from 3 s to 5 s, so op2 starts at 9 s.
    """
    rows = [takes(1, 0, writes=[0]), takes(1, 1, writes=[1]), takes(1, 2, reads=[0, 1], writes=[2])]
    graph = graph_data([tensor(f"t{i}", 1) for i in range(3)], rows)
    cluster = gpus(2)
    cluster["default_link"]["delay_seconds"] = 4.0
    step = Step.of(graph, cluster)
    schedule = Simulator(step.problem, "program").schedule(ints(1, 1, 0))
    assert schedule.timeline.start.tolist() == [0.0, 1.0, 9.0]
    assert schedule.timeline.copy_end.tolist() == [7.0, 9.0]
    assert_equal(step, ints(1, 1, 0))


def test_no_step_takes_longer_than_its_launches_too() -> None:
    """Launches take 10 s, those of copies 30 s; ops 1 s, the copy 2 s: 54 s in all.

    op0 starts at 10 s, the copy at 40 s, op1 at 50 s: the step takes 51 s.
    """
    rows = [takes(1, 0, writes=[0]), takes(1, 1, reads=[0], writes=[1])]
    cluster = gpus(2, dispatch=10) | {"copy_dispatch_seconds": 30}
    step = Step.of(graph_data([tensor("t", 1), tensor("u", 1)], rows), cluster)
    assert longest_step_seconds(step.problem) == 54
    assert_equal(step, ints(0, 1))
    assert Simulator(step.problem).schedule(ints(0, 1)).step_seconds == 51


def test_the_random_steps_have_what_they_should() -> None:
    """Of 500 steps, at least 20 have each of the features that the kernels treat separately."""
    counts: Counter[str] = Counter()
    for seed in range(500):
        grouping = ("colocated", "coarse:3")[seed % 2]
        step, rng = random_step(seed, seed % 13, 1 + seed % 4, 60, grouping, typed=seed % 3 == 0)
        counts.update(
            name for name, is_there in features(step, random_placements(step.problem, rng, 1)[0]).items() if is_there
        )
    assert len(counts) == 19
    assert min(counts.values()) >= 20, counts


def features(step: Step, placement: Ints) -> dict[str, bool]:
    """Whether a step with this placement has each of the features that the kernels treat separately."""
    tensors, ops, problem, result = step.graph["tensors"], step.graph["ops"], step.problem, step.reference(placement)
    written = {t for row in ops for t in row["writes"]}
    read = {t for row in ops for t in row["reads"]}
    resident = set(range(len(tensors))) - written
    links = reference.links(step.cluster)
    host_of = {device["name"]: device.get("host", "") for device in step.cluster["devices"]}
    devices = problem.expand(placement)
    needed = {(t, n) for n, row in enumerate(ops) for t in row["reads"]}
    readers_there = [
        [n for t, n in needed if t == copy["tensor"] and devices[ops[n]["group"]] == copy["to"]] for copy in result["copies"]
    ]
    return {
        "no op": not ops,
        "another speed in another type": any(
            reference.seconds_on(row, device) != reference.seconds_on(row | {"compute": "float32"}, device)
            for row in ops
            for device in step.cluster["devices"]
        ),
        "one device": problem.num_devices == 1,
        "shared channel": len({channel for _, _, channel in links.values()}) < len(links),
        "two channels": any(len(set(channels)) == 2 for _, _, channels in links.values()),
        "copy between hosts": any(host_of[copy["from"]] != host_of[copy["to"]] for copy in result["copies"]),
        "dispatch time": step.cluster["dispatch_seconds"] > 0,
        "no latency": any(latency == 0 for latency, _, _ in links.values()),
        "alias": any("alias_of" in tensors[t] for t in written),
        "resident alias": any("alias_of" in tensors[t] for t in resident),
        "after": any("after" in row for row in ops),
        "home": any("home" in tensors[t] for t in resident & read),
        "no home": any("home" not in tensors[t] for t in resident & read),
        "unread resident": any("home" not in tensors[t] for t in resident - read),
        "no work": any(start == end for start, end in zip(result["start"], result["end"], strict=True)),
        "kept output": bool(written & set(step.graph["outputs"])),
        "copy": bool(result["copies"]),
        "shared copy": any(len(readers) > 1 for readers in readers_there),
        "copy that waits": any(copy["start"] > 0 for copy in result["copies"]),
        "overflow": not result["fits"],
        "merged groups": 1 < problem.num_groups < problem.graph.num_groups,
    }


@settings(max_examples=200)
@given(graph_rows(max_ops=8), st.integers(0, 2**32 - 1))
def test_equal_to_the_reference_with_any_numbers(rows: dict[str, Any], seed: int) -> None:
    """Sizes up to 2**40 bytes and times from 1e-9 s up to 1e18 s."""
    for row in rows["ops"]:
        row.pop("devices", None)
    rng = np.random.default_rng(seed)
    step = Step.of(rows, tiny_cluster_data())
    assert_equal(step, random_placements(step.problem, rng, 1)[0], random_order(step.problem, rng))


@settings(max_examples=300)
@given(steps(max_ops=12), st.booleans())
def test_the_reference_is_the_definition(drawn: tuple[Step, np.random.Generator], is_ordered: bool) -> None:
    definition = load_definition()
    step, rng = drawn
    names = step.problem.expand(random_placements(step.problem, rng, 1)[0])
    order = random_order(step.problem, rng).tolist() if is_ordered else None
    arguments = (step.graph, step.cluster, names, order)
    assert reference.simulate(*arguments) == definition.simulate(*arguments)


def test_the_reference_reads_sizes_as_the_definition() -> None:
    definition = load_definition()
    for text in (4096, "4096", "12GiB", "1.5KiB", "3MB", "0.25TiB", "7kB"):
        assert reference.size(text) == definition.size(text)


def load_definition() -> Any:
    if not DEFINITION.exists():
        pytest.skip(f"{DEFINITION} is not there")
    spec = importlib.util.spec_from_file_location("definition", DEFINITION)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- by hand ---


def by_hand(
    rows: list[dict[str, Any]], nbytes: list[int], devices: list[int], cluster: dict[str, Any], outputs: tuple[int, ...] = ()
) -> Schedule:
    """The program-order schedule of ops that write the tensors of these sizes; each group is on the device given."""
    step = Step.of(graph_data([tensor(f"t{t}", size) for t, size in enumerate(nbytes)], rows, outputs), cluster)
    assert_equal(step, ints(*devices))
    return Simulator(step.problem, "program").schedule(ints(*devices))


def spans(schedule: Schedule) -> list[tuple[float, float]]:
    return list(zip(schedule.timeline.start.tolist(), schedule.timeline.end.tolist(), strict=True))


def copy_spans(schedule: Schedule) -> list[tuple[float, float]]:
    return list(zip(schedule.timeline.copy_start.tolist(), schedule.timeline.copy_end.tolist(), strict=True))


def test_no_op() -> None:
    """Nothing runs, nothing is taken; a resident tensor of 7 bytes that nobody reads is on the first device."""
    schedule = by_hand([], [7], [], gpus(2))
    assert schedule.step_seconds == 0
    assert schedule.peak_bytes.tolist() == [7, 0]


def test_one_op() -> None:
    """3 s from 0 to 3; its output has 5 bytes."""
    schedule = by_hand([takes(3, 0, [], [0])], [5], [0], gpus(1))
    assert spans(schedule) == [(0, 3)]
    assert schedule.step_seconds == 3
    assert schedule.peak_bytes.tolist() == [5]


def test_two_ops_on_one_device_run_one_after_the_other() -> None:
    """3 s and 2 s that have nothing to do with each other: 0 to 3, 3 to 5. On two devices: 0 to 3, 0 to 2."""
    rows = [takes(3, 0), takes(2, 1)]
    assert spans(by_hand(rows, [], [0, 0], gpus(2))) == [(0, 3), (3, 5)]
    assert spans(by_hand(rows, [], [0, 1], gpus(2))) == [(0, 3), (0, 2)]


def test_a_copy() -> None:
    """a makes 4 bytes in 2 s; the copy takes 1 + 4 s, 2 to 7; b 7 to 8. Both devices hold the 4 bytes, b's 3 too."""
    schedule = by_hand([takes(2, 0, [], [0]), takes(1, 1, [0], [1])], [4, 3], [0, 1], gpus(2))
    assert spans(schedule) == [(0, 2), (7, 8)]
    assert copy_spans(schedule) == [(2, 7)]
    assert schedule.peak_bytes.tolist() == [4, 7]


def test_a_copy_is_shared_by_its_readers() -> None:
    """As above, and a second reader: it needs no copy of its own and runs 8 to 9; the copy was launched for the first."""
    schedule = by_hand([takes(2, 0, [], [0]), takes(1, 1, [0]), takes(1, 1, [0])], [4], [0, 1], gpus(2))
    assert spans(schedule) == [(0, 2), (7, 8), (8, 9)]
    assert [copy["for"] for copy in copies_of(schedule)] == [1]


def test_a_busy_channel() -> None:
    """a makes 4 and 2 bytes in 2 s. The copies take 5 s and 3 s, one after the other: 2 to 7, 7 to 10."""
    schedule = by_hand([takes(2, 0, [], [0, 1]), takes(1, 1, [0]), takes(1, 1, [1])], [4, 2], [0, 1], gpus(2))
    assert copy_spans(schedule) == [(2, 7), (7, 10)]
    assert spans(schedule)[1:] == [(7, 8), (10, 11)]


@pytest.mark.parametrize(("channel", "second"), [(None, (2, 7)), ("bus", (7, 12))])
def test_two_pairs_on_one_channel(channel: str | None, second: tuple[float, float]) -> None:
    """Devices 0 and 2 make 4 bytes each in 2 s for device 1: both copies run 2 to 7; on one channel the second 7 to 12."""
    rows = [takes(2, 0, [], [0]), takes(2, 2, [], [1]), takes(1, 1, [0]), takes(1, 1, [1])]
    schedule = by_hand(rows, [4, 4], [0, 1, 2], gpus(3, channel=channel))
    assert copy_spans(schedule) == [(2, 7), second]
    assert schedule.step_seconds == (9 if channel is None else 13)


def test_dispatch() -> None:
    """A launch costs the host 1 s. Ops of 0.5 s are launched at 1 and 2; the copy of 4 bytes at 3 (it ends at 8), b at 4."""
    rows = [takes(0.5, 0, [], [0]), takes(0.5, 0), takes(0.5, 1, [0])]
    schedule = by_hand(rows, [4], [0, 1], gpus(2, dispatch=1))
    assert spans(schedule) == [(1, 1.5), (2, 2.5), (8, 8.5)]
    assert copy_spans(schedule) == [(3, 8)]


def test_after() -> None:
    """b reads nothing from a, but must come after it: it starts when a ends, at 3, on another device too."""
    assert spans(by_hand([takes(3, 0), takes(1, 1, after=[0])], [], [0, 1], gpus(2))) == [(0, 3), (3, 4)]


def test_a_resident_tensor_read_elsewhere() -> None:
    """w has 4 bytes and its home on device 0; its reader on device 1 waits for the copy, 0 to 5, and runs 5 to 6."""
    step = Step.of(graph_data([tensor("w", 4, "parameter", home=0)], [takes(1, 1, [0])]), gpus(2))
    assert_equal(step, ints(0, 1))
    schedule = Simulator(step.problem).schedule(ints(0, 1))
    assert spans(schedule) == [(5, 6)]
    assert schedule.peak_bytes.tolist() == [4, 4]
    assert spans(Simulator(step.problem).schedule(ints(1, 1))) == [(0, 1)]


def test_an_update_in_place() -> None:
    """w of 4 bytes is written in place: the new value takes no memory. Its reader elsewhere gets a copy of each value."""
    tensors = [tensor("w", 4, "parameter", home=0), tensor("w'", 4, "parameter", alias_of=0)]
    rows = [takes(1, 1, [0]), takes(1, 0, [0], [1], after=[0]), takes(1, 1, [1])]
    step = Step.of(graph_data(tensors, rows), gpus(2))
    assert_equal(step, ints(0, 1))
    schedule = Simulator(step.problem, "program").schedule(ints(0, 1))
    assert spans(schedule) == [(5, 6), (6, 7), (12, 13)]
    assert schedule.peak_bytes.tolist() == [4, 4]  # the first copy is given back when its reader was launched


def test_a_view_keeps_the_memory_of_what_it_shows() -> None:
    """a makes 4 bytes, b a view of them; c, which makes 1, reads the view, so the 4 bytes are kept until then: 5 at most."""
    tensors = [tensor("t", 4), tensor("view", 4, alias_of=0), tensor("u", 1), tensor("v", 2)]
    rows = [takes(1, 0, [], [0]), takes(0, 0, [0], [1]), takes(1, 0, [1], [2]), takes(1, 0, [2], [3])]
    step = Step.of(graph_data(tensors, rows), gpus(1))
    assert_equal(step, ints(0))
    schedule = Simulator(step.problem).schedule(ints(0))
    assert schedule.memory[:, 0].tolist() == [4, 4, 5, 3]
    assert schedule.peak_bytes.tolist() == [5]


def test_memory_is_given_back_after_the_last_use() -> None:
    """A chain of three that make 4 bytes each: two at once at most. A copy is kept from its launch to its last reader."""
    rows = [takes(1, 0, [], [0]), takes(1, 0, [0], [1]), takes(1, 0, [1], [2])]
    schedule = by_hand(rows, [4, 4, 4], [0], gpus(1))
    assert schedule.memory[:, 0].tolist() == [4, 8, 8]
    rows = [takes(1, 0, [], [0]), takes(1, 1, [0], []), takes(1, 1, [], [1]), takes(1, 1, [0], [])]
    schedule = by_hand(rows, [4, 3], [0, 1], gpus(2))
    assert schedule.memory.tolist() == [[4, 0], [4, 4], [0, 7], [0, 4]]  # the source until the copy is launched


def test_an_output_is_kept() -> None:
    """The same chain; the first tensor is an output of the step: 4 + 4 + 4 at the end."""
    rows = [takes(1, 0, [], [0]), takes(1, 0, [0], [1]), takes(1, 0, [1], [2])]
    schedule = by_hand(rows, [4, 4, 4], [0], gpus(1), outputs=(0,))
    assert schedule.memory[:, 0].tolist() == [4, 8, 12]


def test_a_priority_order_beats_the_program_order() -> None:
    """a (4 s) comes before b (1 s) on device 0; c (5 s) on device 1 reads b's 1 byte, 2 s away.

    Program: a 0 to 4, b 4 to 5, copy 5 to 7, c 7 to 12. b's remaining path is 1 + 2 + 5 = 8, a's is 4. Priority: b 0 to 1,
    a 1 to 5, copy 1 to 3, c 3 to 8.
    """
    rows = [takes(4, 0), takes(1, 1, [], [0]), takes(5, 2, [0])]
    step = Step.of(graph_data([tensor("t", 1)], rows), gpus(2))
    schedules = [Simulator(step.problem, order).schedule(ints(0, 0, 1)) for order in ("program", "priority")]
    assert [schedule.step_seconds for schedule in schedules] == [12, 8]
    assert schedules[1].order.tolist() == [1, 0, 2]
    assert spans(schedules[1]) == [(1, 5), (0, 1), (3, 8)]


def test_the_tiny_step() -> None:
    """relu 0 to 1 ms on gpu:0; h (2000 B, 3 ms) arrives at 4; mm 4 to 8; y's copy 8 to 11; backward 11 to 14; g's copy
    (5 ms) to 19; the update 19 to 21.
    """
    step = Step.of(tiny_data(), tiny_cluster_data())
    assert_equal(step, ints(0, 1, 0))
    schedule = Simulator(step.problem).schedule(ints(0, 1, 0))
    assert schedule.step_seconds == pytest.approx(0.021)
    assert schedule.peak_bytes.tolist() == [1000 + 2000 + 2000 + 4000, 4000 + 4000 + 2000]


# --- batches, threads, orders ---


@given(steps(), st.sampled_from(ORDERS))
@settings(max_examples=60)
def test_neither_threads_nor_other_rows_change_a_result(drawn: tuple[Step, np.random.Generator], order: str) -> None:
    step, rng = drawn
    placements = random_placements(step.problem, rng, 9)
    alone = Simulator(step.problem, order, threads=1)
    one_by_one = [alone.simulate(row[None], keep_orders=True) for row in placements]
    for threads in (1, 2, 4):
        simulator = Simulator(step.problem, order, threads=threads)
        for _ in range(2):  # the second time with used workspaces
            seconds, peaks, orders = simulator.simulate(placements, keep_orders=True)
            assert orders is not None
            for row, expected in enumerate(one_by_one):
                assert expected.orders is not None
                assert seconds[row] == expected.step_seconds[0]
                assert peaks[row].tolist() == expected.peak_bytes[0].tolist()
                assert orders[row].tolist() == expected.orders[0].tolist()


@given(steps())
@settings(max_examples=60)
def test_a_given_order_counts_whatever_the_simulators_own(drawn: tuple[Step, np.random.Generator]) -> None:
    step, rng = drawn
    placements = random_placements(step.problem, rng, 5)
    orders = np.stack([random_order(step.problem, rng) for _ in range(5)])
    for name, threads in itertools.product(ORDERS, (1, 3)):
        simulator = Simulator(step.problem, name, threads=threads)
        each = simulator.simulate(placements, orders, keep_orders=True)
        assert each.step_seconds.tolist() == [
            step.reference(placement, order)["step_seconds"] for placement, order in zip(placements, orders, strict=True)
        ]
        assert np.array_equal(each.orders, orders)  # type: ignore[arg-type]  # None would not be equal
        shared = simulator.simulate(placements, orders[:1], keep_orders=True)
        repeated = simulator.simulate(placements, np.repeat(orders[:1], 5, axis=0))
        assert shared.step_seconds.tolist() == repeated.step_seconds.tolist()
        assert shared.peak_bytes.tolist() == repeated.peak_bytes.tolist()
        assert np.array_equal(shared.orders, np.repeat(orders[:1], 5, axis=0))  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_batch_of_nothing(order: str, threads: int) -> None:
    step, _ = random_step(5, 8, 3, 60, "colocated")
    simulator = Simulator(step.problem, order, threads=threads)
    nothing = np.zeros((0, step.problem.num_groups), np.int64)
    seconds, peaks, orders = simulator.simulate(nothing, keep_orders=True)
    assert seconds.shape == (0,)
    assert peaks.shape == (0, 3)
    assert orders is not None
    assert orders.shape == (0, 8)
    assert [column.shape for column in simulator(nothing)] == [(0,), (0,), (0,)]
    assert simulator.simulate(nothing, np.zeros((0, 8), np.int64)).step_seconds.shape == (0,)
    assert simulator.simulate(nothing, np.arange(8)[None]).step_seconds.shape == (0,)


def test_any_whole_numbers_in_any_memory_layout() -> None:
    step, rng = random_step(6, 12, 3, 60, "colocated")
    placements, order = random_placements(step.problem, rng, 4), random_order(step.problem, rng)
    simulator = Simulator(step.problem, threads=1)
    expected = simulator.simulate(placements, order[None]).step_seconds.tolist()
    fixed = placements.copy()
    fixed.flags.writeable = False
    batches: list[Any] = [placements.astype(np.int8), np.asfortranarray(placements), fixed, placements.tolist()]
    launch_orders: list[Any] = [order[None].astype(np.uint16), np.asfortranarray(np.stack([order] * 4)), [order.tolist()]]
    for batch in batches:
        for launches in launch_orders:
            assert simulator.simulate(batch, launches).step_seconds.tolist() == expected


@pytest.mark.parametrize(
    ("placements", "orders", "message"),
    [
        ([[0, 0, 2]], None, "Expected 0 <= device < 2, placement 0 has 2 for group 2."),
        ([[0, 0, 0], [0, -1, 0]], None, "placement 1 has -1 for group 1"),
        ([[0, 0]], None, "of shape [batch, 3]"),
        ([0, 0, 0], None, "of shape [batch, 3]"),
        ([[0.0, 0, 0]], None, "whole numbers"),
        ([[0, 0, 0]], [[0, 1, 2]], "name each of the 4 ops once"),
        ([[0, 0, 0]], [[0, 1, 2, 2]], "name each of the 4 ops once"),
        ([[0, 0, 0]], [0, 1, 2, 3], "name each of the 4 ops once"),
        ([[0, 0, 0]], [[1, 0, 2, 3]], "launches ops[1] 'mm' before ops[0] 'relu'"),
        ([[0, 0, 0]] * 3, [[0, 1, 2, 3]] * 2, "expected 1 order or 3, one for each placement, got 2"),
        ([[0, 0, 0]], [[0, 1, 2, 3], [0, 1, 3, 2]], "launches ops[3] 'w.update' before ops[2] 'mm.backward'"),
    ],
)
def test_what_is_no_placement_or_no_order_is_refused(placements: Any, orders: Any, message: str) -> None:
    simulator = Simulator(Step.of(tiny_data(), tiny_cluster_data()).problem)
    with pytest.raises(ProblemError) as refusal:
        simulator(np.array(placements), None if orders is None else np.array(orders))
    assert message in str(refusal.value)


def test_an_unknown_order_and_no_threads_are_refused() -> None:
    problem = Step.of(tiny_data(), tiny_cluster_data()).problem
    with pytest.raises(ProblemError, match="order must be one of priority, program, it is 'random'"):
        Simulator(problem, "random")
    with pytest.raises(ProblemError, match="threads must be at least 1, it is 0"):
        Simulator(problem, threads=0)


# --- what a result is worth ---


def test_a_placement_that_fits_costs_its_seconds() -> None:
    step = Step.of(tiny_data(), tiny_cluster_data())
    evaluation = Simulator(step.problem)(ints([0, 0, 0], [0, 1, 0]))
    assert evaluation.cost.tolist() == evaluation.step_seconds.tolist() == pytest.approx([0.010, 0.021])
    assert evaluation.overflow_bytes.tolist() == [0, 0]


def test_what_a_placement_costs_that_does_not_fit() -> None:
    """Two devices of 10 bytes. Ops of 3 s and 1 s and a copy of 9 s make 13 s; 5 bytes too many: 13 * (1 + 5 / 20) s."""
    rows = [takes(3, 0, [], [0]), takes(1, 1, [0], [1])]
    step = Step.of(graph_data([tensor("t", 8), tensor("u", 7)], rows), gpus(2, memory=10))
    simulator = Simulator(step.problem)
    assert simulator.failing_seconds == pytest.approx(13)
    evaluation = simulator(ints([0, 0], [0, 1]))  # with t, and with the copy of t
    assert evaluation.overflow_bytes.tolist() == [5, 5]
    assert evaluation.step_seconds.tolist() == [4, 13]
    assert evaluation.cost.tolist() == pytest.approx([16.25, 16.25])
    worse = simulator.evaluation(np.full(4, 2.0), ints([10, 10], [11, 10], [11, 11], [9, 30]))
    assert worse.overflow_bytes.tolist() == [0, 1, 2, 20]
    assert worse.cost.tolist() == pytest.approx([2, 13.65, 14.3, 26])


def test_bytes_that_no_number_holds_together_do_not_fit() -> None:
    """Four devices without memory, each with 2**62 bytes or a copy of them: 2**64, which is 0 in 64 bits."""
    step = Step.of(
        graph_data([tensor("t", 2**62)], [takes(1, 0, [], [0]), *(takes(1, n, [0]) for n in (1, 2, 3))]), gpus(4, 0)
    )
    evaluation = Simulator(step.problem)(ints([0, 1, 2, 3]))
    assert evaluation.overflow_bytes[0] > 2**62
    assert evaluation.cost[0] > evaluation.step_seconds[0]


def test_what_fits_is_better_than_what_does_not_however_slow_its_copies_are() -> None:
    """Two ops of 1 s, each with a parameter of 8 bytes, on devices of 12 bytes. Together they take 2 s, but need 17 bytes or
    more. Apart they fit and take 4 s: the copy of one byte takes 2 s. Without copies, failing would cost 2 * (1 + 6 / 24) s.
    """
    parameters = [tensor(name, 8, kind="parameter", home=group) for group, name in enumerate("pq")]
    rows = [takes(1, 0, [0], [2]), takes(1, 1, [1, 2], [3])]
    step = Step.of(graph_data([*parameters, tensor("t", 1), tensor("u", 1)], rows), gpus(2, memory=12))
    evaluation = Simulator(step.problem)(ints([0, 0], [0, 1]))
    assert evaluation.step_seconds.tolist() == [2, 4]
    assert evaluation.overflow_bytes.tolist() == [6, 0]
    assert evaluation.cost.tolist() == pytest.approx([4 * (1 + 6 / 24), 4])


@given(steps(memory=20), st.sampled_from(ORDERS))
@settings(max_examples=100)
def test_costs(drawn: tuple[Step, np.random.Generator], order: str) -> None:
    """One that does not fit costs more than any that fits, and the more it overflows, the more."""
    step, rng = drawn
    placements = random_placements(step.problem, rng, 6)
    simulator = Simulator(step.problem, "program", threads=1)
    evaluation = simulator(placements)
    for row, placement in enumerate(placements):
        expected = step.reference(placement)
        memory = [reference.size(device["memory"]) for device in step.cluster["devices"]]
        overflow = sum(max(0, peak - size) for peak, size in zip(expected["peak_bytes"].values(), memory, strict=True))
        assert evaluation.overflow_bytes[row] == overflow
        assert evaluation.step_seconds[row] == expected["step_seconds"]
        if expected["fits"]:
            assert evaluation.cost[row] == expected["step_seconds"]
    launches = np.stack([random_order(step.problem, rng) for _ in placements])
    for found in (evaluation, simulator(placements, launches), Simulator(step.problem, order, threads=1)(placements)):
        fits = found.overflow_bytes == 0
        assert (found.step_seconds <= longest_step_seconds(step.problem) * (1 + 1e-12)).all()
        assert (found.step_seconds < simulator.failing_seconds).all()  # so no step that fits costs as much
        assert (found.cost[~fits] > simulator.failing_seconds).all()
    by_overflow = np.argsort(evaluation.overflow_bytes, kind="stable")
    failing = by_overflow[evaluation.overflow_bytes[by_overflow] > 0]
    assert (np.diff(evaluation.cost[failing]) >= 0).all()


# --- the kernels ---


def arrival_and_departure(time: float, nbytes: int, latency: float, bandwidth: float) -> tuple[float, float]:
    return arrival_time(time, nbytes, latency, bandwidth), departure_time(time, nbytes, latency, bandwidth)


COMPILED: Any = njit(arrival_and_departure)


@given(st.floats(0, 1e3), st.integers(0, 2**40), st.floats(0, 10), st.floats(1e-3, 1e12))
def test_copies_are_as_fast_in_compiled_code_as_in_numpy(time: float, nbytes: int, latency: float, bandwidth: float) -> None:
    assert COMPILED(0.0, nbytes, latency, bandwidth)[0] == copy_seconds(nbytes, latency, bandwidth)
    arrival, departure = COMPILED(time, nbytes, latency, bandwidth)
    assert arrival == time + latency + nbytes / bandwidth
    assert departure == time - latency - nbytes / bandwidth


def test_the_kernels_release_the_gil_and_are_cached() -> None:
    found: dict[str, Any] = {
        name: value
        for module in (kernels, priority, timeline)
        for name, value in vars(module).items()
        if isinstance(value, Dispatcher)
    }
    assert {"simulate_from", "peak_bytes", "priority_order", "record_timeline"} <= set(found)
    for name, dispatcher in found.items():
        assert dispatcher.targetoptions["nogil"], name
        assert not dispatcher.targetoptions.get("fastmath", False), name
        assert isinstance(dispatcher._cache, FunctionCache), name
