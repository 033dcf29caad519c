"""The threads of CPU devices, and the memory that they reuse."""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

from placewise.run.backends.cpu_threads import Cancellation, LaneThreads, Signal
from placewise.run.devices import RealDevice

FAULTS = """
import ctypes, resource
from placewise.run.backends.cpu_memory import keep_freed_memory
keep_freed_memory()
malloc, free, size = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free, 2**26
malloc.restype = ctypes.c_void_p
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory = malloc(ctypes.c_size_t(size))
    ctypes.memset(memory, 1, size)
    free(ctypes.c_void_p(memory))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def in_a_new_thread(work: Callable[[], object]) -> object:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def num_threads_of(threads: LaneThreads, lanes: list[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    threads.run({lane: partial(lambda lane: found.update({lane: torch.get_num_threads()}), lane) for lane in lanes})
    return found


def test_each_lane_thread_has_its_own_number_of_threads() -> None:
    """PyTorch has one number for all threads that have not asked for theirs yet, which must stay as it was."""
    threads = LaneThreads(
        {
            0: RealDevice("a", "cpu", "cpu", threads=2),
            1: RealDevice("b", "cpu", "cpu", threads=3),
            -2: RealDevice("a pinning", "cpu", "cpu", threads=1),
        },
        Cancellation(),
    )
    assert num_threads_of(threads, [0, 1, -2]) == {0: 2, 1: 3, -2: 1}
    assert in_a_new_thread(torch.get_num_threads) == torch.get_num_threads()
    threads.close()


def test_the_thread_that_makes_lane_threads_keeps_its_number_of_threads() -> None:
    """Also if it has not asked for it before."""

    def make() -> int:
        threads = LaneThreads({0: RealDevice("a", "cpu", "cpu", threads=7)}, Cancellation())
        threads.close()
        return torch.get_num_threads()

    assert in_a_new_thread(make) == torch.get_num_threads()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores can't be chosen here")
def test_cores_that_do_not_exist_are_refused() -> None:
    usual, threads = torch.get_num_threads(), set(threading.enumerate())
    with pytest.raises((OSError, ValueError)):
        LaneThreads(
            {
                0: RealDevice("a", "cpu", "cpu", threads=usual + 1),
                1: RealDevice("b", "cpu", "cpu", threads=1, cores=(9999,)),
            },
            Cancellation(),
        )
    gc.collect()
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
    assert set(threading.enumerate()) <= threads  # none of ours is left; threads of others may have ended by now
    assert in_a_new_thread(torch.get_num_threads) == usual


@pytest.mark.skipif(not hasattr(os, "confstr") or "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="no glibc")
def test_freed_memory_is_reused() -> None:
    """Memory that was freed is touched again without a page fault, unless the user has set one of glibc's variables."""
    free = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_") and key != "GLIBC_TUNABLES"}
    faults = []
    for environment in (free, free | {"MALLOC_PERTURB_": "0"}):
        done = subprocess.run([sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True)
        faults.append(int(done.stdout))
    assert faults[0] < 10 < faults[1]


def run_interrupted(threads: LaneThreads, moment: int, ran: list[str]) -> bool:
    """Runs a lane and the host's with Ctrl-C before bytecode `moment` of `LaneThreads.run`; returns whether it came."""
    signal, left = Signal(threads.cancellation), iter(range(moment))

    def lane() -> None:
        ran.append("begun")
        signal.wait()
        ran.append("ended")

    def interrupt(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not LaneThreads.run.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(left, None) is None:
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    sys.settrace(interrupt)
    try:
        threads.run({0: lane}, signal.set)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_no_thread_goes_on_after_an_interrupt() -> None:
    """At whichever bytecode it comes; and the next step runs."""
    threads, moment = LaneThreads({0: RealDevice("a", "cpu", "cpu", threads=1)}, Cancellation()), 0
    ran: list[str] = []
    while run_interrupted(threads, moment, ran):
        before = list(ran)
        threads.run({0: lambda: ran.append("next")}, lambda: None)
        assert ran == [*before, "next"], f"at bytecode {moment}"
        assert len(threads.cancellation.failures) == 0
        ran.clear()
        moment += 1
    assert ran == ["begun", "ended"]
    assert moment > 20
    threads.close()
