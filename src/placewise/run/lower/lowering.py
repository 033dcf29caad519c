"""Lowers a placement and an order to the instructions of one step, exactly as the simulator understands them."""

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.problem import Problem
from placewise.run.lower.instructions import CopyTensor, FreeTensor, Instruction, Instructions, RunOp
from placewise.simulate.flat_problem import tensor_groups


def tensor_devices(problem: Problem, placement: Ints) -> Ints:
    """Returns the device that each tensor is made on, or is resident on; an unused one is on device 0: [tensors]."""
    groups = tensor_groups(problem)
    return np.where(groups >= 0, np.append(placement, 0)[groups], 0)


def lower(problem: Problem, placement: Ints, order: Ints | None = None) -> Instructions:
    """Returns the instructions of a placement [groups], launched in an order [ops] or in program order.

    A tensor is copied to a device once, just before its first reader there. A storage that the step makes is freed after
    its last use, a copy after its last reader.
    """
    launches = list(range(problem.num_ops)) if order is None else np.asarray(order).tolist()
    op_devices = np.asarray(placement)[problem.op_groups].tolist()
    device_of = tensor_devices(problem, placement).tolist()
    frees = _frees(problem, launches, op_devices, device_of)
    reads = problem.graph.ops.reads.lists()
    copied: set[tuple[int, int]] = set()  # (tensor, device)
    sequence: list[Instruction] = []
    for position, op in enumerate(launches):
        here = op_devices[op]
        for tensor in reads[op]:
            if device_of[tensor] != here and (tensor, here) not in copied:
                copied.add((tensor, here))
                sequence.append(CopyTensor(tensor, device_of[tensor], here))
        sequence.append(RunOp(op, here))
        sequence += frees[position]
    return Instructions(problem.cluster.device_names, tuple(sequence))


def _frees(problem: Problem, launches: list[int], op_devices: list[int], device_of: list[int]) -> list[list[FreeTensor]]:
    """Returns what is freed after each launch, in the order in which the memory was allocated: [launches]."""
    graph = problem.graph
    reads, writes, storages = graph.ops.reads.lists(), graph.ops.writes.lists(), graph.storage.tolist()
    last_use: dict[tuple[int, int, bool], int] = {}  # (tensor, device, is a copy) -> launch
    allocated: dict[tuple[int, int, bool], None] = {}
    for position, op in enumerate(launches):
        here = op_devices[op]
        for tensor in reads[op]:
            there, storage = device_of[tensor], storages[tensor]
            if there == here:
                last_use[storage, here, False] = position
                continue
            if (tensor, here, True) not in allocated:
                allocated[tensor, here, True] = None
                last_use[storage, there, False] = position
            last_use[tensor, here, True] = position
        for tensor in writes[op]:
            last_use[storages[tensor], here, False] = position
            if storages[tensor] == tensor:
                allocated[tensor, here, False] = None
    kept = {storages[tensor] for tensor in graph.outputs.tolist()}
    frees: list[list[FreeTensor]] = [[] for _ in launches]
    for key in allocated:
        tensor, device, is_copy = key
        if is_copy or tensor not in kept:
            frees[last_use[key]].append(FreeTensor(tensor, device))
    return frees
