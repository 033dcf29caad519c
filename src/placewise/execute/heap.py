"""Memory of CPU devices is used again, and not given back to the system between two ops."""

import ctypes
import os

# glibc's names, and what they are set to: all memory comes from one heap, of which nothing is given back
_OPTIONS = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1), "M_ARENA_MAX": (-8, 1)}


def keep_freed_memory() -> None:
    """Lets this process keep the memory that it frees; does nothing where the C library is another one than glibc.

    It is best called before PyTorch has started threads: each takes a heap, and only the first one can keep large tensors.
    By itself glibc gives a large tensor's memory back to the system when it is freed, and that of the next one has to be
    cleared page by page: a quarter to a third of a step. Who has set one of glibc's variables (`MALLOC_...`) has chosen
    otherwise.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        for option, value in _OPTIONS.values():
            mallopt(option, value)
