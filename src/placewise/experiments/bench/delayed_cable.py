"""A cable on which packets take time, between two network cards that are files of this process.

For kernels without `netem`, which could delay packets itself. The process is started with the two files and the seconds:
`python -m placewise.experiments.bench.delayed_cable 5 6 0.001`.
"""

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

TUN_FILE, SET_NAME = "/dev/net/tun", 0x400454CA  # TUNSETIFF
PACKETS_ONLY = 0x1001  # IFF_TUN | IFF_NO_PI

MAX_PACKET = 2**16

MAX_WAITING = 10_000  # packets that are on their way in one direction; more are lost


def open_card(name: str) -> int:
    """Returns the file of a new network card: what is sent over the card is read from it, what is written is received."""
    file = os.open(TUN_FILE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, SET_NAME, struct.pack("16sH", name.encode(), PACKETS_ONLY))
    return file


def carry(cards: tuple[int, int], delay_seconds: float) -> None:
    """Carries packets from each card to the other one, for ever."""
    other = {cards[0]: cards[1], cards[1]: cards[0]}
    waiting: dict[int, deque[tuple[float, bytes]]] = {card: deque() for card in cards}  # by the card that they go to
    while True:
        due = min((queue[0][0] for queue in waiting.values() if queue), default=None)
        timeout = None if due is None else max(due - time.monotonic(), 0.0)
        for card in select.select(cards, (), (), timeout)[0]:
            packet = os.read(card, MAX_PACKET)
            queue = waiting[other[card]]
            if len(queue) < MAX_WAITING:
                queue.append((time.monotonic() + delay_seconds, packet))
        now = time.monotonic()
        for card, queue in waiting.items():
            while queue and queue[0][0] <= now:
                with suppress(OSError):  # a card that is not up, or whose queue is full, loses packets
                    os.write(card, queue.popleft()[1])


if __name__ == "__main__":
    carry((int(sys.argv[1]), int(sys.argv[2])), float(sys.argv[3]))
