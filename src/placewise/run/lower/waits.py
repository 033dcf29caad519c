"""Which instruction waits for which: only across queues, and only where an earlier wait does not imply it.

A queue is a device, or a channel of copies. The threads of devices that don't launch from the host copy among themselves in
the reader's queue; a copy from or to a device that the host launches on has its channel's queue.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from placewise.core.graph import Graph
from placewise.run.lower.instructions import CopyTensor, Instructions, RunOp

Queue = tuple[int, ...]  # (device,), or (source, target) of a channel

HOST: Queue = ()  # the host's lane itself, which launches for all queues that are not a thread's


@dataclass(frozen=True, eq=False)
class Waits:
    """For each instruction, by number: the instructions that its queue has to wait for just before it."""

    queues: dict[int, Queue]  # instruction -> where it runs
    before: dict[int, tuple[int, ...]]  # instruction -> instructions of other queues
    awaited: frozenset[int]  # the instructions that some queue waits for
    unsent: dict[int, tuple[int, ...]] = field(
        default_factory=dict
    )  # op -> copies to other processes that must have been sent, because it writes there


def plan_waits(
    graph: Graph,
    instructions: Instructions,
    launches_from_host: Sequence[bool],
    random_ops: frozenset[int] = frozenset(),
    is_remote: Sequence[bool] = (),
    held_ops: frozenset[int] = frozenset(),
) -> Waits:
    """Returns what has to wait for what; `launches_from_host` and `is_remote` (another process runs it) are by device.

    An op waits for the copies that it reads and for its `after` ops, a copy for the op that makes its tensor. Random ops
    on threads wait for each other, in launch order: they draw from one generator. A thread sends to other processes, and
    receives from them, in its own queue; an op that writes what another process reads is in the same one, and waits until
    that has been sent. Held ops (`PlacedStep.held_ops`) do nothing: who waits for one waits for the copy that it reads.
    """
    reads, after, makers = graph.ops.reads.lists(), graph.ops.after.lists(), graph.producer.tolist()
    writes, storages = graph.ops.writes.lists(), graph.storage.tolist()
    clocks = _VectorClocks(launches_from_host)
    queues: dict[int, Queue] = {}
    before: dict[int, tuple[int, ...]] = {}
    ran: dict[int, int] = {}  # op -> its instruction
    copied: dict[tuple[int, int], int] = {}  # (tensor, target) -> its instruction
    sent: dict[int, list[int]] = {}  # tensor -> the instructions that send it to other processes
    unsent: dict[int, tuple[int, ...]] = {}
    last_draw = -1
    for number, instruction in enumerate(instructions.sequence):
        if isinstance(instruction, RunOp):
            op, device = instruction.op, instruction.device
            if op in held_ops:
                if (copy := copied.get((reads[op][0], device))) is not None:
                    ran[op] = copy
                continue
            queue: Queue = (device,)
            needs = [copied[tensor, device] for tensor in reads[op] if (tensor, device) in copied]
            needs += [ran[earlier] for earlier in after[op] if earlier in ran]
            if sent:
                written = {storages[t] for t in writes[op]}
                far = [t for earlier in after[op] if earlier not in ran for t in reads[earlier] if storages[t] in written]
                sends = sorted({send for t in far for send in sent.get(t, ())})
                needs += [send for send in sends if send in queues]
                unsent[number] = tuple(send for send in sends if send not in queues)
            if op in random_ops and not launches_from_host[device]:
                needs += [last_draw] if last_draw >= 0 else []
                last_draw = number
            ran[op] = number
        elif isinstance(instruction, CopyTensor):
            tensor, source, target = instruction.tensor, instruction.source, instruction.target
            is_far = any(is_remote) and is_remote[source] != is_remote[target]
            of_channel = launches_from_host[source] or launches_from_host[target]
            queue = (source, target) if of_channel else (target,)
            needs = [ran[makers[tensor]]] if makers[tensor] >= 0 and makers[tensor] in ran else []
            if is_far and is_remote[target]:
                sent.setdefault(tensor, []).append(number)
                if not of_channel:  # the thread that makes it sends it, without waiting
                    continue
            copied[tensor, target] = number
        else:
            continue
        before[number] = tuple(need for need in sorted(set(needs), reverse=True) if clocks.wait(queue, need, queues[need]))
        queues[number] = queue
        clocks.add(queue, number)
    return Waits(queues, before, frozenset(need for needs in before.values() for need in needs), unsent)


class _VectorClocks:
    """The last instruction of every other queue that each queue knows to have ended.

    What the host waits for itself, an op on a thread, is known to all queues that it launches on from then on.
    """

    def __init__(self, launches_from_host: Sequence[bool]) -> None:
        self.launches_from_host = launches_from_host
        self.seen: dict[Queue, dict[Queue, int]] = {}  # queue -> other queue -> the last instruction that has ended there
        self.at: dict[int, dict[Queue, int]] = {}  # instruction -> what was known when it ended

    def wait(self, queue: Queue, source: int, source_queue: Queue) -> bool:
        """Whether a queue has to wait for an instruction; if so, it learns what is known there."""
        waiter = self._waiter(queue)
        if source_queue == queue or any(
            self.seen.get(knower, {}).get(source_queue, -1) >= source for knower in (queue, waiter)
        ):
            return False
        knower = waiter if self._waiter(source_queue) == source_queue else queue
        known = self.seen.setdefault(knower, {})
        for other, last in self.at[source].items():
            known[other] = max(last, known.get(other, -1))
        return True

    def add(self, queue: Queue, number: int) -> None:
        """Puts an instruction into its queue."""
        known = self.seen.setdefault(queue, {})
        known[queue] = number
        host = self.seen.get(self._waiter(queue), {})
        self.at[number] = {**host, **{other: max(last, host.get(other, -1)) for other, last in known.items()}}

    def _waiter(self, queue: Queue) -> Queue:
        """Returns who waits for threads: a thread itself, or the host for all queues that it launches on."""
        return HOST if any(self.launches_from_host[device] for device in queue) else queue
