"""Where one thread waits for another: each gate is opened once and passed once in every step."""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import methodcaller
from typing import Any

import torch

from placewise.run.devices import RealDevice


class Stopped(Exception):
    """Another lane has failed, so this one ends too."""


class Gate:
    """A lock that one thread opens and one other passes; passing closes it again, so it needs no reset between steps."""

    __slots__ = ("__weakref__", "_alarm", "_lock", "open")

    def __init__(self, alarm: "Alarm") -> None:
        self._alarm = alarm
        self._lock = threading.Lock()
        self._lock.acquire()
        self.open = self._lock.release
        alarm.gates.add(self)

    def wait(self) -> None:
        """Returns when the gate is opened; raises Stopped when the step has failed."""
        self._lock.acquire()
        if self._alarm.failures:
            raise Stopped

    def force(self) -> None:
        """Opens the gate if it is closed."""
        with contextlib.suppress(RuntimeError):  # it was open
            self.open()

    def close(self) -> None:
        """Closes the gate if it is open."""
        self._lock.acquire(blocking=False)


class Alarm:
    """The failures of a step; the first one wakes everybody who waits."""

    def __init__(self) -> None:
        self.gates: weakref.WeakSet[Gate] = weakref.WeakSet()  # they go with the lanes that wait at them
        self.failures: list[BaseException] = []
        self._lock = threading.Lock()

    def ring(self, failure: BaseException) -> None:
        """Notes a failure and opens all gates."""
        with self._lock:
            self.failures.append(failure)
            for gate in self.gates:
                gate.force()

    def reset(self) -> None:
        """Forgets the failures; nobody may be running."""
        self.failures.clear()
        for gate in self.gates:
            gate.close()


Job = Callable[[], None]

_acquire, _release = methodcaller("acquire"), methodcaller("release")


class Worker:
    """A thread that runs one job at a time."""

    def __init__(self, device: RealDevice, alarm: Alarm) -> None:
        self.job: Job | None = None
        self.start, self.done = threading.Lock(), threading.Lock()
        self.start.acquire()
        self.done.acquire()
        self._device, self._alarm = device, alarm
        self._failure: BaseException | None = None
        threading.Thread(target=self._work, name=f"placewise {device.name}", daemon=True).start()
        self.done.acquire()  # when it has taken its cores
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            take_cores(self._device)
        except BaseException as failure:
            self._failure = failure
            return
        finally:
            self.done.release()
        with torch.no_grad():
            while True:
                self.start.acquire()
                job, self.job = self.job, None
                if job is None:
                    return
                try:
                    job()
                except Stopped:
                    pass
                except BaseException as failure:
                    self._alarm.ring(failure)
                del job
                self.done.release()


def take_cores(device: RealDevice) -> None:
    """Gives the calling thread, and those that its ops start, the device's cores and number of threads."""
    if hasattr(os, "sched_setaffinity") and device.cores:
        os.sched_setaffinity(0, device.cores)
    torch.get_num_threads()  # a thread takes the number that was set last, by whomever, when it is first asked for its own
    torch.set_num_threads(device.threads)


@contextmanager
def usual_threads() -> Iterator[None]:
    """Leaves the number of threads that an op has as it was: on this thread, and on those that others start later."""
    usual = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(usual)


class Team:
    """The workers of a machine's CPU devices: by lane."""

    def __init__(self, places: Mapping[int, RealDevice], alarm: Alarm) -> None:
        self.alarm = alarm
        self.workers: dict[int, Worker] = {}
        self.close = weakref.finalize(self, _dismiss, self.workers)  # also those that are there when the next one fails
        with usual_threads():
            for lane, place in places.items():
                self.workers[lane] = Worker(place, alarm)

    def run(self, jobs: dict[int, Job], host: Job | None = None) -> None:
        """Runs a job for each lane, and one on this thread; raises the first failure when all have ended.

        Ctrl-C can come between any two bytecodes. Who has begun and who has ended is counted by the same call that starts
        them, or waits for them, so that nobody is left running, or waited for in vain.
        """
        workers = [self.workers[lane] for lane in jobs]
        begun: list[None] = []
        ended: list[bool] = []
        try:
            for worker, job in zip(workers, jobs.values(), strict=True):
                worker.job = job
            begun.extend(map(_release, [worker.start for worker in workers]))
            if host is not None:
                host()
            ended.extend(map(_acquire, [worker.done for worker in workers]))
        except BaseException as failure:
            if not isinstance(failure, Stopped):
                self.alarm.ring(failure)
            for worker in workers[len(begun) :]:
                worker.job = None
            self._wait([worker.done for worker in workers[: len(begun)]], ended)
        if self.alarm.failures:
            first = self.alarm.failures[0]
            self.alarm.reset()
            raise first

    def _wait(self, locks: Sequence[threading.Lock], ended: list[bool]) -> None:
        while len(ended) < len(locks):
            try:
                ended.extend(map(_acquire, locks[len(ended) :]))
            except KeyboardInterrupt as interrupt:  # the others end at their next gate, then this one goes on
                self.alarm.ring(interrupt)


def _dismiss(workers: Mapping[int, Worker]) -> None:
    for worker in workers.values():
        worker.start.release()


def job_of(function: Callable[..., Any], *args: Any) -> Job:
    """Returns a job that calls a lane, and forgets its arguments with it."""

    def job() -> None:
        function(*args)

    return job
