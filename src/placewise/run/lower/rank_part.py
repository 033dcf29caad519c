"""The part of a step that one rank runs, when each host of a cluster is a process of its own."""

from collections import deque
from collections.abc import Mapping, Sequence

from placewise.core.errors import PlanError
from placewise.run.lower.instructions import CopyTensor, FreeTensor, Instructions, RunOp


def part_of(instructions: Instructions, ranks: Sequence[int], rank: int) -> Instructions:
    """Returns the instructions of one rank, in launch order; `ranks` [devices] has the rank of each device.

    A copy between ranks is in the parts of both: the source's rank sends, the target's receives.
    """
    kept = []
    for instruction in instructions.sequence:
        ends = (instruction.source, instruction.target) if isinstance(instruction, CopyTensor) else (instruction.device,)
        if any(ranks[device] == rank for device in ends):
            kept.append(instruction)
    return Instructions(instructions.device_names, tuple(kept))


def check_parts(parts: Mapping[int, Instructions], ranks: Sequence[int]) -> None:
    """Raises a PlanError unless the parts of all ranks end, if every send and receive waits for the other side.

    For each pair of devices, one rank's sends must be the other's receives in the same order. Then each rank is followed
    as if it did one thing after the other, which is stricter than its threads are: a part waits at a copy between ranks
    until the other side is there too. As all parts follow one launch order, the earliest copy can always go on.
    """
    waiting = {rank: deque(part.sequence) for rank, part in parts.items()}
    for rank, queue in waiting.items():
        for instruction in queue:
            if isinstance(instruction, RunOp | FreeTensor) and ranks[instruction.device] != rank:
                raise PlanError(f"rank {rank}: {instruction} is on a device of rank {ranks[instruction.device]}")
    while any(waiting.values()):
        has_moved = False
        for rank, queue in waiting.items():
            while queue and not _crosses(queue[0], ranks):
                queue.popleft()
                has_moved = True
            if not queue:
                continue
            copy = queue[0]
            assert isinstance(copy, CopyTensor)
            sender, receiver = ranks[copy.source], ranks[copy.target]
            if rank not in (sender, receiver):
                raise PlanError(f"rank {rank}: {copy} is neither from nor to its devices")
            other = waiting.get(receiver if rank == sender else sender, deque())
            if other and other[0] == copy:
                queue.popleft()
                other.popleft()
                has_moved = True
        if not has_moved:
            stuck = {rank: str(queue[0]) for rank, queue in waiting.items() if queue}
            raise PlanError(f"ranks wait for each other forever: {stuck}")


def _crosses(instruction: object, ranks: Sequence[int]) -> bool:
    return isinstance(instruction, CopyTensor) and ranks[instruction.source] != ranks[instruction.target]
