"""The schedule of one placement: its timeline, and why the step takes as long as it does."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.problem import Present, Problem
from placewise.simulate.timeline import AFTER, CHANNEL, COPY, DEVICE, HOST, MAKER, WAITS, Timeline


class Leg(NamedTuple):
    """A leg of the critical path: an op, a copy, or the host that launches what comes before the next leg."""

    kind: Literal["op", "copy", "host"]
    number: int  # the op, the copy, or -1
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Schedule:
    """How a placement of a problem runs when its ops are launched in an order."""

    problem: Problem
    placement: Ints  # [groups]
    order: Ints  # [ops]
    timeline: Timeline
    copied_tensors: Ints  # [copied tensors], the graph's tensor for each number in the timeline
    memory: Ints  # [ops, devices], bytes in use at each launch
    peak_bytes: Ints  # [devices]
    present: Present | None = None  # if the placement is of a problem with options: what of it is left, `problem`

    @property
    def step_seconds(self) -> float:
        """How long the step takes."""
        return float(self.timeline.device_end.max())

    @property
    def whole(self) -> tuple[Problem, Ints, Ints]:
        """The problem with all its options, its placement [groups] and its launch order [ops]."""
        if self.present is None:
            return self.problem, self.placement, self.order
        present = self.present
        return present.whole, present.restore_placement(self.placement), present.restore_order(self.order)

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory."""
        return bool((self.peak_bytes <= self.problem.cluster.memory_bytes).all())

    @cached_property
    def devices(self) -> Ints:
        """Each op's device: [ops]."""
        return self.placement[self.problem.op_groups]

    @property
    def copy_tensors(self) -> Ints:
        """Each copy's tensor: [copies]."""
        return self.copied_tensors[self.timeline.copy_tensor]

    @cached_property
    def waiting_seconds(self) -> Floats:
        """How long each op's device was idle before it: [ops]."""
        waiting = np.array(self.timeline.start)
        for device in range(self.problem.num_devices):
            ops = self.order[self.devices[self.order] == device]
            waiting[ops[1:]] -= self.timeline.end[ops[:-1]]
        return waiting

    @cached_property
    def busy_seconds(self) -> Floats:
        """How long each device runs ops: [devices]."""
        seconds = self.problem.op_seconds[np.arange(self.problem.num_ops), self.devices]
        return np.bincount(self.devices, weights=seconds, minlength=self.problem.num_devices).astype(np.float64)

    @property
    def idle_seconds(self) -> Floats:
        """How long each device is idle during the step: [devices]."""
        return self.step_seconds - self.busy_seconds

    @cached_property
    def copy_seconds(self) -> Floats:
        """The total time of all copies from one device to another: [devices, devices]."""
        t = self.timeline
        total = np.zeros((self.problem.num_devices, self.problem.num_devices))
        np.add.at(total, (t.copy_source, t.copy_target), t.copy_end - t.copy_start)
        return total

    def wait(self, op: int) -> tuple[str, int]:
        """Returns what an op waited for last: a word of WAITS, and the number of that op or copy, or -1."""
        return WAITS[self.timeline.wait[op]], int(self.timeline.wait_for[op])

    @cached_property
    def critical_path(self) -> tuple[Leg, ...]:
        """The chain of ops, copies and launches that makes the step as long as it is, in order of time."""
        t = self.timeline
        if not len(t.end):
            return ()
        legs = [self._op(int(t.end.argmax()))]
        while True:
            leg = legs[-1]
            waits, waits_for = (t.wait, t.wait_for) if leg.kind == "op" else (t.copy_wait, t.copy_wait_for)
            why, what = int(waits[leg.number]), int(waits_for[leg.number])
            if why in (DEVICE, AFTER, MAKER):
                legs.append(self._op(what))
            elif why == COPY:
                legs.append(self._copy(what))
            elif why == CHANNEL:  # which the copy before it had left, but it may still have been on its way
                legs.append(self._copy(what)._replace(end=leg.start))
            else:
                if why == HOST:
                    legs.append(Leg("host", -1, 0.0 if what < 0 else float(t.end[what]), leg.start))
                    if what >= 0:  # the host waited for this op
                        legs.append(self._op(what))
                        continue
                return tuple(reversed(legs))

    def _op(self, n: int) -> Leg:
        return Leg("op", n, float(self.timeline.start[n]), float(self.timeline.end[n]))

    def _copy(self, c: int) -> Leg:
        return Leg("copy", c, float(self.timeline.copy_start[c]), float(self.timeline.copy_end[c]))
