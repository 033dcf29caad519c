"""One thread for each CPU device, with cores of its own, that runs its lane when a step starts."""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from placewise.execute.gates import Alarm, Stopped
from placewise.execute.machine import RealDevice

Job = Callable[[], None]


class Worker:
    """A thread that runs one job at a time."""

    def __init__(self, device: RealDevice, alarm: Alarm) -> None:
        self.job: Job | None = None
        self.start, self.done = threading.Lock(), threading.Lock()
        self.start.acquire()
        self.done.acquire()
        self._device, self._alarm = device, alarm
        threading.Thread(target=self._work, name=f"placewise {device.name}", daemon=True).start()

    def _work(self) -> None:
        _take_cores(self._device)
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


def _take_cores(device: RealDevice) -> None:
    """Gives the calling thread, and those that its ops start, the device's cores."""
    if hasattr(os, "sched_setaffinity") and device.cores:
        os.sched_setaffinity(0, device.cores)
    torch.set_num_threads(device.threads)


class Team:
    """The workers of a machine's CPU devices."""

    def __init__(self, devices: Sequence[RealDevice], used: Sequence[int], alarm: Alarm) -> None:
        self.alarm = alarm
        self.workers = {number: Worker(devices[number], alarm) for number in used}
        self.close = weakref.finalize(self, _dismiss, tuple(self.workers.values()))

    def run(self, jobs: dict[int, Job], host: Job | None = None) -> None:
        """Runs a job for each CPU device, and one on this thread; raises the first failure when all have ended."""
        for number, job in jobs.items():
            worker = self.workers[number]
            worker.job = job
            worker.start.release()
        if host is not None:
            try:
                host()
            except Stopped:
                pass
            except BaseException as failure:
                self.alarm.ring(failure)
        for number in jobs:
            self._wait(self.workers[number])
        if self.alarm.failures:
            first = self.alarm.failures[0]
            self.alarm.reset()
            raise first

    def _wait(self, worker: Worker) -> None:
        while True:
            try:
                worker.done.acquire()
                return
            except KeyboardInterrupt as interrupt:  # the others end at their next gate, then this one goes on
                self.alarm.ring(interrupt)


def _dismiss(workers: tuple[Worker, ...]) -> None:
    for worker in workers:
        worker.start.release()


def job_of(function: Callable[..., Any], *args: Any) -> Job:
    """Returns a job that calls a lane, and forgets its arguments with it."""

    def job() -> None:
        function(*args)

    return job
