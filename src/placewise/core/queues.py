"""A GPU's hardware queues: what is launched in more streams than it has queues waits for strangers."""

import os

VARIABLE, MOST = "CUDA_DEVICE_MAX_CONNECTIONS", "32"  # CUDA's default is 8


def want_queues() -> None:
    """Asks for as many queues as CUDA can have, unless someone else has chosen; it listens only before it starts."""
    os.environ.setdefault(VARIABLE, MOST)
