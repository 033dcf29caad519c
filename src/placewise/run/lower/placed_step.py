"""A captured step with its instructions, on the devices of this machine: all that the lanes are written from."""

from dataclasses import dataclass
from functools import cached_property

from placewise.core.arrays import Ints
from placewise.graph_capture.call_slots import slots_of
from placewise.graph_capture.program import Slot
from placewise.graph_capture.resolved_program import HOST_VALUE, ResolvedProgram, is_random
from placewise.rewrite.augmented_program import wait, wait_together
from placewise.run.devices import RealDevice
from placewise.run.lower.instructions import CopyTensor, FreeTensor, Instructions, RunOp
from placewise.run.lower.waits import Waits, plan_waits

Far = frozenset[tuple[str, str | int]]  # (name, "") of a parameter or buffer, (name, key) of a state


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
    def far(self) -> Far:
        """The parameters, buffers and states that another process keeps."""
        homes = self.tensor_devices.tolist()
        return frozenset(
            (resident.name, resident.key if resident.kind == "state" else "")
            for resident in self.resolved.program.residents
            if resident.kind in ("parameter", "buffer", "state") and resident.tensor >= 0
            if self.is_remote[homes[resident.tensor]]
        )

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
        return plan_waits(
            self.resolved.graph, self.instructions, self.launches_from_host, self.random_ops, self.is_remote,
            frozenset(self.held_ops),
        )  # fmt: skip

    @cached_property
    def held_ops(self) -> dict[int, int]:
        """The ops that let a tensor wait in the host's memory for devices that the host launches on: op -> that tensor.

        The host keeps it for them, and no thread has to: it comes from such a device or is resident, and only copies to
        such devices read it.
        """
        graph, from_host, homes = self.resolved.graph, self.launches_from_host, self.tensor_devices.tolist()
        if any(self.is_remote):
            return {}
        users: dict[tuple[int, int], list[int]] = {}  # (tensor, device) -> the ops that read it there
        devices: dict[int, int] = {}
        copied: dict[int, list[int]] = {}  # tensor -> the devices that it is copied to
        for instruction in self.instructions.sequence:
            if isinstance(instruction, RunOp):
                devices[instruction.op] = instruction.device
                for tensor in graph.ops.reads[instruction.op].tolist():
                    users.setdefault((tensor, instruction.device), []).append(instruction.op)
            elif isinstance(instruction, CopyTensor):
                copied.setdefault(instruction.tensor, []).append(instruction.target)
        waiting = [op for op, call in enumerate(self.resolved.op_calls) if call.function in (wait, wait_together)]
        found = {}
        for op in waiting:
            device, (read,), (made,) = devices[op], graph.ops.reads[op].tolist(), graph.ops.writes[op].tolist()
            is_kept = not from_host[device] and (made, device) not in users and made not in graph.outputs
            comes_back = all(from_host[target] for target in copied.get(made, ()))
            is_resident = homes[read] == device and graph.producer[read] < 0
            if is_kept and comes_back and (is_resident or from_host[homes[read]]):
                found[op] = read
        shared = {op for op in found for other in users[found[op], devices[op]] if other not in found}
        return {op: read for op, read in found.items() if op not in shared or homes[read] == devices[op]}

    @cached_property
    def held(self) -> frozenset[tuple[int, int]]:
        """What the host itself keeps in its memory: (tensor, device), of tensors that wait and of copies."""
        graph, homes = self.resolved.graph, self.tensor_devices.tolist()
        found = set()
        for op, read in self.held_ops.items():
            (made,) = graph.ops.writes[op].tolist()
            found.add((made, homes[made]))
            if homes[read] != homes[made]:
                found.add((read, homes[made]))
        return frozenset(found)

    def resident_of(self, tensor: int) -> int:
        """Returns the resident tensor that one which the host keeps there is, or else the tensor itself."""
        read = self.held_ops.get(int(self.resolved.graph.producer[tensor]))
        if (
            read is None
            or self.resolved.graph.producer[read] >= 0
            or self.tensor_devices[read] != self.tensor_devices[tensor]
        ):
            return tensor
        return read

    @cached_property
    def last_reads(self) -> frozenset[int]:
        """The instructions that the host waits for at the end, because they copy what the caller may change then.

        They are the last of each channel that copy a pinned tensor which the step does not write.
        """
        last: dict[tuple[int, int], int] = {}
        storages, written = self.resolved.graph.storage.tolist(), self.resolved.written_storages
        for number, copy in enumerate(self.instructions.sequence):
            tensor = self.resident_of(copy.tensor) if isinstance(copy, CopyTensor) else -1
            if isinstance(copy, CopyTensor) and tensor in self.pinned and storages[tensor] not in written:
                last[copy.source, copy.target] = number
        return frozenset(last.values())

    @cached_property
    def pinned(self) -> frozenset[int]:
        """The model's own tensors that stay in pinned memory: a thread's, which the host copies.

        If the step writes them, the op that does runs after all ops that read, and so after the copies. If it doesn't, the
        host waits for the last copies. Any other tensor of a thread is pinned for each copy, because the caller may write
        it while that is still running.
        """
        own = {r.tensor for r in self.resolved.program.residents if r.kind in ("parameter", "buffer")}
        storages, from_host, held = self.resolved.graph.storage.tolist(), self.launches_from_host, self.held
        return frozenset(
            tensor
            for copy in self.instructions.sequence
            if isinstance(copy, CopyTensor) and from_host[copy.target] and not from_host[copy.source]
            if not self.is_remote[copy.source]
            if (tensor := self.resident_of(copy.tensor)) in own
            if storages[tensor] in self.resolved.written_storages or (copy.tensor, copy.source) in held
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
        is_made = bool(self.resolved.graph.producer[copy.tensor] >= 0) and not self.is_remote[copy.target]
        return is_made and not self.launches_from_host[copy.source] and (copy.tensor, copy.source) not in self.held

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
