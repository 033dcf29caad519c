"""The kinds of devices that can be run; protocol.py has what each must give."""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from placewise.run.backends.protocol import Backend

BACKENDS = {  # kind of device -> backend, loaded when a cluster has one; each may look at what those before it claimed
    "gpu": "placewise.run.backends.cuda:Cuda",
    "cpu": "placewise.run.backends.cpu_threads:CpuThreads",
}

VISIBLE = {"gpu": "CUDA_VISIBLE_DEVICES"}  # kind of device -> the environment variable that says which a process sees


@cache
def backend_of(kind: str) -> "Backend":
    """Returns the backend of a kind of device."""
    module, _, name = BACKENDS[kind].partition(":")
    backend: Backend = getattr(import_module(module), name)()
    return backend
