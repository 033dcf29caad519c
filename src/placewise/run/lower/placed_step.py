"""A captured step with its instructions, on the devices of this machine: all that the lanes are written from."""

from dataclasses import dataclass
from functools import cached_property

from placewise.core.arrays import Ints
from placewise.graph_capture.program import Slot
from placewise.graph_capture.resolved_program import HOST_VALUE, ResolvedProgram, is_random, slots_of
from placewise.run.devices import RealDevice
from placewise.run.lower.instructions import CopyTensor, FreeTensor, Instructions, RunOp
from placewise.run.lower.waits import Waits, plan_waits


@dataclass(frozen=True, eq=False)
class PlacedStep:
    """A captured step with its instructions, on the devices of this machine."""

    resolved: ResolvedProgram
    instructions: Instructions
    tensor_devices: Ints  # [tensors], the device that each is made on, or is resident on
    devices: tuple[RealDevice, ...]
    whole: Instructions | None = None  # of all ranks, if the instructions are one rank's part

    @cached_property
    def is_remote(self) -> tuple[bool, ...]:
        """Whether another process runs each device: [devices]."""
        return tuple(device.rank is not None for device in self.devices)

    @cached_property
    def random_ops(self) -> frozenset[int]:
        """The ops that draw random numbers."""
        return frozenset(op for op, call in enumerate(self.resolved.op_calls) if is_random(call))

    @cached_property
    def launches_from_host(self) -> tuple[bool, ...]:
        """Whether the host launches the ops of each device: [devices]."""
        return tuple(device.launches_from_host for device in self.devices)

    @cached_property
    def waits(self) -> Waits:
        """What has to wait for what."""
        return plan_waits(self.resolved.graph, self.instructions, self.launches_from_host, self.random_ops, self.is_remote)

    @cached_property
    def pinned(self) -> frozenset[int]:
        """The model's own tensors that stay in pinned memory: the step writes them on a thread, and the host copies them.

        An op that writes runs after all ops that read, and so after the copies. Any other tensor of a thread is pinned for
        each copy, because the caller may write it while that is still running.
        """
        own = {r.tensor for r in self.resolved.program.residents if r.kind in ("parameter", "buffer")}
        storages, from_host = self.resolved.graph.storage.tolist(), self.launches_from_host
        return frozenset(
            copy.tensor
            for copy in self.instructions.sequence
            if isinstance(copy, CopyTensor) and copy.tensor in own and from_host[copy.target] and not from_host[copy.source]
            if storages[copy.tensor] in self.resolved.written_storages
        )

    @cached_property
    def first_gated(self) -> int | None:
        """The number of the first instruction that runs only if the program's gate is open; None without a gate."""
        gate = self.resolved.program.gate
        if gate is None:
            return None
        sequence = self.instructions.sequence
        number = max((n for n, s in enumerate(sequence) if isinstance(s, RunOp) and s.op < gate.first_op), default=-1) + 1
        while number < len(sequence) and isinstance(sequence[number], FreeTensor):
            number += 1
        return number

    def is_handed_over(self, copy: CopyTensor) -> bool:
        """Whether an op on a thread makes what is copied, and so puts it into the mailbox."""
        return not self.launches_from_host[copy.source] and bool(self.resolved.graph.producer[copy.tensor] >= 0)

    @cached_property
    def copied_bases(self) -> dict[tuple[int, int], tuple[Slot, ...]]:
        """For each (tensor, device) that is copied: the slots that its readers' views start from."""
        tensor_devices, storages = self.tensor_devices.tolist(), self.resolved.storages
        found: dict[tuple[int, int], dict[Slot, None]] = {}
        for instruction in (self.whole or self.instructions).sequence:
            if isinstance(instruction, RunOp):
                versions = self.resolved.read_versions[instruction.op]
                for slot in slots_of(self.resolved.op_calls[instruction.op]):
                    if storages[slot] != HOST_VALUE and tensor_devices[versions[storages[slot]]] != instruction.device:
                        key = (versions[storages[slot]], instruction.device)
                        found.setdefault(key, {})[self.resolved.base_of(slot)] = None
        return {key: tuple(bases) for key, bases in found.items()}
