"""A captured step with its instructions, on real devices: what the lanes are written from."""

from dataclasses import dataclass
from functools import cached_property

from placewise.core.arrays import Ints
from placewise.graph_capture.program import Slot
from placewise.run.devices import RealDevice
from placewise.run.lower.instructions import Copy, Instructions, Run
from placewise.run.lower.slots import HOST, Slots, is_random, slots_of
from placewise.run.lower.waits import Waits, plan_waits


@dataclass(frozen=True, eq=False)
class PlacedStep:
    """A captured step with its instructions, on real devices."""

    values: Slots
    instructions: Instructions
    homes: Ints  # [tensors], the device where each comes into being
    devices: tuple[RealDevice, ...]

    @cached_property
    def waits(self) -> Waits:
        """What has to wait for what."""
        random_ops = frozenset(op for op, call in enumerate(self.values.op_calls) if is_random(call))
        return plan_waits(self.values.graph, self.instructions, [d.is_gpu for d in self.devices], random_ops)

    @cached_property
    def pinned(self) -> frozenset[int]:
        """The model's own tensors that stay in pinned memory: those of CPU devices that GPUs copy and the step writes.

        An op that writes runs behind all that read, and so behind the copies. Any other tensor of a CPU device is pinned for
        each copy: the caller may write it while that is still under way.
        """
        own = {r.tensor for r in self.values.program.residents if r.kind in ("parameter", "buffer")}
        storages, is_gpu = self.values.graph.storage.tolist(), [device.is_gpu for device in self.devices]
        return frozenset(
            step.tensor
            for step in self.instructions.steps
            if isinstance(step, Copy) and step.tensor in own and is_gpu[step.target] and not is_gpu[step.source]
            if storages[step.tensor] in self.values.written_storages
        )

    def is_handed_over(self, copy: Copy) -> bool:
        """Whether an op of a CPU device makes what is copied, and hands it to those who copy."""
        return not self.devices[copy.source].is_gpu and bool(self.values.graph.producer[copy.tensor] >= 0)

    @cached_property
    def copied_bases(self) -> dict[tuple[int, int], tuple[Slot, ...]]:
        """For each (tensor, device) that is copied: the windows that its readers there start from."""
        homes, storages = self.homes.tolist(), self.values.storages
        found: dict[tuple[int, int], dict[Slot, None]] = {}
        for step in self.instructions.steps:
            if isinstance(step, Run):
                versions = self.values.read_versions[step.op]
                for slot in slots_of(self.values.op_calls[step.op]):
                    if storages[slot] != HOST and homes[versions[storages[slot]]] != step.device:
                        key = (versions[storages[slot]], step.device)
                        found.setdefault(key, {})[self.values.base_of(slot)] = None
        return {key: tuple(bases) for key, bases in found.items()}
