"""Adds optional ops to a graph: they repeat what made a tensor, or let a tensor wait elsewhere.

The captured graph's tensors and groups keep their numbers, new ones come after them; ops are renumbered. With every optional
group nowhere the augmented graph is the captured one. Where a tensor has several options its readers in the backward pass
read the repeated one; while that is nowhere they read the one that waits, and else the tensor itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from placewise.core.arrays import Ints, Ragged, frozen
from placewise.core.graph import Graph, Ops, Tensors
from placewise.rewrite.optional_tensors import OptionalTensors, Unit, Visit, find_options

VERSION = 3  # of this rewrite: another one may give another graph

OPTIONS = f"options {VERSION}"

# What an op is: of the captured graph, its repetition, a tensor that waits; what keeps drawn numbers, and takes them again.
CAPTURED, REPEATED, WAITING, KEEPING, TAKING = range(5)

WAIT = "placewise.wait"  # the kind of an op without work

KEEP, TAKE = (
    "aten._to_copy",
    "aten.copy_",
)  # the kinds of ops that keep drawn zeros and ones as bytes, and take them from there

SUFFIXES = ("", ".repeat", ".wait", ".keep", ".repeat")  # of the names of ops


@dataclass(frozen=True, eq=False)
class AugmentedGraph:
    """A graph with optional ops, and what it was made from."""

    graph: Graph
    captured: Graph
    choice: OptionalTensors
    roles: Ints  # [ops], CAPTURED, REPEATED or WAITING
    ops: Ints  # [ops], the captured graph's op that it is or repeats; of what waits or is kept: its maker, or -1
    tensors: Ints  # [tensors], the captured graph's tensor whose value it has
    home_groups: Ints  # groups without ops where frozen weights live
    homes: Ints  # [home groups], the captured graph's group whose device they are on if nobody decides

    def augment_placement(self, names: Sequence[str | None]) -> tuple[str | None, ...]:
        """Returns a placement of the captured graph's groups as one of this graph's: without options."""
        found: list[str | None] = [*names, *[None] * (self.graph.num_groups - self.captured.num_groups)]
        for group, home in zip(self.home_groups.tolist(), self.homes.tolist(), strict=True):
            found[group] = names[home]
        return tuple(found)

    def captured_placement(self, names: Sequence[str | None]) -> tuple[str | None, ...]:
        """Returns a placement of this graph's groups as one of the captured graph's: its options are dropped."""
        return tuple(names[: self.captured.num_groups])


def add_options(graph: Graph, choice: OptionalTensors | None = None) -> AugmentedGraph:
    """Returns a graph with optional ops for the tensors that are worth it."""
    choice = choice or OptionalTensors()
    return _Builder(graph).build(choice)


class _Builder:
    """The ops and tensors of the augmented graph so far."""

    def __init__(self, captured: Graph) -> None:
        self.captured = captured
        self.reads, self.writes = captured.ops.reads.lists(), captured.ops.writes.lists()
        self.after, self.storage = captured.ops.after.lists(), captured.storage.tolist()
        self.producer, self.aliases = captured.producer.tolist(), captured.tensors.alias_of.tolist()
        self.micro_batches, self.phases = captured.ops.micro_batches.tolist(), captured.ops.phases.tolist()
        self.num_tensors, self.num_groups = len(captured.tensors), captured.num_groups
        self.newest = list(range(self.num_tensors))  # [storages]
        for tensor in range(self.num_tensors):
            if self.producer[tensor] >= self.producer[self.newest[self.storage[tensor]]]:
                self.newest[self.storage[tensor]] = tensor
        # one entry for each op of the augmented graph
        self.origins: list[int] = []
        self.roles: list[int] = []
        self.groups: list[int] = []
        self.new_reads: list[list[int]] = []
        self.new_writes: list[list[int]] = []
        self.new_after: list[list[int]] = []
        self.new_names: dict[int, str] = {}  # of ops that wait
        self.new_phases: dict[int, int] = {}  # of optional ops, by op
        self.new_batches: dict[int, int] = {}
        # one entry for each new tensor
        self.values: list[int] = []  # the captured tensor whose value it has
        self.alias_of: list[int] = []
        self.stands_for: list[int] = []
        self.tensor_names: list[str] = []
        # what is read now
        self.top: dict[int, int] = {}  # captured tensor -> what late readers read
        self.visiting: dict[tuple[int, int, int], int] = {}  # (resident tensor, micro-batch, phase) -> what is read
        self.number: dict[int, int] = {}  # captured op -> op
        self.readers: dict[int, list[int]] = {}  # storage -> optional ops that read it
        self.kept: dict[int, tuple[int, int]] = {}  # captured op that draws -> its group of optional ops, what is kept
        self._counts: dict[str, int] = {}  # of names

    def build(self, choice: OptionalTensors) -> AugmentedGraph:
        found = find_options(self.captured, choice)
        homes = self._homes([visit.tensor for visit in found.visits])
        waits: dict[int, list[int]] = {}  # captured op -> the storages that may wait after it
        for storage in found.waiting:
            last = max(n for n in self._users(storage) if self.phases[n] == 0)
            waits.setdefault(last, []).append(storage)
        visits: dict[int, list[Visit]] = {}
        for visit in found.visits:
            visits.setdefault(visit.before, []).append(visit)
        units: dict[int, list[Unit]] = {}
        for unit in found.repeated:
            units.setdefault(unit.before, []).append(unit)
        groups = {tensor: self._new_group() for tensor in dict.fromkeys(visit.tensor for visit in found.visits)}
        draws = {unit.draw for unit in found.repeated}
        late = {(n, storage) for storage, readers in found.late_readers.items() for n in readers}
        for n in range(len(self.reads)):
            for visit in visits.get(n, ()):
                self._visit(visit, groups[visit.tensor])
            for unit in units.get(n, ()):
                self._repeat(unit)
            self._keep(n, late)
            if n in draws:
                self._keep_draw(n)
            for storage in waits.get(n, ()):
                self._wait(storage)
        return self._augmented(choice, homes)

    def _users(self, storage: int) -> list[int]:
        if not hasattr(self, "_users_of"):
            self._users_of: dict[int, list[int]] = {}
            for n, (reads, writes) in enumerate(zip(self.reads, self.writes, strict=True)):
                for s in {self.storage[t]: None for t in (*reads, *writes)}:
                    self._users_of.setdefault(s, []).append(n)
        return self._users_of[storage]

    def _new_group(self) -> int:
        self.num_groups += 1
        return self.num_groups - 1

    def _homes(self, tensors: Sequence[int]) -> dict[int, int]:
        """Gives each of these residents that has no home a group of its own: tensor -> group."""
        home = self.captured.tensors.home.tolist()
        return {tensor: self._new_group() for tensor in dict.fromkeys(tensors) if home[tensor] < 0}

    # --- ops ---

    def _add_op(self, origin: int, role: int, group: int, reads: list[int], writes: list[int], after: list[int]) -> int:
        self.origins.append(origin)
        self.roles.append(role)
        self.groups.append(group)
        self.new_reads.append(reads)
        self.new_writes.append(writes)
        self.new_after.append(after)
        return len(self.origins) - 1

    def _keep(self, n: int, late: set[tuple[int, int]]) -> None:
        """Adds an op of the captured graph, which reads what optional ops have made."""
        key = self.micro_batches[n], self.phases[n]
        reads = []
        for t in self.reads[n]:
            t = self.visiting.get((t, *key), t)
            is_late = t < self.num_tensors and (n, self.storage[t]) in late
            reads.append(self.top.get(t, t) if is_late else t)
        after = [self.number[m] for m in self.after[n]]
        for t in self.writes[n]:
            if self.aliases[t] >= 0:
                after += self.readers.get(self.storage[t], ())
        group = int(self.captured.ops.groups[n])
        self.number[n] = self._add_op(n, CAPTURED, group, list(dict.fromkeys(reads)), self.writes[n], sorted({*after}))

    def _repeat(self, unit: Unit) -> None:
        """Adds a repetition of some ops."""
        group = self._new_group() if unit.draw < 0 else self.kept[unit.draw][0]
        made: dict[int, int] = {}  # captured tensor -> repeated tensor
        own = {self.storage[t] for n in unit.ops for t in self.writes[n] if self.producer[self.storage[t]] >= 0}
        changed = {self.storage[t] for n in unit.ops for t in self.writes[n]} - own  # running statistics
        for n in unit.ops:
            key = self.micro_batches[n], self.phases[unit.before]
            kept = [t for t in self.reads[n] if self.storage[t] not in changed]
            if n == unit.draw:
                kept = [t for t in kept if t in made]
            reads = [made[t] if t in made else self.visiting.get((t, *key), self.top.get(t, t)) for t in kept]
            if n == unit.draw:
                reads.append(self.kept[n][1])
            writes = []
            for t in self.writes[n]:
                if self.storage[t] in own:
                    alias = self.aliases[t]
                    made[t] = self._add_tensor(t, made[alias] if alias >= 0 else -1, self.top.get(t, t), SUFFIXES[REPEATED])
                    writes.append(made[t])
            role = TAKING if n == unit.draw else REPEATED
            op = self._add_op(n, role, group, list(dict.fromkeys(reads)), writes, [self.number[unit.after]])
            self.new_phases[op], self.new_batches[op] = self.phases[unit.before], self.micro_batches[n]
            self._note_reads(op)
            inside = [m for m in self.after[n] if m in unit.ops]
            self.new_after[op] += [op - (unit.ops.index(n) - unit.ops.index(m)) for m in inside]
        self.top |= made

    def _keep_draw(self, n: int) -> None:
        """Adds an op that keeps the zeros and ones that an op has drawn, a byte for each."""
        (drawn,) = self.writes[n]
        kept, group = self._add_tensor(drawn, -1, drawn, SUFFIXES[KEEPING]), self._new_group()
        op = self._add_op(n, KEEPING, group, [drawn], [kept], [])
        self.new_phases[op], self.new_batches[op] = self.phases[n], self.micro_batches[n]
        self._note_reads(op)
        self.kept[n] = group, kept

    def _wait(self, storage: int) -> None:
        """Adds an op that lets a tensor wait elsewhere, where late readers read it."""
        tensor = self.newest[storage]
        maker = self.producer[tensor]
        waiting = self._add_tensor(tensor, -1, tensor, SUFFIXES[WAITING])
        op = self._add_op(maker, WAITING, self._new_group(), [tensor], [waiting], [])
        self.new_phases[op], self.new_batches[op] = self.phases[maker], self.micro_batches[maker]
        self.new_names[op] = self.tensor_names[-1]
        self.top[tensor] = waiting

    def _visit(self, visit: Visit, group: int) -> None:
        """Adds an op that reads a resident tensor for one pass."""
        waiting = self._add_tensor(visit.tensor, -1, visit.tensor, SUFFIXES[WAITING])
        op = self._add_op(-1, WAITING, group, [visit.tensor], [waiting], [self.number[visit.after]])
        self.new_phases[op], self.new_batches[op] = visit.phase, visit.micro_batch
        self.new_names[op] = self.tensor_names[-1]
        self._note_reads(op)
        self.visiting[visit.tensor, visit.micro_batch, visit.phase] = waiting

    def _note_reads(self, op: int) -> None:
        for t in self.new_reads[op]:
            value = t if t < self.num_tensors else self.values[t - self.num_tensors]
            self.readers.setdefault(self.storage[value], []).append(op)

    def _add_tensor(self, value: int, alias: int, stands_for: int, suffix: str) -> int:
        self.values.append(value)
        self.alias_of.append(alias)
        self.stands_for.append(stands_for)
        name = self.captured.tensors.names[value] + suffix
        count = self._counts[name] = self._counts.get(name, -1) + 1
        self.tensor_names.append(f"{name}_{count}" if count else name)
        return self.num_tensors + len(self.values) - 1

    # --- the whole ---

    def _augmented(self, choice: OptionalTensors, homes: dict[int, int]) -> AugmentedGraph:
        captured, o, t = self.captured, self.captured.ops, self.captured.tensors
        origins, roles = np.array(self.origins, np.int64), np.array(self.roles, np.int64)
        count = len(origins)
        waits = roles == WAITING
        values = np.array(self.values, np.int64)
        home = t.home.copy()
        for tensor, group in homes.items():
            home[(captured.storage == tensor) & (captured.producer < 0)] = group
        shape, nbytes = np.concatenate([t.shape, t.shape[values]]), np.concatenate([t.nbytes, t.nbytes[values]])
        for n, (_, kept) in self.kept.items():
            shape[kept], nbytes[kept] = -1, int(o.flops[n])
        tensors = Tensors(
            names=(*t.names, *self.tensor_names),
            nbytes=nbytes,
            kinds=np.concatenate([t.kinds, t.kinds[values]]),
            home=np.concatenate([home, np.full(len(values), -1)]),
            alias_of=np.concatenate([t.alias_of, np.array(self.alias_of, np.int64)]),
            shapes=t.shapes,
            shape=shape,
            stands_for=np.concatenate([np.full(len(t), -1), np.array(self.stands_for, np.int64)]),
        )
        phases, batches = o.phases[origins], o.micro_batches[origins]
        for op, phase in self.new_phases.items():
            phases[op], batches[op] = phase, self.new_batches[op]

        names = [
            self.new_names[n] if role == WAITING else o.names[origin] + SUFFIXES[role]
            for n, (origin, role) in enumerate(zip(self.origins, self.roles, strict=True))
        ]
        own_kinds = {WAITING: WAIT, KEEPING: KEEP, TAKING: TAKE}
        kinds = [own_kinds.get(role) or o.kinds[origin] for origin, role in zip(self.origins, self.roles, strict=True)]
        bytes_moved = np.where(waits, 0.0, o.bytes_moved[origins])
        for n, role in enumerate(self.roles):
            if role in (KEEPING, TAKING):
                kept = self.kept[self.origins[n]][1]
                bytes_moved[n] = nbytes[kept] + nbytes[values[kept - len(t)]]
        copies = waits | (roles == KEEPING) | (roles == TAKING)
        devices = [None if waits[n] else o.devices[origin] for n, origin in enumerate(self.origins)]
        ops = Ops(
            names=tuple(names),
            kinds=tuple(kinds),
            phases=phases,
            groups=np.array(self.groups, np.int64),
            reads=Ragged.of(self.new_reads),
            writes=Ragged.of(self.new_writes),
            after=Ragged.of(self.new_after),
            flops=np.where(copies, 0.0, o.flops[origins]),
            bytes_moved=bytes_moved,
            devices=tuple(devices),
            micro_batches=batches,
            seconds={key: np.where(copies, np.nan, times[origins]) for key, times in o.seconds.items()},
            compute=np.where(copies, 0, o.compute[origins]),
            optional=roles != CAPTURED,
        )
        assert len(ops) == count
        graph = Graph(captured.name, tensors, ops, captured.outputs, (*captured.rewrites, OPTIONS))
        of_readers = np.append(o.groups, 0)[captured.first_reader]
        return AugmentedGraph(
            graph,
            captured,
            choice,
            frozen(roles, np.int64),
            frozen(origins, np.int64),
            frozen(np.concatenate([np.arange(len(t)), values]), np.int64),
            frozen(np.array(list(homes.values()), np.int64), np.int64),
            frozen(of_readers[list(homes)], np.int64),
        )
