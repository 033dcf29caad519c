"""Placement and launch order together as a constraint program: everything that the definition says, in whole numbers.

Times are rounded down to a unit, so what the solver proves to be impossible is impossible.

The order is part of the model, for the queues follow it: a channel moves copies in the order in which their first readers
are launched, and memory is taken and given back at launches. `before[m, n]` says that op m is launched before op n.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from placewise.simulate.tables import unique_reads
from placewise.strategies.exact_facts import Facts
from placewise.strategies.exact_logic import Literal, Logic, import_solver, negated
from placewise.strategies.exact_memory import Copy, add_memory

UNITS = 2**30  # that the longest step has


@dataclass(eq=False)
class Program(Facts):
    """The constraint program of a problem."""

    longest: float
    unit: float = field(init=False)
    model: Any = field(init=False)
    logic: Logic = field(init=False)

    def __post_init__(self) -> None:
        self.model = import_solver().CpModel()
        self.logic = Logic(self.model)
        self.unit = self.longest / UNITS or 1.0
        self._add_times()
        self._add_copies()
        if self.problem.cluster.dispatch_seconds > 0.0:
            self._add_launches()
        add_memory(self)
        self.model.minimize(self.last)

    # --- what there is to decide ---

    @cached_property
    def on(self) -> list[list[Literal]]:
        """Whether each group is on each device."""
        rows = []
        for group, allowed in enumerate(self.problem.allowed.tolist()):
            row = [self.model.new_bool_var(f"on {group} {d}") if ok else 0 for d, ok in enumerate(allowed)]
            self.model.add_exactly_one([literal for literal in row if not isinstance(literal, int)])
            rows.append(row)
        return rows

    @cached_property
    def before(self) -> dict[tuple[int, int], Literal]:
        """Whether one op is launched before another; a constant where the graph says so."""
        num_ops, model = self.problem.num_ops, self.model
        known: dict[tuple[int, int], Literal] = {}
        forced = self.forced()
        for m, n in combinations(range(num_ops), 2):
            literal = 1 if (m, n) in forced else model.new_bool_var(f"before {m} {n}")
            known[m, n], known[n, m] = literal, negated(literal)
            self.logic.imply([literal], self.position[m] + 1 <= self.position[n])
            self.logic.imply([negated(literal)], self.position[n] + 1 <= self.position[m])
        return known

    @cached_property
    def position(self) -> list[Any]:
        """When each op is launched, counted in ops."""
        places = [self.model.new_int_var(0, max(self.problem.num_ops - 1, 0), f"position {n}") for n in self.ops]
        self.model.add_all_different(places)
        return places

    @cached_property
    def start(self) -> list[Any]:
        """When each op starts, in units."""
        return [self.model.new_int_var(0, UNITS, f"start {n}") for n in self.ops]

    @cached_property
    def end(self) -> list[Any]:
        """When each op ends, in units."""
        ends = []
        for n in self.ops:
            row = self.on[self.group[n]]
            ends.append(self.start[n] + sum(self._units(t) * on for t, on in zip(self.seconds[n], row, strict=True)))
        return ends

    @cached_property
    def last(self) -> Any:
        """When the last op ends, in units."""
        return self.model.new_int_var(0, UNITS, "last")

    # --- time ---

    def _add_times(self) -> None:
        """Ops of one device run one at a time in launch order, behind the ops that they need."""
        for n in self.ops:
            self.model.add(self.end[n] <= self.last)
        for m, n in sorted(self.needs):
            self.model.add(self.start[n] >= self.end[m])
        for m, n in combinations(self.ops, 2):
            for together in self.both_on(self.group[m], self.group[n]):
                if together is not None:
                    for a, b in ((m, n), (n, m)):
                        self.logic.imply([*together, self.before[a, b]], self.start[b] >= self.end[a])
        for d in range(self.problem.num_devices):  # the same again, in the form that the solver reasons about
            intervals = [
                self.model.new_optional_interval_var(
                    self.start[n],
                    self._units(self.seconds[n][d]),
                    self.start[n] + self._units(self.seconds[n][d]),
                    self.on[self.group[n]][d],
                    f"run {n} {d}",
                )
                for n in self.ops
                if self.problem.allowed[self.group[n], d]
            ]
            self.model.add_no_overlap(intervals)

    def both_on(self, g: int, h: int) -> list[list[Literal] | None]:
        """Returns the literals that put two groups on each device, or None where they can't both be."""
        return [
            None if isinstance(a, int) or isinstance(b, int) else ([a] if g == h else [a, b])
            for a, b in zip(self.on[g], self.on[h], strict=True)
        ]

    # --- copies ---

    @cached_property
    def copies(self) -> dict[Copy, list[int]]:
        """The copies that there may be, with the ops that would read them: those of other groups than the tensor's."""
        readers: dict[Copy, list[int]] = defaultdict(list)
        reading, read = unique_reads(self.problem.graph.ops.reads)
        for n, t in zip(reading.tolist(), read.tolist(), strict=True):
            if self.group[n] != self.home[t]:
                for d in range(self.problem.num_devices):
                    if self.problem.allowed[self.group[n], d]:
                        readers[Copy(t, d)].append(n)
        return dict(readers)

    @cached_property
    def is_made(self) -> dict[Copy, Literal]:
        """Whether each copy is made: a reader is there, and the tensor is not."""
        made = {}
        for copy, readers in self.copies.items():
            literal = self.model.new_bool_var(f"copy {copy.tensor} {copy.target}")
            home = self.on[self.home[copy.tensor]][copy.target]
            there = [self.on[g][copy.target] for g in sorted({self.group[n] for n in readers})]  # all can be there
            for reader in there:
                self.logic.clause([negated(reader), home, literal])
            self.logic.clause([literal.negated(), negated(home)])
            self.model.add_bool_or([negated(literal), *there])
            made[copy] = literal
        return made

    @cached_property
    def asked_for(self) -> dict[Copy, Any]:
        """When each copy is launched: at its first reader on the device, and there in the order in which that one reads."""
        reads = self.problem.graph.ops.reads.lists()
        width = 1 + max((len(row) for row in reads), default=0)
        keys = {}
        for copy, readers in self.copies.items():
            key = self.model.new_int_var(0, width * (self.problem.num_ops + 1), f"asked {copy.tensor} {copy.target}")
            times = []
            for n in readers:
                here = self.on[self.group[n]][copy.target]
                own = width * self.position[n] + reads[n].index(copy.tensor)
                self.model.add(key <= own).only_enforce_if(here)
                is_first = self.model.new_bool_var(f"first {n} {copy.tensor} {copy.target}")
                self.model.add(key == own).only_enforce_if(is_first)
                self.model.add_implication(is_first, here)
                times.append(is_first)
                self.first[n, copy] = is_first
            self.model.add(sum(times) == 1).only_enforce_if(self.is_made[copy])
            for is_first in times:
                self.model.add_implication(is_first, self.is_made[copy])
            keys[copy] = key
        return keys

    @cached_property
    def first(self) -> dict[tuple[int, Copy], Literal]:
        """Whether an op is the first reader of a copy, for which it is launched; `asked_for` fills it."""
        return {}

    @cached_property
    def earlier(self) -> dict[tuple[Copy, Copy], Literal]:
        """Whether one copy is launched before another, where both are made."""
        known = {}
        for a, b in combinations(self.copies, 2):
            if not self._may_share(a, b):
                continue
            literal = self.model.new_bool_var(f"earlier {a} {b}")
            both = [self.is_made[a], self.is_made[b]]
            self.model.add(self.asked_for[a] < self.asked_for[b]).only_enforce_if([literal, *both])
            self.model.add(self.asked_for[b] < self.asked_for[a]).only_enforce_if([literal.negated(), *both])
            known[a, b], known[b, a] = literal, literal.negated()
        return known

    @cached_property
    def copy_start(self) -> dict[Copy, Any]:
        """When each copy starts, in units."""
        return {copy: self.model.new_int_var(0, UNITS, f"copying {copy.tensor} {copy.target}") for copy in self.copies}

    def _add_copies(self) -> None:
        """A copy follows its tensor's making; a channel moves copies one at a time in launch order; readers wait."""
        cluster, producer = self.problem.cluster, self.problem.graph.producer
        by_channel: dict[int, list[tuple[Copy, list[Literal], int]]] = defaultdict(list)
        for copy, readers in self.copies.items():
            made, start = self.is_made[copy], self.copy_start[copy]
            self.asked_for[copy]
            if (maker := int(producer[copy.tensor])) >= 0:
                self.model.add(start >= self.end[maker]).only_enforce_if(made)
            for a, at_home in enumerate(self.on[self.home[copy.tensor]]):
                if a == copy.target or isinstance(at_home, int):
                    continue
                seconds = cluster.latency_seconds[a, copy.target]
                seconds += self.problem.graph.tensors.nbytes[copy.tensor] / cluster.bytes_per_second[a, copy.target]
                units = self._units(float(seconds))
                by_channel[int(cluster.channels[a, copy.target])].append((copy, [made, at_home], units))
                for n in readers:
                    self.logic.imply([made, at_home, self.on[self.group[n]][copy.target]], self.start[n] >= start + units)
        for channel in sorted(by_channel):
            for (one, ones, one_units), (other, others, other_units) in combinations(by_channel[channel], 2):
                if one != other:
                    is_first = self.earlier[one, other]
                    begin, other_begin = self.copy_start[one], self.copy_start[other]
                    self.logic.imply([*ones, *others, is_first], other_begin >= begin + one_units)
                    self.logic.imply([*ones, *others, is_first.negated()], begin >= other_begin + other_units)

    def _may_share(self, a: Copy, b: Copy) -> bool:
        """Returns whether two copies may be on one channel, or their order counts for the host."""
        if self.problem.cluster.dispatch_seconds > 0.0:
            return True
        channels, allowed = self.problem.cluster.channels, self.problem.allowed
        of = [
            {int(channels[s, copy.target]) for s in np.flatnonzero(allowed[self.home[copy.tensor]]) if s != copy.target}
            for copy in (a, b)
        ]
        return bool(of[0] & of[1])

    # --- launches ---

    def _add_launches(self) -> None:
        """Nothing starts before its launch; the host launches one op or copy after the other."""
        dispatch = self.problem.cluster.dispatch_seconds
        for n in self.ops:
            copies = [self.is_launched_by(copy, n) for copy in self.copies]
            count = 1 + self.position[n] + sum(copies)
            self._add_launch(self.start[n], count, dispatch, [])
        for copy in self.copies:
            others = [b for b in self.copies if b != copy]
            earlier = [self.logic.all_of([self.is_made[b], self.earlier[b, copy]]) for b in others]
            ops = [negated(self._has_reader_by(copy, n)) for n in self.ops]
            self._add_launch(self.copy_start[copy], 1 + sum(earlier) + sum(ops), dispatch, [self.is_made[copy]])

    def _add_launch(self, start: Any, count: Any, dispatch: float, when: list[Literal]) -> None:
        self.model.add(start >= self._units(dispatch) * count).only_enforce_if(when)

    def _has_reader_by(self, copy: Copy, n: int) -> Literal:
        """Returns whether a reader of a copy is launched not later than an op."""
        key = (copy, n)
        if key not in self._reader_by:
            parts = [
                self.logic.all_of([self.on[self.group[r]][copy.target], 1 if r == n else self.before[r, n]])
                for r in self.copies[copy]
            ]
            self._reader_by[key] = self.logic.any_of(parts)
        return self._reader_by[key]

    @cached_property
    def _reader_by(self) -> dict[tuple[Copy, int], Literal]:
        return {}

    def is_launched_by(self, copy: Copy, n: int) -> Literal:
        """Returns whether a copy is launched not later than an op."""
        return self.logic.all_of([self.is_made[copy], self._has_reader_by(copy, n)])

    def _units(self, seconds: float) -> int:
        return int(seconds / self.unit)
