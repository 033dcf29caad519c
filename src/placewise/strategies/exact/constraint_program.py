"""Placement, launch order and memory as a constraint program: all that `simulate.reference` defines, in integers.

A group of optional ops may be nowhere. Its ops then come last in the launch order, and take no time; who reads what they
would have written reads, under a condition, the tensor that it stands for.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.simulate.flat_problem import tensor_groups, unique_reads

Literal = Any  # a Boolean variable of ortools, its negation, or a constant: 0 or 1
UNITS = 2**30  # time units in the longest possible step


class PossibleCopy(NamedTuple):
    """A tensor that may be copied to a device."""

    tensor: int
    target: int


class Read(NamedTuple):
    """A tensor that an op reads if a literal holds, once the op runs."""

    op: int
    slot: int  # its place among the op's reads
    tensor: int
    when: Literal  # which optional ops are nowhere


class Reader(NamedTuple):
    """An op that reads a possible copy if a literal holds."""

    op: int
    slot: int
    reads: Literal  # the op is there, and reads this tensor


@dataclass(frozen=True, eq=False)
class Logic:
    """Adds constraints to a solver's model, without the literals whose values are known."""

    model: Any

    def imply(self, literals: list[Literal], constraint: Any) -> None:
        """Adds a constraint that must hold if all literals do."""
        literals = [one for one in literals if not (isinstance(one, int) and one == 1)]
        if any(isinstance(one, int) for one in literals):
            return
        self.model.add(constraint).only_enforce_if(literals)

    def clause(self, literals: list[Literal]) -> None:
        """Adds that at least one of the literals holds."""
        if not any(isinstance(one, int) and one == 1 for one in literals):
            self.model.add_bool_or([one for one in literals if not isinstance(one, int)])

    def all_of(self, literals: list[Literal]) -> Literal:
        """Returns the conjunction of the literals."""
        literals = [one for one in literals if not (isinstance(one, int) and one == 1)]
        if any(isinstance(one, int) for one in literals):
            return 0
        if len(literals) < 2:
            return literals[0] if literals else 1
        whole = self.model.new_bool_var("and")
        self.model.add_bool_and(literals).only_enforce_if(whole)
        self.model.add_bool_or([*(one.negated() for one in literals), whole])
        return whole

    def any_of(self, literals: list[Literal]) -> Literal:
        """Returns the disjunction of the literals."""
        return negated(self.all_of([negated(one) for one in literals]))


@dataclass(eq=False)
class ConstraintProgram:
    """The constraint program of a problem."""

    problem: Problem
    longest: float  # seconds that no step exceeds
    unit: float = field(init=False)  # seconds
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
        self._add_memory()
        self.model.minimize(self.last)

    # --- the problem, in plain lists ---

    @cached_property
    def ops(self) -> range:
        """All ops."""
        return range(self.problem.num_ops)

    @cached_property
    def group(self) -> list[int]:
        """Each op's group."""
        return [int(g) for g in self.problem.op_groups]

    @cached_property
    def home(self) -> list[int]:
        """The group that each tensor is with."""
        return [int(g) for g in tensor_groups(self.problem)]

    @cached_property
    def seconds(self) -> list[list[float]]:
        """Each op's time on each device."""
        return [[float(t) for t in row] for row in self.problem.op_seconds]

    @cached_property
    def reads(self) -> list[Read]:
        """All reads: what an op asks for, and what it may read instead."""
        graph, found = self.problem.graph, []
        reading, read = unique_reads(graph.ops.reads)
        for n, t in zip(reading.tolist(), read.tolist(), strict=True):
            slot, missing = graph.ops.reads[n].tolist().index(t), list[Literal]()
            while True:
                maker = int(graph.producer[t])
                runs = 1 if maker < 0 else self.runs[maker]
                found.append(Read(n, slot, t, self.logic.all_of([*missing, runs])))
                if maker < 0 or not graph.ops.optional[maker]:
                    break
                missing.append(negated(runs))
                t = int(graph.tensors.stands_for[t])
        return found

    @cached_property
    def reads_of(self) -> dict[int, list[Read]]:
        """The reads of each tensor."""
        found: dict[int, list[Read]] = defaultdict(list)
        for read in self.reads:
            found[read.tensor].append(read)
        return found

    @cached_property
    def needs(self) -> list[tuple[int, int, Literal]]:
        """The pairs of ops whose second op waits for the first if both run and a literal holds."""
        graph = self.problem.graph
        made = [(int(graph.producer[read.tensor]), read.op, read.when) for read in self.reads]
        after = graph.ops.after
        pairs = [(m, n, 1) for m, n in zip(after.values.tolist(), after.rows.tolist(), strict=True)]
        found: dict[tuple[int, int, int], tuple[int, int, Literal]] = {}
        for m, n, when in [*made, *pairs]:
            if m >= 0 and m != n:
                literal = self.logic.all_of([when, self.runs[m], self.runs[n]])
                key = (m, n, literal if isinstance(literal, int) else 2 + literal.index)
                found.setdefault(key, (m, n, literal))
        return list(found.values())

    def forced(self) -> set[tuple[int, int]]:
        """Returns the pairs of ops that always run whose second op depends on the first, directly or not."""
        before: list[set[int]] = []
        always = [(m, n) for m, n, when in self.needs if isinstance(when, int)]
        for n in self.ops:
            inputs = [m for m, k in sorted(set(always)) if k == n]
            before.append({*inputs, *(a for m in inputs for a in before[m])})
        return {(m, n) for n in self.ops for m in before[n]}

    # --- decisions ---

    @cached_property
    def is_there(self) -> list[Literal]:
        """Whether each group is on a device; it is unless it is one of optional ops."""
        return [self.model.new_bool_var(f"there {g}") if optional else 1 for g, optional in enumerate(self.problem.optional)]

    @cached_property
    def runs(self) -> list[Literal]:
        """Whether each op runs."""
        return [self.is_there[g] for g in self.group]

    @cached_property
    def on(self) -> list[list[Literal]]:
        """Whether each group is on each device."""
        rows = []
        for group, allowed in enumerate(self.problem.allowed.tolist()):
            row = [self.model.new_bool_var(f"on {group} {d}") if ok else 0 for d, ok in enumerate(allowed)]
            nowhere = [] if isinstance(self.is_there[group], int) else [self.is_there[group].negated()]
            self.model.add_exactly_one([*nowhere, *(literal for literal in row if not isinstance(literal, int))])
            rows.append(row)
        return rows

    def place_of(self, tensor: int) -> list[Literal]:
        """Returns whether a tensor comes into being on each device: with its group, or else with its first reader."""
        graph = self.problem.graph
        if graph.producer[tensor] >= 0 or graph.tensors.home[tensor] >= 0 or not graph.has_options:
            return self.on[self.home[tensor]] if self.home[tensor] >= 0 else self._on_first_device
        if tensor not in self._places:
            found: list[list[Literal]] = [[] for _ in range(self.problem.num_devices)]
            earlier: list[Literal] = []
            for read in sorted(self.reads_of[tensor]):
                reads = self.logic.all_of([read.when, self.runs[read.op]])
                is_first = self.logic.all_of([reads, *map(negated, earlier)])
                for d, on in enumerate(self.on[self.group[read.op]]):
                    found[d].append(self.logic.all_of([is_first, on]))
                earlier.append(reads)
            found[0].append(self.logic.all_of([*map(negated, earlier)]))  # nobody reads it
            self._places[tensor] = [self.logic.any_of(literals) for literals in found]
        return self._places[tensor]

    @cached_property
    def _places(self) -> dict[int, list[Literal]]:
        return {}

    @cached_property
    def _on_first_device(self) -> list[Literal]:
        return [int(d == 0) for d in range(self.problem.num_devices)]

    @cached_property
    def before(self) -> dict[tuple[int, int], Literal]:
        """Whether one op is launched before another; a constant if the graph decides it."""
        num_ops, model = self.problem.num_ops, self.model
        known: dict[tuple[int, int], Literal] = {}
        forced = self.forced()
        for m, n in combinations(range(num_ops), 2):
            literal = 1 if (m, n) in forced else model.new_bool_var(f"before {m} {n}")
            known[m, n], known[n, m] = literal, negated(literal)
            self.logic.imply([literal], self.position[m] + 1 <= self.position[n])
            self.logic.imply([negated(literal)], self.position[n] + 1 <= self.position[m])
            for first, last in ((m, n), (n, m)):  # those that do not run come last
                if not isinstance(self.runs[last], int):
                    self.logic.clause([negated(self.runs[first]), self.runs[last], known[first, last]])
        for m, n, when in self.needs:
            self.logic.clause([negated(when), known[m, n]])
        return known

    @cached_property
    def position(self) -> list[Any]:
        """The position of each op in the launch order."""
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
        """Ops of one device run one at a time in launch order, after the ops that they need."""
        for n in self.ops:
            self.model.add(self.end[n] <= self.last)
        for m, n, when in self.needs:
            self.logic.imply([when], self.start[n] >= self.end[m])
        for m, n in combinations(self.ops, 2):
            for together in self.both_on(self.group[m], self.group[n]):
                if together is not None:
                    for a, b in ((m, n), (n, m)):
                        self.logic.imply([*together, self.before[a, b]], self.start[b] >= self.end[a])
        for d in range(self.problem.num_devices):  # the same again, in a form that helps the solver
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
        """Returns for each device the literals that put two groups there, or None if they can't both be there."""
        return [
            None if isinstance(a, int) or isinstance(b, int) else ([a] if g == h else [a, b])
            for a, b in zip(self.on[g], self.on[h], strict=True)
        ]

    # --- copies ---

    @cached_property
    def copies(self) -> dict[PossibleCopy, list[Reader]]:
        """All possible copies, with the ops that would read them: those in other groups than the tensor."""
        readers: dict[PossibleCopy, list[Reader]] = defaultdict(list)
        for n, slot, t, when in self.reads:
            if self.group[n] != self.home[t] or self._is_homeless(t):
                for d in range(self.problem.num_devices):
                    if self.problem.allowed[self.group[n], d]:
                        readers[PossibleCopy(t, d)].append(
                            Reader(n, slot, self.logic.all_of([self.on[self.group[n]][d], when]))
                        )
        return dict(readers)

    def _is_homeless(self, tensor: int) -> bool:
        """Returns whether it is decided by the choice of optional ops with which group a tensor is."""
        graph = self.problem.graph
        return bool(graph.has_options and graph.producer[tensor] < 0 and graph.tensors.home[tensor] < 0)

    @cached_property
    def is_made(self) -> dict[PossibleCopy, Literal]:
        """Whether each copy is made: if a reader is there and the tensor is not."""
        made = {}
        for copy, readers in self.copies.items():
            literal = self.model.new_bool_var(f"copy {copy.tensor} {copy.target}")
            home = self.place_of(copy.tensor)[copy.target]
            there = [reader.reads for reader in readers]  # none is a constant
            for reader in there:
                self.logic.clause([negated(reader), home, literal])
            self.logic.clause([literal.negated(), negated(home)])
            self.model.add_bool_or([negated(literal), *there])
            made[copy] = literal
        return made

    @cached_property
    def launch_key(self) -> dict[PossibleCopy, Any]:
        """A key that sorts copies by launch: by their first reader on the device, then in the order of its reads."""
        width = 1 + max((len(row) for row in self.problem.graph.ops.reads.lists()), default=0)
        keys = {}
        for copy, readers in self.copies.items():
            key = self.model.new_int_var(0, width * (self.problem.num_ops + 1), f"asked {copy.tensor} {copy.target}")
            times = []
            for n, slot, here in readers:
                own = width * self.position[n] + slot
                self.model.add(key <= own).only_enforce_if(here)
                is_first = self.model.new_bool_var(f"first {n} {copy.tensor} {copy.target}")
                self.model.add(key == own).only_enforce_if(is_first)
                self.model.add_implication(is_first, here)
                times.append(is_first)
                self.first.setdefault((n, copy), []).append(is_first)
            self.model.add(sum(times) == 1).only_enforce_if(self.is_made[copy])
            for is_first in times:
                self.model.add_implication(is_first, self.is_made[copy])
            keys[copy] = key
        return keys

    @cached_property
    def first(self) -> dict[tuple[int, PossibleCopy], list[Literal]]:
        """Whether a copy is launched for an op, its first reader, by a read; `launch_key` fills this in."""
        return {}

    @cached_property
    def earlier(self) -> dict[tuple[PossibleCopy, PossibleCopy], Literal]:
        """Whether one copy is launched before another, where both are made."""
        known = {}
        for a, b in combinations(self.copies, 2):
            if not self._may_share(a, b):
                continue
            literal = self.model.new_bool_var(f"earlier {a} {b}")
            both = [self.is_made[a], self.is_made[b]]
            self.model.add(self.launch_key[a] < self.launch_key[b]).only_enforce_if([literal, *both])
            self.model.add(self.launch_key[b] < self.launch_key[a]).only_enforce_if([literal.negated(), *both])
            known[a, b], known[b, a] = literal, literal.negated()
        return known

    @cached_property
    def copy_start(self) -> dict[PossibleCopy, Any]:
        """When each copy starts, in units."""
        return {copy: self.model.new_int_var(0, UNITS, f"copying {copy.tensor} {copy.target}") for copy in self.copies}

    def _add_copies(self) -> None:
        """A copy starts after its tensor is made; its channels move one copy at a time in launch order; readers wait."""
        cluster, producer = self.problem.cluster, self.problem.graph.producer
        by_channel: dict[int, list[tuple[PossibleCopy, list[Literal], int]]] = defaultdict(list)
        for copy, readers in self.copies.items():
            made, start = self.is_made[copy], self.copy_start[copy]
            seconds = cluster.copy_seconds(self.problem.graph.tensors.nbytes[copy.tensor])  # [devices, devices]
            self.launch_key[copy]
            if (maker := int(producer[copy.tensor])) >= 0:
                self.model.add(start >= self.end[maker]).only_enforce_if(made)
            for a, at_home in enumerate(self.place_of(copy.tensor)):
                if a == copy.target or isinstance(at_home, int):
                    continue
                units = self._units(float(seconds[a, copy.target]))
                for channel in self._channels(a, copy.target):
                    by_channel[channel].append((copy, [made, at_home], units))
                delay = self._units(float(cluster.delay_seconds[a, copy.target]))
                for reader in readers:
                    self.logic.imply([made, at_home, reader.reads], self.start[reader.op] >= start + units + delay)
        for channel in sorted(by_channel):
            for (one, ones, one_units), (other, others, other_units) in combinations(by_channel[channel], 2):
                if one != other:
                    is_first = self.earlier[one, other]
                    begin, other_begin = self.copy_start[one], self.copy_start[other]
                    self.logic.imply([*ones, *others, is_first], other_begin >= begin + one_units)
                    self.logic.imply([*ones, *others, is_first.negated()], begin >= other_begin + other_units)

    def _may_share(self, a: PossibleCopy, b: PossibleCopy) -> bool:
        """Returns whether the order of two copies can matter: for a channel, or for the host."""
        if self.problem.cluster.dispatch_seconds > 0.0:
            return True
        allowed = self.problem.allowed
        of = [
            {
                channel
                for source in range(self.problem.num_devices)
                if source != copy.target and (self._is_homeless(copy.tensor) or allowed[self.home[copy.tensor], source])
                for channel in self._channels(source, copy.target)
            }
            for copy in (a, b)
        ]
        return bool(of[0] & of[1])

    def _channels(self, source: int, target: int) -> list[int]:
        """Returns the channels of a link, each once."""
        cluster = self.problem.cluster
        return sorted({int(cluster.channels[source, target]), int(cluster.second_channels[source, target])})

    # --- launches ---

    def _add_launches(self) -> None:
        """Nothing starts before its launch; a host launches one op or copy after the other."""
        dispatch = self.problem.cluster.dispatch_seconds
        if len(self.problem.cluster.host_names) > 1:
            self._add_launches_of_hosts(dispatch)
            return
        for n in self.ops:
            copies = [self.is_launched_by(copy, n) for copy in self.copies]
            count = 1 + self.position[n] + sum(copies)
            self._add_launch(self.start[n], count, dispatch, [self.runs[n]])
        for copy in self.copies:
            others = [b for b in self.copies if b != copy]
            earlier = [self.logic.all_of([self.is_made[b], self.earlier[b, copy]]) for b in others]
            ops = [negated(self._has_reader_by(copy, n)) for n in self.ops]
            self._add_launch(self.copy_start[copy], 1 + sum(earlier) + sum(ops), dispatch, [self.is_made[copy]])

    def _add_launches_of_hosts(self, dispatch: float) -> None:
        """The same for several hosts: each counts the ops on its own devices, and the copies from and to them."""
        hosts = self.problem.cluster.hosts.tolist()
        for host in sorted(set(hosts)):
            own = [d for d, h in enumerate(hosts) if h == host]
            runs = [self.logic.any_of([self.on[self.group[n]][d] for d in own]) for n in self.ops]
            moves = {
                copy: self.is_made[copy] if copy.target in own
                else self.logic.all_of(
                    [self.is_made[copy], self.logic.any_of([self.place_of(copy.tensor)[d] for d in own])]
                )
                for copy in self.copies
            }  # fmt: skip
            for n in self.ops:
                earlier = [self.logic.all_of([runs[m], self.before[m, n]]) for m in self.ops if m != n]
                copies = [self.logic.all_of([moves[copy], self._has_reader_by(copy, n)]) for copy in self.copies]
                self._add_launch(self.start[n], 1 + sum(earlier) + sum(copies), dispatch, [runs[n]])
            for copy in self.copies:
                others = [b for b in self.copies if b != copy]
                earlier = [self.logic.all_of([moves[b], self.earlier[b, copy]]) for b in others]
                ops = [self.logic.all_of([runs[n], negated(self._has_reader_by(copy, n))]) for n in self.ops]
                self._add_launch(self.copy_start[copy], 1 + sum(earlier) + sum(ops), dispatch, [moves[copy]])

    def _add_launch(self, start: Any, count: Any, dispatch: float, when: list[Literal]) -> None:
        self.logic.imply(when, start >= self._units(dispatch) * count)

    def _has_reader_by(self, copy: PossibleCopy, n: int) -> Literal:
        """Returns whether a reader of a copy is launched before an op or is this op."""
        key = (copy, n)
        if key not in self._reader_by:
            parts = [self.logic.all_of([r.reads, 1 if r.op == n else self.before[r.op, n]]) for r in self.copies[copy]]
            self._reader_by[key] = self.logic.any_of(parts)
        return self._reader_by[key]

    @cached_property
    def _reader_by(self) -> dict[tuple[PossibleCopy, int], Literal]:
        return {}

    def is_launched_by(self, copy: PossibleCopy, n: int) -> Literal:
        """Returns whether a copy is launched before an op or for it."""
        return self.logic.all_of([self.is_made[copy], self._has_reader_by(copy, n)])

    def _units(self, seconds: float) -> int:
        return int(seconds / self.unit)

    # --- memory ---

    def _add_memory(self) -> None:
        """The bytes in use on a device fit at every launch; left out if everything at once fits on every device."""
        problem, tensors = self.problem, self.problem.graph.tensors
        if not self._memory_matters():
            return
        storages = self._storages()
        alive = {(root, n): literal for root in storages for n, literal in enumerate(self._alive(root))}
        for d, memory in enumerate(problem.cluster.memory_bytes.tolist()):
            resident = self._resident(d)
            self._fit(resident, memory)
            for n in self.ops:
                made = [(root, self.logic.all_of([alive[root, n], self.on[self.home[root]][d]])) for root in storages]
                copied = [(copy.tensor, self._is_copy_alive(copy, n)) for copy in self.copies if copy.target == d]
                self._fit([*resident, *((int(tensors.nbytes[t]), literal) for t, literal in made + copied)], memory)

    def _memory_matters(self) -> bool:
        graph = self.problem.graph
        copied = sum(int(graph.tensors.nbytes[t]) for t in sorted({copy.tensor for copy in self.copies}))
        own = graph.storage == np.arange(len(graph.tensors))
        return bool(int(graph.tensors.nbytes[own].sum()) + copied > self.problem.cluster.memory_bytes.min())

    def _fit(self, taken: list[tuple[int, Literal]], memory: int) -> None:
        """Adds that the sizes whose literals hold fit in the memory."""
        fixed = sum(size * literal for size, literal in taken if isinstance(literal, int))
        self.model.add(sum(size * literal for size, literal in taken if not isinstance(literal, int)) + fixed <= memory)

    def _resident(self, device: int) -> list[tuple[int, Literal]]:
        """Returns the sizes of resident tensors on a device; those without a home that nobody reads are on the first one."""
        graph = self.problem.graph
        rows = []
        for t in np.flatnonzero((graph.producer < 0) & (graph.tensors.alias_of < 0)).tolist():
            size = int(graph.tensors.nbytes[t])
            rows.append((size, self.place_of(t)[device]))
        return rows

    def _storages(self) -> list[int]:
        """Returns the tensors whose memory the step takes: not views, not residents."""
        graph = self.problem.graph
        own = (graph.producer >= 0) & (graph.storage == np.arange(len(graph.tensors))) & (graph.tensors.nbytes > 0)
        return [int(t) for t in np.flatnonzero(own)]

    def _alive(self, root: int) -> list[Literal]:
        """Returns whether a storage is in use at each op's launch: it is made by then, and used then or later, or kept."""
        graph = self.problem.graph
        maker = int(graph.producer[root])
        kept = self._is_kept(root)
        known, literals = self._uses(root), []
        for n in self.ops:
            made = 1 if maker == n else self.before[maker, n]
            uses = [self.logic.all_of([use, 1 if k == n else self.before[n, k]]) for k, use in known]
            literals.append(self.logic.all_of([made, self.logic.any_of([kept, *uses])]))
        return literals

    def _is_kept(self, root: int) -> Literal:
        """Returns whether a storage is kept to the end: an output, or what stands in for one, is in it."""
        graph, parts = self.problem.graph, list[Literal]()
        for t in graph.outputs.tolist():
            missing: list[Literal] = []
            while True:
                maker = int(graph.producer[t])
                runs = 1 if maker < 0 else self.runs[maker]
                if graph.storage[t] == root:
                    parts.append(self.logic.all_of([*missing, runs]))
                if maker < 0 or not graph.ops.optional[maker]:
                    break
                missing.append(negated(runs))
                t = int(graph.tensors.stands_for[t])
        return self.logic.any_of(parts)

    def _uses(self, root: int) -> list[tuple[int, Literal]]:
        """Returns the ops that may use a storage, and whether they do: a write, a read on its device, or a copy's launch."""
        graph = self.problem.graph
        uses: list[tuple[int, Literal]] = []
        for t in np.flatnonzero(graph.storage == root).tolist():
            if graph.producer[t] >= 0:
                uses.append((int(graph.producer[t]), self.runs[int(graph.producer[t])]))
            copies = [copy for copy in self.copies if copy.tensor == t]
            for k, _, _, when in self.reads_of[t]:
                pairs = [pair for pair in self.both_on(self.group[k], self.home[t]) if pair is not None]
                uses += [(k, self.logic.all_of([*pair, when])) for pair in pairs]
            for copy in copies:
                uses += [
                    (k, literal) for (k, other), literals in self.first.items() if other == copy for literal in literals
                ]
        return uses

    def _is_copy_alive(self, copy: PossibleCopy, n: int) -> Literal:
        """Returns whether a copy is in use at an op's launch: it has a reader by then, and a reader then or later."""
        readers = self.copies[copy]
        later = self.logic.any_of([self.logic.all_of([r.reads, 1 if r.op == n else self.before[n, r.op]]) for r in readers])
        return self.logic.all_of([self.is_launched_by(copy, n), later])


def negated(literal: Literal) -> Literal:
    """Returns the negation of a literal."""
    return 1 - literal if isinstance(literal, int) else literal.negated()


def import_solver() -> Any:
    """Returns ortools' CP-SAT."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise StrategyError("strategy 'exact' needs ortools: pip install 'placewise[exact]'") from None
    return cp_model
