"""Memory of CPU devices is used again, and not given back to the system between two ops."""

import ctypes
import os
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # glibc's names and numbers


def keep_freed_memory() -> None:
    """Lets this process keep the memory that it frees; does nothing where the C library is another one than glibc.

    It is best called before PyTorch has started threads: each takes a heap, and only the first one can keep large tensors.
    By itself glibc gives a large tensor's memory back to the system when it is freed, and that of the next one has to be
    cleared page by page: up to half of a step. Who has set one of glibc's variables (`MALLOC_...`) has chosen otherwise.
    """
    if mallopt := _function("mallopt"):
        mallopt(M_MMAP_MAX, 0)  # all memory comes from the heap
        mallopt(M_TRIM_THRESHOLD, -1)  # of which nothing is given back
        mallopt(M_ARENA_MAX, 1)  # and there is one


def give_back_memory() -> None:
    """Gives back what has been kept, when no step needs it any more."""
    if malloc_trim := _function("malloc_trim"):
        malloc_trim(ctypes.c_size_t(0))


def _function(name: str) -> Any:
    """Returns a function of glibc; None where there is none, or somebody else has chosen."""
    is_chosen = any(variable.startswith("MALLOC_") for variable in os.environ)
    if is_chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
