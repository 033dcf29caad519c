"""Requests hardware queues from CUDA: with more streams than queues, a launch waits for unrelated work."""

import os

VARIABLE, MAX_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", "32"  # CUDA's default is 8


def request_hardware_queues() -> None:
    """Requests as many queues as CUDA allows, unless the user has set a number; has no effect once CUDA has started."""
    os.environ.setdefault(VARIABLE, MAX_QUEUES)
