"""CPU devices: each is a thread with cores of its own, which runs the device's lane.

Threads hand over to each other by signals. When one lane fails, all others end at the next signal that they wait for.
LaneThreads, Signal and Cancellation serve every lane, also the host's: they are the same for all backends.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import methodcaller

import torch

from placewise.core.cluster import Device
from placewise.machines.detect import processors
from placewise.machines.slices import Cut
from placewise.run.backends.cpu_memory import give_back_memory, keep_freed_memory
from placewise.run.devices import RealDevice

MANY_CORES = 8  # with this many and more, an eighth of them and at least 2 are left to the host; with fewer, 1

Job = Callable[[], None]

_acquire, _release = methodcaller("acquire"), methodcaller("release")


class CpuThreads:
    """The backend of kind "cpu"."""

    def claim(
        self, devices: Sequence[Device], cluster_name: str, slices: Mapping[str, Cut], claimed: Sequence[RealDevice]
    ) -> list[RealDevice]:
        """Shares this process's cores in equal parts, at least one for each device.

        If the host launches for other devices, it keeps one core, or more of many: tensors are pinned there too.
        """
        keep_freed_memory()
        cores = processors()
        num_kept = 0
        if any(device.launches_from_host for device in claimed) and len(cores) > len(devices):
            num_kept = max(2, len(cores) // 8) if len(cores) >= MANY_CORES else 1  # an op on all cores waits for the busiest
            num_kept = min(num_kept, len(cores) - len(devices))
        cores, host_cores = cores[: len(cores) - num_kept], cores[len(cores) - num_kept :]
        share = max(len(cores) // len(devices), 1)
        found = []
        for i, device in enumerate(devices):
            own = tuple(cores[(i * share + k) % len(cores)] for k in range(share))  # shared, if there are fewer than devices
            found.append(RealDevice(device.name, device.kind, "cpu", threads=share, cores=own, host_cores=tuple(host_cores)))
        return found

    def reset_peaks(self, devices: Sequence[RealDevice]) -> None:
        """Does nothing: the heap keeps no count."""

    def peak_bytes(self, devices: Sequence[RealDevice]) -> dict[str, int]:
        """Returns nothing: all CPU devices share the process's heap."""
        return {}

    def release_memory(self) -> None:
        """Gives back what the heap has kept."""
        give_back_memory()


class Cancelled(Exception):
    """Another thread has failed or been stopped, so this one ends too."""


class Cancellation:
    """The failures of a step; the first one wakes every lane that waits for a signal."""

    def __init__(self) -> None:
        self.signals: weakref.WeakSet[Signal] = weakref.WeakSet()  # they go with the lanes that wait for them
        self.failures: list[BaseException] = []
        self._lock = threading.Lock()

    def cancel(self, failure: BaseException) -> None:
        """Adds a failure and sets all signals."""
        with self._lock:
            self.failures.append(failure)
            for signal in self.signals:
                signal.force()

    def reset(self) -> None:
        """Forgets the failures and clears all signals; no lane may be running."""
        self.failures.clear()
        for signal in self.signals:
            signal.clear()


class Signal:
    """A lock that one thread sets and one other waits for, once in every step; waiting clears it for the next step."""

    __slots__ = ("__weakref__", "_cancellation", "_lock", "set")

    def __init__(self, cancellation: Cancellation) -> None:
        self._cancellation = cancellation
        self._lock = threading.Lock()
        self._lock.acquire()
        self.set = self._lock.release
        cancellation.signals.add(self)

    def wait(self) -> None:
        """Returns when the signal is set; raises Cancelled when the step has failed."""
        self._lock.acquire()
        if self._cancellation.failures:
            raise Cancelled

    def force(self) -> None:
        """Sets the signal, if it is not set."""
        with contextlib.suppress(RuntimeError):  # it was set
            self.set()

    def clear(self) -> None:
        """Clears the signal, if it is set."""
        self._lock.acquire(blocking=False)


class LaneThread:
    """A thread on a device's cores that runs one job at a time."""

    def __init__(self, device: RealDevice, cancellation: Cancellation) -> None:
        self.job: Job | None = None
        self.start, self.done = threading.Lock(), threading.Lock()
        self.start.acquire()
        self.done.acquire()
        self._device, self._cancellation = device, cancellation
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
                except Cancelled:
                    pass
                except BaseException as failure:
                    self._cancellation.cancel(failure)
                del job
                self.done.release()


class LaneThreads:
    """The threads of a step, by lane."""

    def __init__(self, devices: Mapping[int, RealDevice], cancellation: Cancellation) -> None:
        self.cancellation = cancellation
        self.threads: dict[int, LaneThread] = {}
        self.close = weakref.finalize(self, _end_threads, self.threads)  # also those that have started when one fails to
        with keep_num_threads():
            for lane, device in devices.items():
                self.threads[lane] = LaneThread(device, cancellation)

    @property
    def is_closed(self) -> bool:
        """Whether the threads have ended."""
        return not self.close.alive

    def run(self, jobs: Mapping[int, Job], host: Job | None = None) -> None:
        """Runs a job for each lane, and one on the calling thread; raises the first failure when all have ended.

        Ctrl-C can come between any two bytecodes. So the call that starts a thread, or waits for it, also counts it: no
        thread is left running, and none is waited for in vain.
        """
        threads = [self.threads[lane] for lane in jobs]
        started: list[None] = []
        ended: list[bool] = []
        try:
            for thread, job in zip(threads, jobs.values(), strict=True):
                thread.job = job
            started.extend(map(_release, [thread.start for thread in threads]))
            if host is not None:
                host()
            ended.extend(map(_acquire, [thread.done for thread in threads]))
        except BaseException as failure:
            if not isinstance(failure, Cancelled):
                self.cancellation.cancel(failure)
            for thread in threads[len(started) :]:
                thread.job = None
            self._wait([thread.done for thread in threads[: len(started)]], ended)
        if self.cancellation.failures:
            first = self.cancellation.failures[0]
            self.cancellation.reset()
            raise first

    def _wait(self, locks: Sequence[threading.Lock], ended: list[bool]) -> None:
        """Waits for threads that end at their next signal; a second Ctrl-C gives up one whose op does not end."""
        interrupts = sum(isinstance(failure, KeyboardInterrupt) for failure in self.cancellation.failures)
        while len(ended) < len(locks):
            try:
                ended.extend(map(_acquire, locks[len(ended) :]))
            except KeyboardInterrupt as interrupt:
                interrupts += 1
                self.cancellation.cancel(interrupt)
                if interrupts > 1 and len(ended) < len(locks):
                    self.close()
                    interrupt.add_note("An op was still running when the step was given up: it is closed, compile it again.")
                    raise


def _end_threads(threads: Mapping[int, LaneThread]) -> None:
    for thread in threads.values():
        thread.start.release()


def take_cores(device: RealDevice) -> None:
    """Gives the calling thread, and those that its ops start, the device's cores and number of threads."""
    if hasattr(os, "sched_setaffinity") and device.cores:
        os.sched_setaffinity(0, device.cores)
    torch.get_num_threads()  # a thread's first call here takes over the number that any thread has set last
    torch.set_num_threads(device.threads)


@contextmanager
def keep_num_threads() -> Iterator[None]:
    """Leaves torch.get_num_threads() as it was: on this thread, and on threads that are started later."""
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
