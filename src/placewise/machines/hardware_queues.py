"""A GPU's hardware queues: with more streams than queues, a launch waits behind unrelated work."""

import os

VARIABLE, MOST = "CUDA_DEVICE_MAX_CONNECTIONS", "32"  # CUDA's default is 8


def want_queues() -> None:
    """Asks for as many queues as CUDA can have, unless someone else has chosen; it listens only before it starts."""
    os.environ.setdefault(VARIABLE, MOST)
