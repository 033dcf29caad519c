"""The justified order is that of a list schedule whose priorities come from a list schedule in reverse."""

import numpy as np
import pytest
from builders import graph_data, tensor
from hypothesis import given, settings
from list_schedule import ListSchedule
from simulated import Step, gpus, random_placements, random_step, steps, takes

from placewise.core.arrays import Ints
from placewise.simulate.justified import Justifier
from placewise.simulate.simulator import Simulator


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def reverse_starts(schedule: ListSchedule, ends: list[float]) -> list[float]:
    """How long before the end of the reversed step each op begins, in plain Python: looks at everything at every moment."""
    num_ops, num_devices = len(ends), schedule.problem.num_devices
    now, begins = 0.0, [0.0] * num_ops
    waiting = list(range(num_ops))
    running: dict[int, tuple[int, float]] = {}  # device -> op, when its place ends
    placed: set[int] = set()
    sent_at: dict[tuple[int, int], float] = {}  # (tensor, device) -> when the copy's place ends
    busy: dict[int, float] = {}
    readers = [
        [[n for n in range(num_ops) if schedule.device_of[n] == d and t in schedule.reads[n]] for d in range(num_devices)]
        for t in range(len(schedule.nbytes))
    ]

    def send(op: int) -> None:
        for t in sorted(schedule.reads[op]):
            here, there = schedule.device_of[op], schedule.home[t]
            if schedule.producer[t] >= 0 and here != there and placed >= set(readers[t][here]):
                needed = [channels[there][here] for channels in schedule.channels]
                begin = max(
                    now + float(schedule.problem.cluster.delay_seconds[there][here]),
                    *(busy.get(channel, 0.0) for channel in needed),
                )
                end = begin + schedule.latency[there][here] + schedule.nbytes[t] / schedule.bandwidth[there][here]
                sent_at[t, here] = end
                busy.update(dict.fromkeys(needed, end))

    def can_begin(n: int) -> bool:
        for t in schedule.writes[n]:
            for device, ops in enumerate(readers[t]):
                if not placed >= set(ops):
                    return False
                if ops and device != schedule.home[t] and sent_at[t, device] > now:
                    return False
        return all(m in placed for m in range(num_ops) if n in schedule.after[m])

    while waiting:
        for device in sorted(running):
            n, end = running[device]
            if end <= now:
                del running[device]
                placed.add(n)
                send(n)
        for device in range(num_devices):
            ready = [n for n in waiting if schedule.device_of[n] == device and can_begin(n)]
            if device not in running and ready:
                n = min(ready, key=lambda n: (-ends[n], n))
                waiting.remove(n)
                begins[n] = now + schedule.seconds[n]
                running[device] = (n, begins[n])
        now = min([end for _, end in running.values()] + [at for at in sent_at.values() if at > now], default=now)
    return begins


def in_both_orders(step: Step, placement: Ints) -> tuple[list[int], list[int]]:
    """The priority order, and the order that the reversed schedule's starts give."""
    schedule = ListSchedule(step.problem, placement)
    first = schedule.order()
    timeline = Simulator(step.problem).schedule(placement, ints(*first)).timeline
    schedule.path = reverse_starts(schedule, timeline.end.tolist())
    return first, schedule.order()


def check(step: Step, placement: Ints) -> None:
    """The justifier judges a placement as the better of both orders is, by the definition of a step."""
    justifier = Justifier(Simulator(step.problem, threads=1))
    for _ in range(2):  # a used workspace is as good as a new one
        seconds, overflow = justifier.judge(placement)
    first, second = in_both_orders(step, placement)
    by_first, by_second = step.reference(placement, ints(*first)), step.reference(placement, ints(*second))
    expected, order = (by_second, second) if by_second["step_seconds"] < by_first["step_seconds"] else (by_first, first)
    assert justifier.order.tolist() == order
    assert seconds == expected["step_seconds"]
    assert (overflow == 0) == expected["fits"]


@settings(max_examples=150, deadline=None)
@given(steps(memory=25))
def test_the_order_is_that_of_two_list_schedules(drawn: tuple[Step, np.random.Generator]) -> None:
    step, rng = drawn
    check(step, random_placements(step.problem, rng, 1)[0])


@pytest.mark.parametrize("seed", range(4))
def test_larger_steps(seed: int) -> None:
    step, rng = random_step(seed, 60, 2 + seed % 3, 60, "colocated")
    check(step, random_placements(step.problem, rng, 1)[0])


def test_work_behind_a_short_chain_by_hand() -> None:
    """A copy takes 1 s. On gpu:0 a chain x (3 s), y (3 s), and a (1 s), whose byte 4 ops of 2 s on gpu:1 read.

    Longest remaining paths: x 6, a 1 + 1 + 2 = 4, y 3, so gpu:0 runs x, a, y. a's byte is on gpu:1 at 5, and its readers
    end at 13. In reverse gpu:1 is busy until 8, a's copy until 9, and a begins 10 before the end; x begins 3 + 3 = 6 before
    it. So a goes first, and its readers run from 2 to 10: 10 s in place of 13.
    """
    rows = [takes(3, 0, [], [0]), takes(3, 0, [0]), takes(1, 0, [], [1]), *(takes(2, 1, [1]) for _ in range(4))]
    cluster = gpus(2)
    cluster["default_link"] = {"bytes_per_second": 1, "latency_seconds": 0}
    step = Step.of(graph_data([tensor("t", 1), tensor("u", 1)], rows), cluster)
    placement = ints(0, 1)
    assert [step.reference(placement, ints(*order))["step_seconds"] for order in in_both_orders(step, placement)] == [13, 10]
    assert Justifier(Simulator(step.problem)).judge(placement) == (10.0, 0)
