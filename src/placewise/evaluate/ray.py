"""A pool of actors on a Ray cluster."""

import math
import os
import pickle
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from placewise.core.errors import InputError, PlacewiseError
from placewise.evaluate.pool import (
    PULSES,
    SILENT_SECONDS,
    START_SECONDS,
    Answer,
    Death,
    MakeEvaluator,
    Part,
    PartEvaluator,
    Pool,
)

CONNECT_SECONDS = 10.0

QUIET = {"log_to_driver": False, "configure_logging": False}


@dataclass(eq=False)
class Actor:
    """A worker somewhere in the cluster, the answer that it owes, and the sign of life that it was asked for."""

    handle: Any
    answer: Any = None  # an object reference; None: it owes none
    has_started: bool = False
    pulse: Any = None  # an object reference; None: it was not asked, or has answered
    asked: float = 0.0  # when it was asked


@final
class RayPool(Pool[Actor]):
    """Evaluates on actors of a Ray cluster, each with the evaluator that `make` makes there, once.

    `address` names an existing cluster ("auto" finds one on this machine); without it, a cluster is started on this machine
    and shut down by `close`. If this process is already connected to a cluster, that one is used and stays connected. There
    are `workers` actors of one CPU each, by default as many as the cluster has CPUs; with `one_per_machine` each has a
    machine of its own, and by default every machine has one. An actor that gives no sign of life for `silent_seconds` is
    replaced as if it had died.
    """

    def __init__(
        self,
        make: MakeEvaluator,
        workers: int | None = None,
        address: str | None = None,
        attempts: int = 3,
        one_per_machine: bool = False,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        if workers is not None and workers < 1:
            raise InputError(f"workers must be at least 1, there are {workers}")
        try:
            import ray
        except ImportError:
            raise InputError("Ray is not installed: pip install 'placewise[ray]'") from None
        self._ray: Any = ray
        self._silent_seconds = silent_seconds
        self._connects = not self._ray.is_initialized()
        if self._connects:
            self._connect(workers, address)
        options: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 2}
        self._places: Any = None  # the placement group with a place on each machine; None: actors may be anywhere
        if one_per_machine:
            workers = self._reserve(workers)
            strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._places)
            options["scheduling_strategy"] = strategy
        super().__init__(workers or max(1, int(self._ray.cluster_resources().get("CPU", 1))), attempts)
        self._actor = self._ray.remote(**options)(PartEvaluator)
        self._factory = self._ray.put(pickle.dumps(make, protocol=5))
        self._fill()

    def close(self) -> None:
        """Ends all workers and the connection, and shuts down the cluster if it was started here."""
        super().close()
        self._factory = None
        if self._places is not None and self._ray.is_initialized():
            self._ray.util.remove_placement_group(self._places)
            self._places = None
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connects and self._ray.is_initialized():
            self._ray.shutdown()

    def _connect(self, workers: int | None, address: str | None) -> None:
        if address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # our own cluster reports to nobody
            cpus = workers or len(os.sched_getaffinity(0))
            self._ray.init("local", num_cpus=cpus, include_dashboard=False, **QUIET)
            return
        try:
            _try_port(address)
            self._ray.init(address=address, **QUIET)
        except (OSError, RuntimeError, ValueError, ImportError) as problem:
            reason = " ".join(str(problem).split())
            raise InputError(f"can't connect to a Ray cluster at {address!r}: {reason}") from None

    def _reserve(self, workers: int | None) -> int:
        """Returns the number of workers, and keeps a place for each on a machine of its own."""
        machines = sum(node["Alive"] for node in self._ray.nodes())
        if workers is not None and workers > machines:
            self._disconnect()
            raise InputError(
                f"workers must be at most one on each machine of the Ray cluster ({machines}), there are {workers}"
            )
        self._places = self._ray.util.placement_group([{"CPU": 1}] * (workers or machines), strategy="STRICT_SPREAD")
        if not self._places.wait(START_SECONDS):
            self._ray.util.remove_placement_group(self._places)
            self._disconnect()
            raise PlacewiseError(f"not every machine of the Ray cluster had a free CPU within {START_SECONDS:g} s")
        return workers or machines

    def _start(self) -> Actor:
        return Actor(self._actor.remote(self._factory))

    def _send(self, worker: Actor, part: Part | None) -> None:
        worker.answer = worker.handle.answer.remote(part)

    def _receive(self, workers: Sequence[Actor], seconds: float | None) -> list[tuple[Actor, Answer | Death]]:
        owed = {worker.answer: worker for worker in workers if worker.answer is not None}
        until = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            patience = max(min(until - time.monotonic(), self._silent_seconds / PULSES), 0.0)
            ready, _ = self._ray.wait(list(owed), num_returns=1, timeout=patience)
            answers = [(owed[answer], self._receive_from(owed[answer])) for answer in ready]
            answers = answers or [
                (worker, Death("an actor gave no sign of life")) for worker in filter(self._is_silent, workers)
            ]
            if answers or time.monotonic() >= until:
                return answers

    def _is_silent(self, worker: Actor) -> bool:
        """Asks an actor for a sign of life, if it was not asked; returns whether it has owed one for too long."""
        if worker.pulse is not None and self._ray.wait([worker.pulse], timeout=0)[0]:
            worker.pulse = None
        if not worker.has_started or worker.answer is None:
            return False
        if worker.pulse is None:
            worker.pulse, worker.asked = worker.handle.pulse.remote(), time.monotonic()
        return time.monotonic() - worker.asked > self._silent_seconds

    def _receive_from(self, worker: Actor) -> Answer | Death:
        owed, worker.answer = worker.answer, None
        lost = self._ray.exceptions
        try:
            answer: Answer = self._ray.get(owed)
            worker.has_started = True
            return answer
        except (lost.RayActorError, lost.WorkerCrashedError, lost.NodeDiedError, lost.ObjectLostError) as error:
            return Death(str(error).strip().partition("\n")[0])

    def _find_death(self, worker: Actor) -> Death | None:
        return None  # only the answer that an actor owes shows that it has died

    def _stop(self, worker: Actor) -> None:
        if self._ray.is_initialized():
            self._ray.kill(worker.handle)


def _try_port(address: str) -> None:
    """Raises an OSError if nobody listens at host:port: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "://" not in host:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
