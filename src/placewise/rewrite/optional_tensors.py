"""Decides which tensors of a training step get options: to be computed again, or to wait elsewhere.

A tensor that the forward pass makes and the backward pass reads is held in between. It is worth an option if it is large.

- *Repeated* is everything that makes such a tensor: a unit, the ops that write one storage or several storages together. A
  repeated unit reads what its original reads, or the repeated version of that if it is needed at about the same time: within
  one block of the model, or within `near_share` of the time of the backward pass. So chains of cheap ops and whole blocks
  can be repeated, and no tensor is made again long before it is read.
- *Waiting* is a tensor that is copied to another device after its last reader in the forward pass, and read from there.
- A parameter or buffer *visits* those that read it, once for every pass and micro-batch, if it lives elsewhere.

What dropout draws is repeated without drawing: the zeros and ones of `bernoulli_` are kept as bytes, and the repetition
takes them from there.

What can't be repeated: other ops that draw random numbers, ops that change a tensor that existed before the step (batch norm
can: its repetition leaves the running statistics alone), ops that read memory which is overwritten before they would be
repeated, and attention, whose backward pass needs what its own forward pass has saved.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from placewise.core.costs import nominal_seconds
from placewise.core.graph import PHASES, TENSOR_KINDS, Graph
from placewise.core.grouping import module_path
from placewise.core.labels import connected_components

FORWARD, BACKWARD, UPDATE = range(len(PHASES))

RANDOM = re.compile(
    r"rand|dropout|bernoulli|normal(?!i)|uniform|exponential|poisson|nomial|cauchy|geometric|dirichlet|gamma|rrelu|"
    r"attention|sdp|rnn|lstm|gru|softmax_with_shape|wait"
)  # in the names of operators that may draw random numbers, or keep what is not a tensor

DRAW = "aten.bernoulli_"  # it draws zeros and ones into a tensor

STATISTICS = re.compile(
    r"\.(native_batch_norm|_batch_norm_with_update)$|^fused\.batch_norm_with_update(_|$)"
)  # they change running statistics, which they don't read, and nothing else

KEEPS_SAVED = "scaled_dot_product_attention"  # its second result is not a tensor


@dataclass(frozen=True)
class OptionalTensors:
    """Which tensors get options: by default all that hold a 2,000th of what waits for one micro-batch's backward pass.

    If they are not 99% of all bytes that wait, smaller ones get options too, until they are.
    """

    repeat: bool = True
    wait: bool = True
    visit: bool = True
    smallest_share: float = 1 / 2000  # of the bytes that wait, or of the bytes of all parameters
    covered_share: float = 0.99  # of the bytes that wait
    near_share: float = 0.02  # of the time of the backward pass


@dataclass(frozen=True)
class Unit:
    """Ops of the forward pass that write the same storages, and so are repeated together."""

    ops: tuple[int, ...]  # in program order
    before: int  # the op before which they are repeated
    after: int  # the op that must have ended before
    draw: int = -1  # the op among them whose zeros and ones are kept as bytes


@dataclass(frozen=True)
class Visit:
    """One pass of one micro-batch through a resident tensor: its readers may read it from where it waits."""

    tensor: int
    micro_batch: int
    phase: int
    before: int  # the first op that reads it, or before which one that reads it is repeated
    after: int  # the op that must have ended before


@dataclass(frozen=True, eq=False)
class Options:
    """The options of a graph."""

    waiting: tuple[int, ...]  # storages that may wait elsewhere, in the order of their last forward readers
    repeated: tuple[Unit, ...]  # in the order in which they are repeated
    visits: tuple[Visit, ...]
    late_readers: dict[int, tuple[int, ...]]  # storage -> its readers in the backward pass


def find_options(graph: Graph, choice: OptionalTensors) -> Options:
    """Returns which tensors of a graph get options."""
    facts = _Facts(graph)
    smallest = _smallest(facts, choice)
    large = [s for s in facts.late_readers if facts.nbytes[s] >= smallest]
    repeated = _repeated(facts, large, choice.near_share) if choice.repeat else []
    waiting = [s for s in large if not facts.is_saved(s)] if choice.wait else []
    return Options(
        tuple(sorted(waiting, key=lambda s: (facts.last_early_use(s), s))),
        tuple(repeated),
        tuple(_visits(facts, repeated, choice.smallest_share)) if choice.visit else (),
        facts.late_readers,
    )


def _smallest(facts: "_Facts", choice: OptionalTensors) -> float:
    """Returns the bytes of the smallest tensor that gets options."""
    sizes = np.array(sorted(facts.nbytes[s] for s in facts.late_readers), np.int64)[::-1]
    total, count = int(sizes.sum()), max(len({n for n in facts.micro_batches if n >= 0}), 1)
    covering = sizes[np.searchsorted(np.cumsum(sizes), choice.covered_share * total)] if total else 0
    return max(1.0, min(choice.smallest_share * total / count, float(covering)))


class _Facts:
    """What is asked about a graph again and again, as lists."""

    def __init__(self, graph: Graph) -> None:
        o, t = graph.ops, graph.tensors
        self.graph = graph
        self.phases: list[int] = o.phases.tolist()
        self.micro_batches: list[int] = o.micro_batches.tolist()
        self.kinds = o.kinds
        self.reads, self.writes = o.reads.lists(), o.writes.lists()
        self.nbytes: list[int] = t.nbytes.tolist()
        self.producer: list[int] = graph.producer.tolist()
        self.storage: list[int] = graph.storage.tolist()
        self.writers: dict[int, list[int]] = {}  # storage -> the ops that write it
        self.readers: dict[int, list[int]] = {}  # storage -> the ops that read it
        for n in range(len(o)):
            for tensor in dict.fromkeys(self.storage[t] for t in self.reads[n]):
                self.readers.setdefault(tensor, []).append(n)
            for tensor in dict.fromkeys(self.storage[t] for t in self.writes[n]):
                self.writers.setdefault(tensor, []).append(n)
        self.newest = list(range(len(t)))  # [storages], the tensor with the last value
        for tensor in range(len(t)):
            if self.producer[tensor] >= self.producer[self.newest[self.storage[tensor]]]:
                self.newest[self.storage[tensor]] = tensor
        self.kept = {self.storage[tensor] for tensor in graph.outputs.tolist()}

    @cached_property
    def late_readers(self) -> dict[int, tuple[int, ...]]:
        """The backward readers of every storage that one forward pass makes, and only they read from then on."""
        found = {}
        for storage, readers in self.readers.items():
            maker = self.producer[storage]
            if maker < 0 or self.phases[maker] != FORWARD or storage in self.kept:
                continue
            late = [n for n in readers if self.phases[n] != FORWARD]
            if late and self._is_settled(storage, late):
                found[storage] = tuple(late)
        return found

    def _is_settled(self, storage: int, late: list[int]) -> bool:
        """Whether a storage has its last value before the first of its late readers, and no other reader after that."""
        maker, newest = self.producer[storage], self.newest[storage]
        return (
            all(self.phases[n] == FORWARD for n in self.writers[storage])
            and all(self.micro_batches[n] == self.micro_batches[maker] for n in (*self.writers[storage], *late))
            and all(self.phases[n] == BACKWARD for n in late)
            and self.last_early_use(storage) < late[0]
            and all(t == newest for n in late for t in self.reads[n] if self.storage[t] == storage)
        )

    def last_early_use(self, storage: int) -> int:
        """Returns the last op of the forward pass that reads or writes a storage."""
        users: list[int] = [*self.readers.get(storage, []), *self.writers[storage]]
        return max(n for n in users if self.phases[n] == FORWARD)

    def is_saved(self, storage: int) -> bool:
        """Whether a storage stands for what attention keeps for its own backward pass."""
        maker = self.producer[storage]
        return self.kinds[maker].endswith(KEEPS_SAVED) and self.writes[maker][0] != storage

    def is_changed(self, tensor: int, before: int) -> bool:
        """Whether a tensor's memory has another value just before an op than this tensor."""
        storage, maker = self.storage[tensor], self.producer[tensor]
        return any(maker < n < before for n in self.writers.get(storage, ()))

    def statistics(self, n: int) -> set[int]:
        """Returns the running statistics that an op changes: their storages."""
        if not STATISTICS.search(self.kinds[n]):
            return set()
        return {self.storage[t] for t in self.writes[n] if self.producer[self.storage[t]] < 0}

    @cached_property
    def blocks(self) -> list[str]:
        """The block of the model that each op is in: its module's path to the first number, or its first name."""
        found = []
        for n in range(len(self.phases)):
            names = module_path(self.graph, n).split(".")
            number = next((i for i, name in enumerate(names) if name.isdigit()), 0)
            found.append(".".join(names[: number + 1]))
        return found

    @cached_property
    def ends(self) -> list[float]:
        """The time from the step's start to each op's end, if one device ran all ops: [ops].

        Where the work of the ops is known, given times don't count: a profiled graph has the options of the captured one, so
        that its plan can be compiled.
        """
        untimed = nominal_seconds(replace(self.graph, ops=replace(self.graph.ops, seconds={})))
        seconds = untimed if untimed.any() else nominal_seconds(self.graph)
        return np.cumsum(seconds).tolist()  # type: ignore[no-any-return]

    def gate(self, before: int) -> int:
        """Returns the op after which something for this one may run: the last that makes a gradient which it reads."""
        made = [self.producer[t] for t in self.reads[before] if self.producer[t] >= 0]
        return max((n for n in made if self.phases[n] == BACKWARD), default=before - 1)


class _Units:
    """The ops of the forward pass, by unit."""

    def __init__(self, facts: _Facts) -> None:
        self.facts = facts
        first: dict[int, int] = {}  # storage -> the first op that writes it
        pairs = [
            (first.setdefault(facts.storage[t], n), n)
            for n, writes in enumerate(facts.writes)
            for t in writes
            if facts.producer[facts.storage[t]] >= 0
        ]
        self.of_op = connected_components(len(facts.phases), pairs).tolist()
        self.ops: list[list[int]] = [[] for _ in range(max(self.of_op, default=-1) + 1)]
        for n, unit in enumerate(self.of_op):
            self.ops[unit].append(n)

    def can_repeat(self, unit: int) -> bool:
        """Whether the ops of a unit would make the same again."""
        facts, ops = self.facts, self.ops[unit]
        draw = self.draw(unit)
        for n in ops:
            changed = {facts.storage[t] for t in facts.writes[n] if facts.producer[facts.storage[t]] < 0}
            is_random = n != draw and RANDOM.search(facts.kinds[n].rpartition(".")[2])
            if facts.phases[n] != FORWARD or is_random or not facts.writes[n]:
                return False
            if changed - facts.statistics(n) or facts.micro_batches[n] != facts.micro_batches[ops[0]]:
                return False
        return True

    def draw(self, unit: int) -> int:
        """Returns the op of a unit that draws zeros and ones, a flop for each, -1 if there is none."""
        facts = self.facts
        draws = [n for n in self.ops[unit] if facts.kinds[n] == DRAW]
        if len(draws) != 1 or len(facts.writes[draws[0]]) != 1:  # a second tensor that it writes is the generator's state
            return -1
        (written,) = facts.writes[draws[0]]
        is_known = 0 < facts.graph.ops.flops[draws[0]] <= facts.nbytes[written]
        return draws[0] if is_known and facts.graph.tensors.alias_of[written] >= 0 else -1

    def inputs(self, unit: int) -> list[int]:
        """Returns the tensors that a repeated unit reads and does not make itself, each once."""
        facts = self.facts
        found: dict[int, None] = {}
        draw = self.draw(unit)
        for n in self.ops[unit]:
            if n == draw:
                continue
            statistics = facts.statistics(n)
            for t in facts.reads[n]:
                maker = facts.producer[facts.storage[t]]
                if facts.storage[t] not in statistics and not (maker >= 0 and self.of_op[maker] == unit):
                    found[t] = None
        return list(found)


def _repeated(facts: _Facts, large: Sequence[int], near_share: float) -> list[Unit]:
    """Returns the units that may be repeated, each before the first op that needs it."""
    units = _Units(facts)
    of_large = {units.of_op[facts.producer[s]] for s in large}
    before: dict[int, int] = {}  # unit -> the op before which it is repeated
    own: dict[int, int] = {}  # unit -> its first late reader
    for storage, late in facts.late_readers.items():
        unit = units.of_op[facts.producer[storage]]
        own[unit] = min(late[0], own.get(unit, late[0]))
    for unit in of_large:
        before[unit] = own[unit]
    ends, backward = facts.ends, [n for n, phase in enumerate(facts.phases) if phase == BACKWARD]
    near = near_share * (ends[backward[-1]] - ends[backward[0]]) if backward else 0.0
    found = []
    for unit in sorted(range(len(units.ops)), key=lambda u: -units.ops[u][-1]):
        if unit not in before or not units.can_repeat(unit):
            continue
        place, ops, inputs = before[unit], units.ops[unit], units.inputs(unit)
        makers = {t: units.of_op[facts.producer[facts.storage[t]]] for t in inputs if facts.producer[facts.storage[t]] >= 0}
        if any(facts.is_changed(t, place) for t in inputs):
            continue
        if any(units.ops[maker][-1] >= ops[-1] for maker in makers.values()):
            continue  # what it reads is written again after that
        found.append(Unit(tuple(ops), place, facts.gate(place), units.draw(unit)))
        for maker in makers.values():
            needed = own.get(maker, place)
            is_near = ends[needed] - ends[place] <= near or facts.blocks[units.ops[maker][-1]] == facts.blocks[ops[0]]
            if needed <= place or is_near:
                before[maker] = min(place, before.get(maker, place))
    return sorted(found, key=lambda unit: (unit.before, unit.ops[-1]))


def _visits(facts: _Facts, repeated: Sequence[Unit], smallest_share: float) -> list[Visit]:
    """Returns who reads the large parameters and buffers, except for the first pass that reads each of them."""
    kinds = facts.graph.tensors.kinds.tolist()
    own = [TENSOR_KINDS.index(kind) for kind in ("parameter", "buffer", "constant")]
    residents = [t for t, maker in enumerate(facts.producer) if maker < 0 and facts.storage[t] == t and kinds[t] in own]
    total = sum(facts.nbytes[t] for t in residents)
    again: dict[int, list[int]] = {}  # tensor -> the ops before which its readers are repeated
    for unit in repeated:
        for tensor in dict.fromkeys(t for n in unit.ops for t in facts.reads[n] if facts.producer[t] < 0):
            again.setdefault(tensor, []).append(unit.before)
    found = []
    for tensor in residents:
        if facts.nbytes[tensor] < max(1, smallest_share * total):
            continue
        passes: dict[tuple[int, int], int] = {}  # (micro-batch, phase) -> the first op
        for n in facts.readers.get(tensor, ()):
            if tensor in facts.reads[n] and facts.phases[n] != UPDATE and n not in facts.writers.get(tensor, ()):
                passes.setdefault((facts.micro_batches[n], facts.phases[n]), n)
        for n in again.get(tensor, ()):
            key = facts.micro_batches[n], facts.phases[n]
            passes[key] = min(n, passes.get(key, n))
        for (micro_batch, phase), n in sorted(passes.items(), key=lambda entry: entry[1])[1:]:
            found.append(Visit(tensor, micro_batch, phase, n, facts.gate(n)))
    return sorted(found, key=lambda visit: (visit.before, visit.tensor))
