"""A problem as plain lists, and its longest paths."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf

from placewise.core.problem import Problem


@dataclass(frozen=True, eq=False)
class PlainProblem:
    """A problem, and what the checks need to know about it."""

    problem: Problem

    @cached_property
    def devices(self) -> range:
        """All devices."""
        return range(self.problem.num_devices)

    @cached_property
    def groups(self) -> list[int]:
        """Each op's group."""
        return list(map(int, self.problem.op_groups))

    @cached_property
    def seconds(self) -> list[list[float]]:
        """Each op's time on each device, infinite where its group may not be."""
        allowed, times = self.problem.allowed.tolist(), self.problem.op_seconds.tolist()
        return [[t if ok else inf for t, ok in zip(times[n], allowed[g], strict=True)] for n, g in enumerate(self.groups)]

    @cached_property
    def inputs(self) -> list[dict[int, tuple[int, int]]]:
        """For each op, the ops that it waits for, with the number and the bytes of the tensors that it reads from them."""
        graph = self.problem.graph
        producer, nbytes = graph.producer.tolist(), graph.tensors.nbytes.tolist()
        inputs: list[dict[int, tuple[int, int]]] = []
        for reads, after in zip(graph.ops.reads.lists(), graph.ops.after.lists(), strict=True):
            row: dict[int, tuple[int, int]] = dict.fromkeys(after, (0, 0))
            for tensor in sorted(set(reads)):
                if producer[tensor] >= 0:
                    count, size = row.get(producer[tensor], (0, 0))
                    row[producer[tensor]] = count + 1, size + nbytes[tensor]
            inputs.append(row)
        return inputs

    @cached_property
    def outputs(self) -> list[list[int]]:
        """The ops that wait for each op."""
        outputs: list[list[int]] = [[] for _ in self.groups]
        for target, row in enumerate(self.inputs):
            for source in row:
                outputs[source].append(target)
        return outputs

    @cached_property
    def _latency(self) -> list[list[float]]:
        return [list(map(float, row)) for row in self.problem.cluster.latency_seconds]

    @cached_property
    def _rate(self) -> list[list[float]]:
        return [list(map(float, row)) for row in self.problem.cluster.bytes_per_second]

    def way(self, source: int, target: int, a: int, b: int) -> float:
        """Returns the time that the target's inputs take from the source on device a to the target on device b."""
        if a == b:
            return 0.0
        if self.groups[source] == self.groups[target]:
            return inf
        count, size = self.inputs[target][source]
        return count * self._latency[a][b] + size / self._rate[a][b]

    @cached_property
    def launches(self) -> list[float]:
        """The earliest launch of each op: after all ops that it depends on."""
        dispatch = self.problem.cluster.dispatch_seconds
        if not dispatch:
            return [0.0] * len(self.groups)
        before: list[int] = []  # sets of ops, as bits
        for row in self.inputs:
            bits = 0
            for source in row:
                bits |= before[source] | 1 << source
            before.append(bits)
        return [self.share(bits.bit_count() + 1) * dispatch for bits in before]

    def share(self, num_ops: int) -> int:
        """Returns how many of some ops one of the hosts launches at least."""
        return ceil(num_ops / len({device.host for device in self.problem.cluster.devices}))

    def arrival(self, op: int, device: int) -> float:
        """Returns the earliest time at which an op is launched and its resident inputs are on a device."""
        graph, allowed = self.problem.graph, self.problem.allowed
        latest = self.launches[op]
        for tensor in graph.ops.reads[op].tolist():
            if graph.producer[tensor] >= 0:
                continue
            home = int(graph.tensors.home[tensor])
            group = int(self.problem.merged[home]) if home >= 0 else self.groups[int(graph.first_reader[tensor])]
            if group == self.groups[op] or allowed[group, device]:
                continue
            size = int(graph.tensors.nbytes[tensor])
            ways = [self._latency[a][device] + size / self._rate[a][device] for a in self.devices if allowed[group, a]]
            latest = max(latest, min(ways))
        return latest

    def heads(self, ops: list[int]) -> dict[int, list[float]]:
        """Returns the earliest start of each op on each device when only these ops (in rising order) count."""
        arrivals = {op: [self.arrival(op, d) for d in self.devices] for op in ops}
        return self.heads_from(ops, list(self.devices), {op: self.seconds[op] for op in ops}, arrivals)

    def tails(self, ops: list[int]) -> dict[int, list[float]]:
        """Returns the least time after each op on each device when only these ops (in rising order) count."""
        return self.tails_from(ops, list(self.devices), {op: self.seconds[op] for op in ops})

    def heads_from(
        self, ops: list[int], devices: list[int], seconds: Mapping[int, list[float]], arrivals: Mapping[int, list[float]]
    ) -> dict[int, list[float]]:
        """Returns the earliest start of each op, op -> [devices], from its time and the earliest arrival of its inputs."""
        found: dict[int, list[float]] = {}
        for op in ops:
            row = list(arrivals[op])
            for source in self.inputs[op]:
                if source in found:
                    ends = [h + t for h, t in zip(found[source], seconds[source], strict=True)]
                    for i, d in enumerate(devices):
                        row[i] = max(row[i], min(e + self.way(source, op, a, d) for e, a in zip(ends, devices, strict=True)))
            found[op] = row
        return found

    def tails_from(self, ops: list[int], devices: list[int], seconds: Mapping[int, list[float]]) -> dict[int, list[float]]:
        """Returns the least time after each op: op -> [devices]."""
        found: dict[int, list[float]] = {}
        for op in reversed(ops):
            row = [0.0] * len(devices)
            for target in self.outputs[op]:
                if target in found:
                    rest = [q + t for q, t in zip(found[target], seconds[target], strict=True)]
                    for i, d in enumerate(devices):
                        row[i] = max(row[i], min(r + self.way(op, target, d, b) for r, b in zip(rest, devices, strict=True)))
            found[op] = row
        return found
