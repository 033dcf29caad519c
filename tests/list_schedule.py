"""The list schedule of the priority order in plain Python, for tests to compare with."""

from placewise.core.arrays import Ints
from placewise.core.problem import Problem


class ListSchedule:
    """The list schedule in plain Python: looks at everything again at every moment."""

    def __init__(self, problem: Problem, placement: Ints) -> None:
        graph, cluster = problem.graph, problem.cluster
        self.problem, self.nbytes = problem, graph.tensors.nbytes.tolist()
        self.latency, self.bandwidth = cluster.latency_seconds.tolist(), cluster.bytes_per_second.tolist()
        self.channels = [cluster.channels.tolist(), cluster.second_channels.tolist()]
        self.device_of = placement[problem.op_groups].tolist()
        self.seconds = [problem.op_seconds[n, d] for n, d in enumerate(self.device_of)]
        self.reads = [list(dict.fromkeys(row)) for row in graph.ops.reads.lists()]
        self.writes, self.after = graph.ops.writes.lists(), graph.ops.after.lists()
        self.producer = graph.producer.tolist()
        self.home: list[int] = []
        for t, home in enumerate(graph.tensors.home.tolist()):
            maker = self.producer[t] if self.producer[t] >= 0 else int(graph.first_reader[t])
            at_maker = self.device_of[maker] if maker >= 0 else 0
            self.home.append(int(placement[problem.merged[home]]) if home >= 0 else at_maker)
        self.path = self.remaining_paths()

    def copy_seconds(self, t: int, here: int) -> float:
        """How long copying a tensor takes."""
        there = self.home[t]
        return float(self.latency[there][here] + self.nbytes[t] / self.bandwidth[there][here])

    def remaining_paths(self) -> list[float]:
        """From the start of each op to the end of the longest chain of ops and copies that begins with it."""
        path = [0.0] * len(self.reads)
        for n in reversed(range(len(path))):
            ways = [0.0]
            for m in range(n + 1, len(path)):
                if n in self.after[m]:
                    ways.append(path[m])
                for t in self.reads[m]:
                    if self.producer[t] == n:
                        is_here = self.home[t] == self.device_of[m]
                        ways.append(path[m] if is_here else path[m] + self.copy_seconds(t, self.device_of[m]))
            path[n] = max(ways) + self.seconds[n]
        return path

    def order(self) -> list[int]:
        """The ops in the order in which they are started."""
        now, started = 0.0, []
        waiting = list(range(len(self.reads)))
        running: dict[int, tuple[int, float]] = {}  # device -> op, end
        ended: set[int] = set()
        there_at: dict[tuple[int, int], float] = {}  # (tensor, device) -> when it is there
        busy: dict[int, float] = {}  # channel -> until when

        def make(t: int) -> None:
            there_at[t, self.home[t]] = now
            for n, reads in enumerate(self.reads):
                here = self.device_of[n]
                if t in reads and (t, here) not in there_at:
                    needed = [channels[self.home[t]][here] for channels in self.channels]
                    begin = max(now, *(busy.get(channel, 0.0) for channel in needed))
                    # The same sum as the reference's, in the same order.
                    arrival = begin + self.latency[self.home[t]][here] + self.nbytes[t] / self.bandwidth[self.home[t]][here]
                    there_at[t, here] = arrival
                    busy.update(dict.fromkeys(needed, arrival))

        def can_start(n: int) -> bool:
            here = self.device_of[n]
            has_inputs = all((t, here) in there_at and there_at[t, here] <= now for t in self.reads[n])
            return has_inputs and all(m in ended for m in self.after[n])

        for t in range(len(self.nbytes)):
            if self.producer[t] < 0:
                make(t)
        while waiting:
            for device in sorted(running):
                n, end = running[device]
                if end <= now:
                    del running[device]
                    ended.add(n)
                    for t in sorted(self.writes[n]):
                        make(t)
            for device in range(self.problem.num_devices):
                ready = [n for n in waiting if self.device_of[n] == device and can_start(n)]
                if device not in running and ready:
                    n = min(ready, key=lambda n: (-self.path[n], n))
                    waiting.remove(n)
                    started.append(n)
                    running[device] = (n, now + self.seconds[n])
            now = min([end for _, end in running.values()] + [at for at in there_at.values() if at > now], default=now)
        return started
