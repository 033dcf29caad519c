"""Which ops of a step CUDA graphs take over: stretches of one GPU that meet nobody on the way.

A graph finds everything at the addresses where it was recorded. So an op can be in one if all that it reads stays where it
is from step to step: the model's own tensors, copies into memory that is kept, and what other recorded ops make. It must
read no number of the host's that changes, and draw none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tag
from torch._ops import OpOverload

from placewise.graph_capture.program import Call
from placewise.run.codegen.host_scalar_code import HostScalars
from placewise.run.lower.instructions import Copy, Free, Run
from placewise.run.lower.placed_step import PlacedStep
from placewise.run.lower.slots import HOST, is_random, slots_of

FEWEST_OPS = 4  # of a stretch: the host launches a graph in the time of about one op, but recording many takes long

UNKNOWN_SIZES = (Tag.dynamic_output_shape, Tag.data_dependent_output)  # of ops that let the host wait for their values

INDEXED = (
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "_unsafe_index_put",
)  # by masks they do, too

WAITING = ("linalg_", "_linalg_")  # beginnings of names: the libraries behind these wait for what they have made


@dataclass(frozen=True)
class Segments:
    """The stretches of a step, and what they share with everything else."""

    ops: tuple[tuple[int, ...], ...]  # [stretches], in launch order; all on one device
    escaping: frozenset[int]  # storages that stretches make and others read
    copies: frozenset[tuple[int, int]]  # (tensor, target) that stretches read
    residents: frozenset[int]  # storages of residents that stretches read or change
    numbers: frozenset[int]  # of the host's, by their place in the list, that stretches read


def find_segments(placed: PlacedStep, numbers: HostScalars, changing: frozenset[int]) -> Segments:
    """Returns the stretches of a step; `changing` are the host's numbers that differ from step to step."""
    return _Finder(placed, numbers, changing).find()


class _Finder:
    def __init__(self, placed: PlacedStep, numbers: HostScalars, changing: frozenset[int]) -> None:
        self.placed, self.values, self.numbers = placed, placed.values, numbers
        self.homes, self.makers = placed.homes.tolist(), placed.values.graph.producer.tolist()
        self.is_gpu = [device.is_gpu for device in placed.devices]
        self.runs = [(i, s) for i, s in enumerate(placed.instructions.steps) if isinstance(s, Run) and self.is_gpu[s.device]]
        self.devices = {step.op: step.device for _, step in self.runs}
        self.moving = {  # storages of residents that are made anew in every step
            resident.tensor
            for resident in self.values.program.residents
            if resident.kind == "constant" and resident.tensor in self.values.written_storages
        }
        self.suits = {step.op: self._suits(step.op, changing) for _, step in self.runs}

    def find(self) -> Segments:
        while True:
            staying = self._staying()
            stretches = list(self._cut(staying))
            short = [op for stretch in stretches if len(stretch) < FEWEST_OPS for op in stretch]
            if not short:
                return self._described(stretches)
            for op in short:
                self.suits[op] = False

    # --- ops by themselves ---

    def _suits(self, op: int, changing: frozenset[int]) -> bool:
        call = self.values.op_calls[op]
        if not isinstance(call.function, OpOverload) or is_random(call):
            return False
        if self._lets_the_host_wait(call.function, call.args):
            return False
        return changing.isdisjoint(self._numbers(op, call))

    def _lets_the_host_wait(self, function: OpOverload, args: tuple[Any, ...]) -> bool:
        name = function._schema.name.partition("::")[2]
        if name not in INDEXED:
            return name.startswith(WAITING) or any(tag in function.tags for tag in UNKNOWN_SIZES)
        storages = [self.values.storages[index] for index in args[1] if index is not None]
        shapes = [None if storage == HOST else self.values.graph.tensors.shape_of(storage) for storage in storages]
        return any(shape is None or not shape.dtype.startswith("int") for shape in shapes)

    def _numbers(self, op: int, call: Call) -> list[int]:
        read = [slot for slot in slots_of(call) if self.values.storages[slot] == HOST]
        return [self.numbers.wanted[self.numbers.reads[op][slot]] for slot in read]

    def _reads(self, op: int) -> list[tuple[int, int]]:
        """Returns the (storage, tensor) of all that an op reads or changes."""
        storages = dict.fromkeys(self.values.storages[slot] for slot in slots_of(self.values.op_calls[op]))
        return [(storage, self.values.read_versions[op][storage]) for storage in storages if storage != HOST]

    def _staying(self) -> set[int]:
        """Returns the ops that suit, and read nothing that is at another address in every step."""
        staying: set[int] = set()
        for _, step in self.runs:
            if self.suits[step.op] and all(
                self.homes[tensor] != step.device  # a copy, into memory that is kept
                or (storage not in self.moving if self.makers[storage] < 0 else self.makers[storage] in staying)
                for storage, tensor in self._reads(step.op)
            ):
                staying.add(step.op)
        return staying

    # --- ops in a row ---

    def _cut(self, staying: set[int]) -> Iterator[tuple[int, ...]]:
        """Yields the ops of each stretch: it ends where its device meets another, and where the host itself waits."""
        waits, open_ops = self.placed.waits, dict[int, list[int]]()
        for number, step in enumerate(self.placed.instructions.steps):
            if isinstance(step, Free) or not any(self.is_gpu[device] for device in waits.queues[number]):
                continue  # no launch of the host's
            needs = [waits.queues[need] for need in waits.before[number]]
            ending: list[int] = []
            is_pinned = isinstance(step, Copy) and self.placed.is_handed_over(step)  # the host may know that it is made
            if is_pinned or any(not any(self.is_gpu[device] for device in queue) for queue in needs):
                ending = list(open_ops)  # the host waits for a CPU device: what can be launched is launched before
            elif isinstance(step, Copy) or needs or step.op not in staying:
                ending = [step.source if isinstance(step, Copy) else step.device]
            for device in ending:
                yield from _end(open_ops, device)
            if isinstance(step, Run) and step.op in staying:
                open_ops.setdefault(step.device, []).append(step.op)
                if number in waits.awaited:
                    yield from _end(open_ops, step.device)
        for device in list(open_ops):
            yield from _end(open_ops, device)

    def _described(self, stretches: list[tuple[int, ...]]) -> Segments:
        inside = {op for stretch in stretches for op in stretch}
        storages = self.values.graph.storage.tolist()
        outside = {self.values.storages[slot] for slot in self.values.program.outputs}
        outside |= {storages[step.tensor] for step in self.placed.instructions.steps if isinstance(step, Copy)}
        outside |= {storage for _, step in self.runs if step.op not in inside for storage, _ in self._reads(step.op)}
        read = [(self.devices[op], *pair) for op in inside for pair in self._reads(op)]
        at_home = {storage for device, storage, tensor in read if self.homes[tensor] == device}
        return Segments(
            tuple(stretches),
            frozenset(storage for storage in outside if storage != HOST and self.makers[storage] in inside),
            frozenset((tensor, device) for device, _, tensor in read if self.homes[tensor] != device),
            frozenset(storage for storage in at_home if self.makers[storage] < 0),
            frozenset(number for op in inside for number in self._numbers(op, self.values.op_calls[op])),
        )


def _end(open_ops: dict[int, list[int]], device: int) -> Iterator[tuple[int, ...]]:
    if ops := open_ops.pop(device, None):
        yield tuple(ops)
