"""The timeline explains itself: what each op waited for, the critical path, and the sums, each against plain Python."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from builders import graph_data, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Step, gpus, random_order, random_placements, steps, takes

from placewise.core.arrays import Ints
from placewise.simulate import reference
from placewise.simulate.schedule import Leg, Schedule
from placewise.simulate.simulator import Simulator
from placewise.simulate.timeline import WAITS

Wait = tuple[str, int]


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def random_schedule(drawn: tuple[Step, np.random.Generator]) -> tuple[Step, Schedule]:
    """A step's schedule for a random placement, in a random order or in the simulator's own."""
    step, rng = drawn
    placement = random_placements(step.problem, rng, 1)[0]
    order = random_order(step.problem, rng) if rng.random() < 0.5 else None
    return step, Simulator(step.problem, threads=1).schedule(placement, order)


# --- what ops and copies wait for ---


@dataclass
class Reasons:
    """What each op and each copy waited for: the first of the candidates that ended when it began."""

    ops: dict[int, Wait]
    copies: list[Wait]


def reasons(step: Step, schedule: Schedule) -> Reasons:
    """Walks through the reference's result once more, in plain Python."""
    order = schedule.order.tolist()
    result = step.reference(schedule.placement, schedule.order)
    ops, names = step.graph["ops"], step.problem.expand(schedule.placement)
    producer = {t: n for n, row in enumerate(ops) for t in row["writes"]}
    channels_of = {pair: channels for pair, (_, _, channels) in reference.links(step.cluster).items()}
    host_of = {device["name"]: device.get("host", "") for device in step.cluster["devices"]}
    host, dispatch = dict.fromkeys(host_of.values(), 0.0), step.cluster.get("dispatch_seconds", 0.0)
    found = Reasons({}, [])
    last_op: dict[str, int] = {}
    last_copy: dict[str, int] = {}
    copy_to: dict[tuple[int, str], int] = {}

    def first_of(candidates: list[tuple[float, str, int]], begin: float) -> Wait:
        assert max([time for time, _, _ in candidates], default=0.0) <= begin
        return next(((why, what) for time, why, what in candidates if time == begin and time > 0), ("nothing", -1))

    for n in order:
        here = names[ops[n]["group"]]
        while len(copy_to) < len(result["copies"]) and result["copies"][len(copy_to)]["for"] == n:
            number = len(copy_to)
            copy = result["copies"][number]
            launching = {host_of[copy["from"]], host_of[copy["to"]]}
            for name in launching:
                host[name] += dispatch
            candidates = [(max(host[name] for name in launching), "host", -1)]
            if (maker := producer.get(copy["tensor"])) is not None:
                candidates.insert(0, (result["end"][maker], "maker", maker))
            for channel in channels_of[copy["from"], copy["to"]]:
                if channel in last_copy:
                    candidates.append((result["copies"][last_copy[channel]]["end"], "channel", last_copy[channel]))
            found.copies.append(first_of(candidates, copy["start"]))
            copy_to[copy["tensor"], copy["to"]] = number
            last_copy |= dict.fromkeys(channels_of[copy["from"], copy["to"]], number)
        host[host_of[here]] += dispatch
        candidates = [(result["end"][last_op[here]], "device", last_op[here])] if here in last_op else []
        arriving = [copy_to[t, here] for t in ops[n]["reads"] if (t, here) in copy_to]
        candidates += [(result["copies"][number]["end"], "copy", number) for number in arriving]
        candidates += [(result["end"][m], "after", m) for m in ops[n].get("after", [])]
        candidates.append((host[host_of[here]], "host", -1))
        found.ops[n] = first_of(candidates, result["start"][n])
        last_op[here] = n
    return found


@settings(max_examples=300)
@given(steps())
def test_what_everything_waited_for(drawn: tuple[Step, np.random.Generator]) -> None:
    step, schedule = random_schedule(drawn)
    expected, t = reasons(step, schedule), schedule.timeline
    assert {n: schedule.wait(n) for n in range(step.problem.num_ops)} == expected.ops
    assert list(zip([WAITS[why] for why in t.copy_wait], t.copy_wait_for.tolist(), strict=True)) == expected.copies


def test_waits_by_hand() -> None:
    """Two GPUs, launches of 1 s each; a (5 s) makes 1 and 2 bytes on gpu:0, and c, d on gpu:1 read one each.

    a is launched at 1: it waits for the host, 1 to 6. b is launched at 2, waits for its device and does nothing. The
    copy for c is launched at 3, waits for its maker, 6 to 8; c 8 to 9. The copy for d waits for the channel, 8 to 11; d
    waits for the copy, 11 to 12. e on gpu:2 must come after d: 12 to 13.
    """
    rows = [takes(5, 0, [], [0, 1]), takes(0, 0), takes(1, 1, [0]), takes(1, 1, [1]), takes(1, 2, after=[3])]
    step = Step.of(graph_data([tensor("t", 1), tensor("u", 2)], rows), gpus(3, dispatch=1))
    schedule = Simulator(step.problem, "program").schedule(ints(0, 1, 2))
    waits = [schedule.wait(n) for n in range(5)]
    assert waits == [("host", -1), ("device", 0), ("copy", 0), ("copy", 1), ("after", 3)]
    assert [WAITS[why] for why in schedule.timeline.copy_wait] == ["maker", "channel"]
    assert schedule.timeline.copy_wait_for.tolist() == [0, 0]
    assert schedule.critical_path == (
        Leg("host", -1, 0, 1),
        Leg("op", 0, 1, 6),
        Leg("copy", 0, 6, 8),
        Leg("copy", 1, 8, 11),
        Leg("op", 3, 11, 12),
        Leg("op", 4, 12, 13),
    )
    assert schedule.waiting_seconds.tolist() == [1, 0, 8, 2, 12]
    assert schedule.busy_seconds.tolist() == [5, 2, 1]
    assert schedule.idle_seconds.tolist() == [8, 11, 12]
    assert schedule.copy_seconds.tolist() == [[0, 5, 0], [0, 0, 0], [0, 0, 0]]
    assert schedule.devices.tolist() == [0, 0, 1, 1, 2]
    assert schedule.copy_tensors.tolist() == [0, 1]


def test_of_things_that_end_at_one_moment_the_device_counts_first() -> None:
    """gpu:1 is free at 4 (x), t arrives at 1 + 1 + 2 = 4 and y, which it must come after, ends at 4: the device."""
    rows = [takes(1, 0, [], [0]), takes(4, 1), takes(4, 2), takes(1, 1, [0], after=[2])]
    step = Step.of(graph_data([tensor("t", 2)], rows), gpus(3))
    schedule = Simulator(step.problem, "program").schedule(ints(0, 1, 2))
    assert schedule.wait(3) == ("device", 1)
    assert schedule.wait(0) == ("nothing", -1)
    rows[1]["seconds"] = {"gpu": 3}
    schedule = Simulator(Step.of(step.graph, step.cluster).problem, "program").schedule(ints(0, 1, 2))
    assert schedule.wait(3) == ("copy", 0)


def test_a_copy_that_is_launched_when_its_tensor_is_made_waits_for_the_maker() -> None:
    """Launches of 1 s: a is launched at 1 and ends at 2, the copy is launched at 2."""
    step = Step.of(graph_data([tensor("t", 1)], [takes(1, 0, [], [0]), takes(1, 1, [0])]), gpus(2, dispatch=1))
    schedule = Simulator(step.problem).schedule(ints(0, 1))
    assert schedule.timeline.copy_start.tolist() == [2]
    assert (WAITS[schedule.timeline.copy_wait[0]], schedule.timeline.copy_wait_for[0]) == ("maker", 0)


# --- the critical path ---


@settings(max_examples=300)
@given(steps())
def test_the_critical_path_is_one_chain_from_the_start_to_the_end(drawn: tuple[Step, np.random.Generator]) -> None:
    step, schedule = random_schedule(drawn)
    path, t = schedule.critical_path, schedule.timeline
    if not step.problem.num_ops:
        assert path == ()
        return
    assert path[0].start == 0
    assert path[-1].end == schedule.step_seconds
    assert path[-1].kind == "op"
    for before, link in pairwise(path):
        assert before.end == link.start
    for i, link in enumerate(path):
        if link.kind == "op":
            assert (link.start, link.end) == (t.start[link.number], t.end[link.number])
        elif link.kind == "copy":
            assert (link.start, link.end) == (t.copy_start[link.number], t.copy_end[link.number])
        else:
            assert (i, link.number) == (0, -1)
    ran = [(link.kind, link.number) for link in path]
    assert len(set(ran)) == len(ran)


def test_no_op_has_no_critical_path() -> None:
    schedule = Simulator(Step.of(graph_data([], []), gpus(1)).problem).schedule(ints())
    assert schedule.critical_path == ()
    assert schedule.step_seconds == 0
    assert schedule.idle_seconds.tolist() == [0]


# --- sums ---


@settings(max_examples=200)
@given(steps())
def test_sums_against_plain_python(drawn: tuple[Step, np.random.Generator]) -> None:
    step, schedule = random_schedule(drawn)
    result = step.reference(schedule.placement, schedule.order)
    names = step.problem.expand(schedule.placement)
    devices = [device["name"] for device in step.cluster["devices"]]
    free = dict.fromkeys(devices, 0.0)
    busy: dict[str, list[float]] = {name: [] for name in devices}
    waiting = [0.0] * step.problem.num_ops
    for n in schedule.order.tolist():
        row = step.graph["ops"][n]
        here = names[row["group"]]
        waiting[n] = result["start"][n] - free[here]
        free[here] = result["end"][n]
        busy[here].append(reference.seconds_on(row, step.cluster["devices"][devices.index(here)]))
    moving = dict.fromkeys(reference.links(step.cluster), 0.0)
    for copy in result["copies"]:
        moving[copy["from"], copy["to"]] += copy["end"] - copy["start"]
    assert schedule.waiting_seconds.tolist() == waiting
    assert min(waiting, default=0.0) >= 0
    assert schedule.busy_seconds.tolist() == pytest.approx([sum(busy[name]) for name in devices])
    assert schedule.idle_seconds.tolist() == pytest.approx([result["step_seconds"] - sum(busy[name]) for name in devices])
    assert schedule.copy_seconds.tolist() == pytest.approx(
        np.array([[moving.get((a, b), 0.0) for b in devices] for a in devices])
    )


# --- memory ---


@settings(max_examples=300)
@given(steps())
def test_the_peak_is_the_highest_of_the_start_and_all_launches(drawn: tuple[Step, np.random.Generator]) -> None:
    step, schedule = random_schedule(drawn)
    highest = np.vstack([resident_bytes(step, schedule.placement), schedule.memory]).max(axis=0)
    assert schedule.peak_bytes.tolist() == highest.tolist() == step.peaks(schedule.placement, schedule.order)
    assert schedule.memory.shape == (step.problem.num_ops, step.problem.num_devices)


@settings(max_examples=200)
@given(steps())
def test_memory_over_the_launches_against_plain_python(drawn: tuple[Step, np.random.Generator]) -> None:
    """Each storage and each copy is counted from its first to its last use, launch by launch."""
    step, schedule = random_schedule(drawn)
    order, ops, tensors = schedule.order.tolist(), step.graph["ops"], step.graph["tensors"]
    names = step.problem.expand(schedule.placement)
    device_of = [step.problem.cluster.device_names.index(names[row["group"]]) for row in ops]
    position = {n: p for p, n in enumerate(order)}
    storage, producer = step.problem.graph.storage.tolist(), step.problem.graph.producer.tolist()
    expected = np.zeros((len(ops), step.problem.num_devices), np.int64) + resident_bytes(step, schedule.placement)
    kept = {storage[t] for t in step.graph["outputs"]}
    copied: dict[tuple[int, int], list[int]] = {}  # (tensor, device) -> positions of its readers there
    makes_memory = [t for t in range(len(tensors)) if producer[t] >= 0 and storage[t] == t]
    uses = {t: [position[producer[t]]] for t in makes_memory}
    for p, n in enumerate(order):
        for t in ops[n]["reads"]:
            source = home_of(step, schedule.placement, t)
            if source != device_of[n]:
                readers = copied.setdefault((t, device_of[n]), [])
                readers.append(p)
                if readers[0] != p:
                    continue
            if storage[t] in uses:
                uses[storage[t]].append(p)
        for t in ops[n]["writes"]:
            if storage[t] in uses:
                uses[storage[t]].append(p)
    for t, positions in uses.items():
        last = len(ops) - 1 if t in kept else max(positions)
        expected[position[producer[t]] : last + 1, device_of[producer[t]]] += tensors[t]["nbytes"]
    for (t, device), positions in copied.items():
        expected[min(positions) : max(positions) + 1, device] += tensors[t]["nbytes"]
    assert schedule.memory.tolist() == expected.tolist()


def home_of(step: Step, placement: Ints, t: int) -> int:
    """The device that a tensor is on first."""
    graph, merged = step.problem.graph, step.problem.merged
    maker = graph.producer[t]
    if maker < 0 and graph.tensors.home[t] >= 0:
        return int(placement[merged[graph.tensors.home[t]]])
    maker = maker if maker >= 0 else graph.first_reader[t]
    return int(placement[step.problem.op_groups[maker]]) if maker >= 0 else 0


def resident_bytes(step: Step, placement: Ints) -> Ints:
    """The bytes that each device holds before the first launch: [devices]."""
    nbytes = np.zeros(step.problem.num_devices, np.int64)
    for t, row in enumerate(step.graph["tensors"]):
        if step.problem.graph.producer[t] < 0 and "alias_of" not in row:
            nbytes[home_of(step, placement, t)] += row["nbytes"]
    return nbytes


@given(steps(), st.booleans())
@settings(max_examples=100)
def test_a_schedule_is_what_was_measured(drawn: tuple[Step, np.random.Generator], by_priority: bool) -> None:
    step, rng = drawn
    placements = random_placements(step.problem, rng, 3)
    simulator = Simulator(step.problem, "priority" if by_priority else "program", threads=1)
    measured = simulator.simulate(placements, keep_orders=True)
    assert measured.orders is not None
    for row, placement in enumerate(placements):
        schedule = simulator.schedule(placement)
        assert schedule.step_seconds == measured.step_seconds[row]
        assert schedule.peak_bytes.tolist() == measured.peak_bytes[row].tolist()
        assert schedule.order.tolist() == measured.orders[row].tolist() == simulator.order_of(placement).tolist()
        assert schedule.fits == bool((schedule.peak_bytes <= step.problem.cluster.memory_bytes).all())
