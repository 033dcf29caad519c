"""Checks instructions against their graph.

Tests run it on what the lowering makes. It shares no code with the lowering, so that it does not share its mistakes.
"""

import numpy as np

from placewise.core.arrays import Ints, frozen
from placewise.core.errors import PlanError
from placewise.core.graph import Graph
from placewise.run.lower.instructions import CopyTensor, FreeTensor, Instructions, RunOp


class _Memory:
    """What each device holds, while the instructions are followed one after the other."""

    def __init__(self, graph: Graph, tensor_devices: list[int], num_devices: int) -> None:
        self.graph, self.tensor_devices = graph, tensor_devices
        self.storages = graph.storage.tolist()
        self.sizes = graph.tensors.nbytes.tolist()
        self.makers = graph.producer.tolist()
        self.used = [0] * num_devices
        self.copies: set[tuple[int, int]] = set()  # (tensor, device) that is there now
        self.were_copied: set[tuple[int, int]] = set()
        self.made: set[int] = set()  # storages that exist now
        self.freed: set[int] = set()
        self.ran: set[int] = set()
        for tensor, maker in enumerate(self.makers):
            if maker < 0 and self.storages[tensor] == tensor:
                self.used[tensor_devices[tensor]] += self.sizes[tensor]

    def holds(self, tensor: int, device: int) -> bool:
        """Whether the value of a tensor is on a device."""
        if device != self.tensor_devices[tensor]:
            return (tensor, device) in self.copies
        is_written = self.makers[tensor] < 0 or self.makers[tensor] in self.ran
        return is_written and self.storages[tensor] not in self.freed

    def run(self, instruction: RunOp) -> str:
        ops = self.graph.ops
        if instruction.op >= len(ops) or instruction.op in self.ran:
            return "there is no such op" if instruction.op >= len(ops) else "the op has already run"
        for tensor in ops.reads[instruction.op].tolist():
            if not self.holds(tensor, instruction.device):
                return f"input {tensor} {self.graph.tensors.names[tensor]!r} is not on the device"
        for op in ops.after[instruction.op].tolist():
            if op not in self.ran:
                return f"op {op} {ops.names[op]!r} must have run before it"
        for tensor in ops.writes[instruction.op].tolist():
            if self.tensor_devices[tensor] != instruction.device:
                return f"it writes tensor {tensor}, which belongs to another device"
            if self.storages[tensor] in self.freed:
                return f"it writes the memory of tensor {self.storages[tensor]}, which was freed"
            if self.storages[tensor] == tensor:
                self.made.add(tensor)
                self.used[instruction.device] += self.sizes[tensor]
        self.ran.add(instruction.op)
        return ""

    def copy(self, instruction: CopyTensor) -> str:
        if instruction.tensor >= len(self.sizes) or instruction.source == instruction.target:
            return "there is no such tensor" if instruction.tensor >= len(self.sizes) else "it copies to its own source"
        if instruction.source != self.tensor_devices[instruction.tensor] or not self.holds(
            instruction.tensor, instruction.source
        ):
            return "the tensor is not on its source"
        was_copied = (instruction.tensor, instruction.target) in self.were_copied
        if was_copied or instruction.target == self.tensor_devices[instruction.tensor]:
            return "the tensor is on its target, or has been copied there before"
        self.copies.add((instruction.tensor, instruction.target))
        self.were_copied.add((instruction.tensor, instruction.target))
        self.used[instruction.target] += self.sizes[instruction.tensor]
        return ""

    def free(self, instruction: FreeTensor) -> str:
        if instruction.tensor >= len(self.sizes):
            return "there is no such tensor"
        if (instruction.tensor, instruction.device) in self.copies:
            self.copies.remove((instruction.tensor, instruction.device))
        elif instruction.device == self.tensor_devices[instruction.tensor] and instruction.tensor in self.made:
            if instruction.tensor in self.kept:
                return "it holds an output, which is kept to the end"
            self.made.remove(instruction.tensor)
            self.freed.add(instruction.tensor)
        else:
            return "there is nothing to free: the tensor is resident, freed, or was never on the device"
        self.used[instruction.device] -= self.sizes[instruction.tensor]
        return ""

    @property
    def kept(self) -> set[int]:
        return {self.storages[tensor] for tensor in self.graph.outputs.tolist()}

    def unfinished(self) -> str:
        if len(self.ran) < len(self.graph.ops):
            return f"op {min(set(range(len(self.graph.ops))) - self.ran)} never runs"
        if self.copies:
            return "the copy of tensor {} on device {} is never freed".format(*min(self.copies))
        if rest := self.made - self.kept:
            return f"the memory of tensor {min(rest)} is never freed"
        return ""


def check_instructions(graph: Graph, tensor_devices: Ints, instructions: Instructions) -> Ints:
    """Returns the bytes in use on each device at each launch of an op: [ops, devices].

    `tensor_devices` [tensors] is the device that each tensor is made on, or is resident on. A PlanError names the first
    instruction that breaks a rule: an op's inputs are on its device when it is launched; a tensor is copied to a device
    once; every storage that the step makes, and every copy, is freed once; storages of residents and outputs are never
    freed.
    """
    memory = _Memory(graph, np.asarray(tensor_devices).tolist(), len(instructions.device_names))
    usage = []
    for number, instruction in enumerate(instructions.sequence):
        match instruction:
            case RunOp():
                problem = memory.run(instruction)
                usage.append(list(memory.used))
            case CopyTensor():
                problem = memory.copy(instruction)
            case FreeTensor():
                problem = memory.free(instruction)
        if problem:
            raise PlanError(f"instruction {number} {instruction}: {problem}")
    if problem := memory.unfinished():
        raise PlanError(f"instructions: {problem}")
    return frozen(np.array(usage, np.int64).reshape(-1, len(instructions.device_names)), np.int64)
