"""Checks instructions against the graph that they are for; it shares no code with the lowering."""

import numpy as np

from placewise.core.arrays import Ints, frozen
from placewise.core.errors import PlanError
from placewise.core.graph import Graph
from placewise.run.lower.instructions import Copy, Free, Instructions, Run


class _Memory:
    """What each device holds while the instructions are read one after the other."""

    def __init__(self, graph: Graph, homes: list[int], num_devices: int) -> None:
        self.graph, self.homes = graph, homes
        self.storages = graph.storage.tolist()
        self.sizes = graph.tensors.nbytes.tolist()
        self.makers = graph.producer.tolist()
        self.used = [0] * num_devices
        self.copies: set[tuple[int, int]] = set()  # (tensor, device): there now
        self.were_copied: set[tuple[int, int]] = set()
        self.made: set[int] = set()  # storages that are there now
        self.freed: set[int] = set()
        self.ran: set[int] = set()
        for tensor, maker in enumerate(self.makers):
            if maker < 0 and self.storages[tensor] == tensor:
                self.used[homes[tensor]] += self.sizes[tensor]

    def holds(self, tensor: int, device: int) -> bool:
        """Whether a tensor's value is on a device."""
        if device != self.homes[tensor]:
            return (tensor, device) in self.copies
        is_written = self.makers[tensor] < 0 or self.makers[tensor] in self.ran
        return is_written and self.storages[tensor] not in self.freed

    def run(self, step: Run) -> str:
        ops = self.graph.ops
        if step.op >= len(ops) or step.op in self.ran:
            return "there is no such op" if step.op >= len(ops) else "the op has run already"
        for tensor in ops.reads[step.op].tolist():
            if not self.holds(tensor, step.device):
                return f"input {tensor} {self.graph.tensors.names[tensor]!r} is not there"
        for op in ops.after[step.op].tolist():
            if op not in self.ran:
                return f"op {op} {ops.names[op]!r} must have run before it"
        for tensor in ops.writes[step.op].tolist():
            if self.homes[tensor] != step.device:
                return f"it writes tensor {tensor}, whose home is another device"
            if self.storages[tensor] in self.freed:
                return f"it writes the memory of tensor {self.storages[tensor]}, which was freed"
            if self.storages[tensor] == tensor:
                self.made.add(tensor)
                self.used[step.device] += self.sizes[tensor]
        self.ran.add(step.op)
        return ""

    def copy(self, step: Copy) -> str:
        if step.tensor >= len(self.sizes) or step.source == step.target:
            return "there is no such tensor" if step.tensor >= len(self.sizes) else "its source is its target"
        if step.source != self.homes[step.tensor] or not self.holds(step.tensor, step.source):
            return "the tensor is not at its source"
        if (step.tensor, step.target) in self.were_copied or step.target == self.homes[step.tensor]:
            return "the tensor is there already, or was"
        self.copies.add((step.tensor, step.target))
        self.were_copied.add((step.tensor, step.target))
        self.used[step.target] += self.sizes[step.tensor]
        return ""

    def free(self, step: Free) -> str:
        if step.tensor >= len(self.sizes):
            return "there is no such tensor"
        if (step.tensor, step.device) in self.copies:
            self.copies.remove((step.tensor, step.device))
        elif step.device == self.homes[step.tensor] and step.tensor in self.made:
            if step.tensor in self.kept:
                return "it holds an output, which lives to the end"
            self.made.remove(step.tensor)
            self.freed.add(step.tensor)
        else:
            return "there is nothing of the tensor to free: it is resident, freed, or was never there"
        self.used[step.device] -= self.sizes[step.tensor]
        return ""

    @property
    def kept(self) -> set[int]:
        return {self.storages[tensor] for tensor in self.graph.outputs.tolist()}

    def leftover(self) -> str:
        if len(self.ran) < len(self.graph.ops):
            return f"op {min(set(range(len(self.graph.ops))) - self.ran)} never runs"
        if self.copies:
            return "the copy of tensor {} on device {} is never freed".format(*min(self.copies))
        if rest := self.made - self.kept:
            return f"the memory of tensor {min(rest)} is never freed"
        return ""


def check_instructions(graph: Graph, homes: Ints, instructions: Instructions) -> Ints:
    """Returns the bytes in use on each device at each launch of an op: [ops, devices].

    `homes` [tensors] is the device where each tensor comes into being. A PlanError names the first instruction that
    breaks a rule: an op's inputs are on its device when it is launched, a tensor is copied to a device once, every
    storage that the step makes and every copy is freed once, resident storages and those of outputs never.
    """
    memory = _Memory(graph, np.asarray(homes).tolist(), len(instructions.device_names))
    usage = []
    for number, step in enumerate(instructions.steps):
        match step:
            case Run():
                problem = memory.run(step)
                usage.append(list(memory.used))
            case Copy():
                problem = memory.copy(step)
            case Free():
                problem = memory.free(step)
        if problem:
            raise PlanError(f"instruction {number} {step}: {problem}")
    if problem := memory.leftover():
        raise PlanError(f"instructions: {problem}")
    return frozen(np.array(usage, np.int64).reshape(-1, len(instructions.device_names)), np.int64)
