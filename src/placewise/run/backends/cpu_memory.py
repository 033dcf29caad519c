"""The process's heap: memory that is freed is kept for the next op, and not returned to the system."""

import ctypes
import os
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # glibc's names and numbers


def keep_freed_memory() -> None:
    """Makes this process keep the memory that it frees; does nothing if the C library is not glibc.

    Call it before PyTorch has started threads: each thread takes a heap, and only the first one can keep large tensors.
    Without it glibc returns a large tensor's memory to the system when it is freed, and the system has to clear the next
    one's page by page, which takes up to half of a step. A user who has set one of glibc's variables (`MALLOC_...`) has
    chosen otherwise.
    """
    if mallopt := _function("mallopt"):
        mallopt(M_MMAP_MAX, 0)  # all memory comes from the heap
        mallopt(M_TRIM_THRESHOLD, -1)  # which never shrinks
        mallopt(M_ARENA_MAX, 1)  # and is the only one


def give_back_memory() -> None:
    """Returns to the system what has been kept, when no step needs it any more."""
    if malloc_trim := _function("malloc_trim"):
        malloc_trim(ctypes.c_size_t(0))


def _function(name: str) -> Any:
    """Returns a function of glibc; None if there is no glibc, or the user has chosen its settings."""
    is_chosen = any(variable.startswith("MALLOC_") for variable in os.environ)
    if is_chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
