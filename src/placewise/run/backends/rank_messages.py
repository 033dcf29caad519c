"""Tensors that ranks send to each other in every step, by torch.distributed.

A send only begins where the tensor is made, in the thread that makes it. A receive has been announced long before, so that
the other side sends at once, and the thread that reads the tensor waits for it. No other thread takes part: one that had to
wake up for each tensor, and then to get the interpreter's lock, would add milliseconds.

A message is found by its tag, so the order of sends does not matter. Waits only go back in the launch order, which all ranks
share, so the earliest copy that is not done can always go on.
"""

import itertools
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from placewise.core.errors import ExecutionError
from placewise.run.lower.instructions import CopyTensor
from placewise.run.storage_copies import Empty, fills_storage, storage_bytes

AHEAD_BYTES = 64 * 2**20  # that a device's announced receives may take, before it needs them

UNKNOWN = -1  # bytes of a tensor that has not been sent yet

GLOO_THREADS = "gloo_tcp"  # what their names begin with

ALIGNMENT = 16  # bytes, of the parts of a message

Guard = Callable[[int | None, Callable[[], Any]], Any]  # communicates; turns a failure into one that names the rank


_tags = itertools.count()


def new_tag() -> int:
    """Returns a tag that no other messages have; all ranks ask in the same order."""
    return next(_tags)


def let_senders_run_first() -> None:
    """Makes Gloo's threads wait for a core until those that send give it up.

    A thread of Gloo that finds a sender at work looks again and again. Where it has taken the core from that sender, it does
    so until its time is up, for milliseconds. A thread of SCHED_BATCH takes no core from others when it wakes up.
    """
    for folder in Path("/proc/self/task").glob("*"):  # none, where there is no such folder
        with suppress(OSError):  # a thread that has ended, or a system that does not allow it
            if folder.joinpath("comm").read_text().startswith(GLOO_THREADS):
                os.sched_setscheduler(int(folder.name), os.SCHED_BATCH, os.sched_param(0))


class Look(NamedTuple):
    """What a tensor looks like in its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Look":
        """Returns that of a tensor."""
        return cls(tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()))


class Outgoing:
    """A tensor that another rank reads in every step."""

    def __init__(self, peer: int, tag: int, group: dist.ProcessGroup, guard: Guard, name: str) -> None:
        self._peer, self._tag, self._group, self._guard, self._name = peer, tag, group, guard, name
        self._nbytes, self._views = UNKNOWN, list[Look]()  # of the first step
        self._works: list[Any] = []  # the sends that have begun in this step; they keep what they send

    def send(self, *views: Tensor) -> None:
        """Begins to send the storage, given the views of it that readers start from.

        The first time it also sends what the views look like; they must look the same every time.
        """
        first = views[0]
        nbytes = first.untyped_storage().nbytes()
        if nbytes != self._nbytes or any(map(_differs, views, self._views)):
            self._describe(nbytes, views)
        if nbytes:
            self._begin(first if fills_storage(first) else storage_bytes(first))

    def finish(self) -> None:
        """Returns when the tensor has been sent, so that its memory may be written."""
        while self._works:
            self._guard(self._peer, self._works.pop().wait)

    def _begin(self, content: Tensor) -> None:
        self._works.append(self._guard(self._peer, lambda: self._group.send([content], self._peer, self._tag)))

    def _describe(self, nbytes: int, views: tuple[Tensor, ...]) -> None:
        if self._nbytes != UNKNOWN:
            raise ExecutionError(f"{self._name} has another size or layout than in the first step")
        self._nbytes, self._views = nbytes, list(map(Look.of, views))
        lines = [[str(dtype).removeprefix("torch."), *rest] for dtype, *rest in self._views]
        text = torch.frombuffer(bytearray(json.dumps([nbytes, *lines]).encode()), dtype=torch.uint8)
        self._begin(torch.tensor([len(text)]))
        self._begin(text)


class Incoming:
    """A tensor of another rank that this one reads in every step."""

    def __init__(self, peer: int, tag: int, group: dist.ProcessGroup, guard: Guard, empty: Empty) -> None:
        self._peer, self._tag, self._group, self._guard = peer, tag, group, guard
        self._empty = empty
        self._views: list[Look] = []  # as they are told in the first step
        self._make: Callable[[], Tensor] = partial(torch.empty, 0, dtype=torch.uint8)  # memory for the storage
        self._is_whole = False  # the first view is all of the storage
        self._given: tuple[Tensor, Any] | None = None  # what is announced: its memory, and the receive
        self.nbytes = UNKNOWN

    def announce(self) -> None:
        """Makes memory for the tensor, and tells the other rank that it can be sent."""
        content, work = self._make(), None
        if self.nbytes:
            work = self._guard(self._peer, lambda: self._group.recv([content], self._peer, self._tag))
        self._given = content, work

    def receive(self) -> tuple[Tensor, ...]:
        """Returns the views that readers start from, when the tensor is there."""
        if self.nbytes == UNKNOWN:
            self._learn()
        if self._given is None:
            self.announce()
        assert self._given is not None
        (content, work), self._given = self._given, None
        if work is not None:
            self._guard(self._peer, work.wait)
        if self._is_whole and len(self._views) == 1:
            return (content,)
        return tuple(_view(content, *view) for view in self._views)

    def _learn(self) -> None:
        """Takes what the views look like, which is sent before the first tensor."""
        length = torch.zeros(1, dtype=torch.int64)
        self._guard(self._peer, lambda: self._group.recv([length], self._peer, self._tag).wait())
        text = torch.zeros(int(length), dtype=torch.uint8)
        self._guard(self._peer, lambda: self._group.recv([text], self._peer, self._tag).wait())
        self.nbytes, *lines = json.loads(bytes(text.tolist()))
        self._views = [
            Look(getattr(torch, name), tuple(size), tuple(stride), offset) for name, size, stride, offset in lines
        ]
        dtype, size, stride, _ = self._views[0]
        is_contiguous = torch.empty_strided(size, stride, device="meta").is_contiguous()
        self._is_whole = is_contiguous and 0 < math.prod(size) * dtype.itemsize == self.nbytes
        whole = ((self.nbytes,), (1,), torch.uint8)
        size, stride, dtype = (size, stride, dtype) if self._is_whole else whole
        self._make = partial(self._empty, size, stride, dtype=dtype)


class Inbox:
    """What one device of this rank receives in a step, in launch order."""

    def __init__(self) -> None:
        self._incoming: dict[CopyTensor, Incoming] = {}
        self._waiting: deque[Incoming] = deque()  # not announced in this step
        self._ahead = 0  # bytes that are announced, and not yet taken

    def add(self, copy: CopyTensor, make: Callable[[], Incoming]) -> Callable[[], tuple[Tensor, ...]]:
        """Returns what receives a tensor; copies are added in launch order, each as often as lanes are written."""
        if copy not in self._incoming:
            self._incoming[copy] = make()
        return partial(self._take, self._incoming[copy])

    def open(self) -> None:
        """Announces the first receives of the next step."""
        self._waiting, self._ahead = deque(self._incoming.values()), 0
        self._announce()

    def _take(self, incoming: Incoming) -> tuple[Tensor, ...]:
        """Returns what was received, and announces more."""
        if incoming.nbytes == UNKNOWN:
            views = incoming.receive()
        elif self._waiting and self._waiting[0] is incoming:
            self._waiting.popleft()
            views = incoming.receive()
        else:
            views = incoming.receive()
            self._ahead -= incoming.nbytes
        self._announce()
        return views

    def _announce(self) -> None:
        """Announces as much as may be ahead, one at least; nothing of unknown size."""
        while self._waiting and (nbytes := self._waiting[0].nbytes) != UNKNOWN:
            if self._ahead and self._ahead + nbytes > AHEAD_BYTES:
                return
            self._waiting.popleft().announce()
            self._ahead += nbytes


class Exchange:
    """What every rank tells all others at the end of each step: some tensors, which look the same in most steps.

    The receives of a step are announced at the end of the one before: to announce one while a lane computes takes long.
    """

    def __init__(self, rank: int, num_ranks: int, tag: int, group: dist.ProcessGroup, guard: Guard) -> None:
        self._rank, self._others = rank, [other for other in range(num_ranks) if other != rank]
        self._tag, self._group, self._guard = tag, group, guard
        self._known: list[list[Look]] = []  # of each rank's tensors in the last step; empty if they can't be sent as bytes
        self._messages: list[Tensor] = []  # of each rank, announced if `_known` is not empty
        self._receives: list[tuple[int, Any]] = []

    def __call__(self, own: list[Tensor]) -> list[list[Tensor]]:
        """Returns the tensors of all ranks, in the order of the ranks; they are on the CPU."""
        looks = list(map(Look.of, own))
        if self._known:
            told = self._tell(own, looks == self._known[self._rank])
            if told is not None:
                self._announce()
                return told
        everyone: list[list[Tensor]] = [own] * (1 + len(self._others))
        self._guard(None, lambda: dist.all_gather_object(everyone, own, self._group))
        everyone[self._rank] = own
        is_plain = all(tensor.is_contiguous() for tensors in everyone for tensor in tensors)
        self._known = [list(map(Look.of, tensors)) for tensors in everyone] if is_plain else []
        self._announce()
        return everyone

    def _announce(self) -> None:
        """Makes memory for what the ranks tell next, and tells the others that they can send it."""
        self._messages = [torch.empty(ALIGNMENT + sum(map(_num_bytes, looks)), dtype=torch.uint8) for looks in self._known]
        self._receives = [
            (peer, self._begin(self._group.recv, self._messages[peer], peer)) for peer in self._others if self._known
        ]

    def _tell(self, own: list[Tensor], is_usual: bool) -> list[list[Tensor]] | None:
        """Returns the tensors of all ranks; None, on all ranks, if one of them has others than last time."""
        messages = self._messages
        messages[self._rank][0] = is_usual
        if is_usual:
            for place, tensor in zip(_parts(messages[self._rank], self._known[self._rank]), own, strict=True):
                place.copy_(tensor)
        sends = [(peer, self._begin(self._group.send, messages[self._rank], peer)) for peer in self._others]
        for peer, work in self._receives + sends:
            self._guard(peer, work.wait)
        if not all(message[0] for message in messages):
            return None
        return [
            own if rank == self._rank else list(_parts(message, looks))
            for rank, (message, looks) in enumerate(zip(messages, self._known, strict=True))
        ]

    def _begin(self, communicate: Callable[..., Any], message: Tensor, peer: int) -> Any:
        return self._guard(peer, lambda: communicate([message], peer, self._tag))


def _num_bytes(look: Look) -> int:
    """Returns the bytes that a tensor takes in a message, so that the next one is aligned."""
    return -(-math.prod(look.size) * look.dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _parts(message: Tensor, looks: list[Look]) -> Iterator[Tensor]:
    """Yields the contiguous tensors of a message, as views of it; its first bytes say whether it has any."""
    begin = ALIGNMENT
    for look in looks:
        yield _view(message, look.dtype, look.size, look.stride, begin // look.dtype.itemsize)
        begin += _num_bytes(look)


def _view(content: Tensor, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(content.untyped_storage(), offset, size, stride)


def _differs(view: Tensor, known: Look) -> bool:
    """Whether a tensor looks otherwise; the offset is compared last, because it takes longest."""
    return (
        view.dtype != known.dtype
        or view.size() != known.size
        or view.stride() != known.stride
        or view.storage_offset() != known.offset
    )
