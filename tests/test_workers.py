"""The threads of CPU devices, and the memory that they use again."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from placewise.execute.gates import Alarm
from placewise.execute.machine import RealDevice
from placewise.execute.workers import Team, job_of

FAULTS = """
import ctypes, resource
from placewise.execute.heap import keep_freed_memory
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


def num_threads_of(team: Team, lanes: list[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    team.run({lane: job_of(lambda lane: found.update({lane: torch.get_num_threads()}), lane) for lane in lanes})
    return found


def test_each_worker_has_its_own_number_of_threads() -> None:
    """PyTorch has one number for all threads that have not asked yet; the last one set must not become everyone's."""
    others: list[int] = []
    team = Team({0: RealDevice("a", "cpu", 2), 1: RealDevice("b", "cpu", 3), -2: RealDevice("a pinning", "cpu", 1)}, Alarm())
    assert num_threads_of(team, [0, 1, -2]) == {0: 2, 1: 3, -2: 1}
    thread = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert others == [torch.get_num_threads()]
    team.close()


@pytest.mark.skipif(not hasattr(os, "confstr") or "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="no glibc")
def test_freed_memory_is_used_again() -> None:
    """Where nobody has chosen otherwise, memory that was freed is touched again without a page fault."""
    free = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_") and key != "GLIBC_TUNABLES"}
    faults = []
    for environment in (free, free | {"MALLOC_PERTURB_": "0"}):
        done = subprocess.run([sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True)
        faults.append(int(done.stdout))
    assert faults[0] < 10 < faults[1]
