"""Which instruction must wait for which other one: only where two queues meet, and never twice for the same news.

A queue is a device, or a channel of copies of its own. The workers of CPU devices make copies among themselves in the
reader's queue; copies from or to a GPU run in a channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from placewise.core.graph import Graph
from placewise.run.lower.instructions import Copy, Instructions, Run

Queue = tuple[int, ...]  # (device,), or (source, target)


@dataclass(frozen=True, eq=False)
class Waits:
    """For each instruction the others that its queue has to wait for just before it, by their numbers."""

    queues: dict[int, Queue]  # instruction -> where it runs
    before: dict[int, tuple[int, ...]]  # instruction -> instructions of other queues
    awaited: frozenset[int]  # the instructions that some queue waits for


class _Clocks:
    """What each queue knows to have ended: how far it has seen every other queue.

    News of a CPU device reach all GPU queues at once, for one host thread launches them all and waits itself.
    """

    def __init__(self, is_gpu: Sequence[bool]) -> None:
        self.is_gpu = is_gpu
        self.seen: dict[Queue, dict[Queue, int]] = {}  # queue -> other queue -> last instruction that has ended
        self.at: dict[int, dict[Queue, int]] = {}  # what was known when an instruction ended

    def lane(self, queue: Queue) -> Queue:
        """Returns who waits: a CPU device's worker itself, or the host for all GPU queues."""
        return queue if not any(self.is_gpu[device] for device in queue) else ()

    def wait(self, queue: Queue, source: int, source_queue: Queue) -> bool:
        """Whether a queue has to wait for an instruction; if so, it knows from now on what was known there."""
        host = self.lane(queue)
        if source_queue == queue or any(
            self.seen.get(knower, {}).get(source_queue, -1) >= source for knower in (queue, host)
        ):
            return False
        knower = host if self.lane(source_queue) == source_queue else queue
        known = self.seen.setdefault(knower, {})
        for other, last in self.at[source].items():
            known[other] = max(last, known.get(other, -1))
        return True

    def end(self, queue: Queue, number: int) -> None:
        """Notes that an instruction has been put into its queue."""
        known = self.seen.setdefault(queue, {})
        known[queue] = number
        host = self.seen.get(self.lane(queue), {})
        self.at[number] = {**host, **{other: max(last, host.get(other, -1)) for other, last in known.items()}}


def plan_waits(
    graph: Graph, instructions: Instructions, is_gpu: Sequence[bool], random_ops: frozenset[int] = frozenset()
) -> Waits:
    """Returns what has to wait for what.

    An op waits for the copies that it reads and for its `after` ops, a copy for the op that makes its tensor. Random ops
    of CPU devices wait for each other, in launch order: they draw from one generator.
    """
    reads, after, makers = graph.ops.reads.lists(), graph.ops.after.lists(), graph.producer.tolist()
    clocks = _Clocks(is_gpu)
    queues: dict[int, Queue] = {}
    before: dict[int, tuple[int, ...]] = {}
    ran: dict[int, int] = {}  # op -> its instruction
    copied: dict[tuple[int, int], int] = {}  # (tensor, target) -> its instruction
    last_draw = -1
    for number, step in enumerate(instructions.steps):
        if isinstance(step, Run):
            queue: Queue = (step.device,)
            needs = [copied[tensor, step.device] for tensor in reads[step.op] if (tensor, step.device) in copied]
            needs += [ran[op] for op in after[step.op]]
            if step.op in random_ops and not is_gpu[step.device]:
                needs += [last_draw] if last_draw >= 0 else []
                last_draw = number
            ran[step.op] = number
        elif isinstance(step, Copy):
            queue = (step.source, step.target) if is_gpu[step.source] or is_gpu[step.target] else (step.target,)
            needs = [ran[makers[step.tensor]]] if makers[step.tensor] >= 0 else []
            copied[step.tensor, step.target] = number
        else:
            continue
        found = tuple(need for need in sorted(set(needs), reverse=True) if clocks.wait(queue, need, queues[need]))
        before[number] = found
        queues[number] = queue
        clocks.end(queue, number)
    return Waits(queues, before, frozenset(need for needs in before.values() for need in needs))
