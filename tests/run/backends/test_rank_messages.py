"""Messages between ranks, with a mailbox of this process in the place of torch.distributed."""

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, empty_strided

from placewise.core.errors import ExecutionError
from placewise.run.backends import rank_messages
from placewise.run.backends.rank_messages import Inbox, Incoming, Outgoing
from placewise.run.lower.instructions import CopyTensor
from placewise.run.storage_copies import storage_bytes

NUMBERS = torch.arange(6)


class Mailbox:
    """Sends are kept by tag until they are waited for; counts the receives that are announced and not yet taken."""

    def __init__(self) -> None:
        self.sent: defaultdict[int, deque[Tensor]] = defaultdict(deque)
        self.announced = 0

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> "Work":
        self.sent[tag].append(tensors[0].clone())
        return Work(lambda: None)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> "Work":
        self.announced += 1

        def take() -> None:
            self.announced -= 1
            sent = self.sent[tag].popleft()
            assert sent.nbytes == tensors[0].nbytes
            storage_bytes(tensors[0]).copy_(storage_bytes(sent))

        return Work(take)


class Work:
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


def plainly(_: int | None, communicate: Callable[[], Any]) -> Any:
    return communicate()


def pair(mailbox: Mailbox, tag: int) -> tuple[Outgoing, Incoming]:
    """Returns both ends of a copy."""
    group = cast(dist.ProcessGroup, mailbox)
    return Outgoing(1, tag, group, plainly, f"tensor {tag}"), Incoming(0, tag, group, plainly, empty_strided)


@pytest.mark.parametrize(
    "views",
    [
        (torch.arange(6.0).view(2, 3),),
        (torch.arange(6.0).view(2, 3).t(),),  # not contiguous
        (NUMBERS[2:4], NUMBERS[1:]),  # parts of one storage
        (torch.arange(6, dtype=torch.uint8)[2:5],),
        (torch.zeros(0),),
        (torch.ones(()),),
    ],
)
def test_views_arrive_as_they_were(views: tuple[Tensor, ...]) -> None:
    """Type, size, strides and values, in the first step and in later ones."""
    out, into = pair(Mailbox(), 1)
    for _ in range(3):
        out.send(*views)
        found = into.receive()
        out.finish()
        assert [(v.dtype, v.stride(), v.storage_offset()) for v in found] == [
            (v.dtype, v.stride(), v.storage_offset()) for v in views
        ]
        assert all(map(torch.equal, found, views))


def test_a_tensor_that_looks_otherwise_is_refused() -> None:
    """Its size, type or strides were told in the first step."""
    out, _ = pair(Mailbox(), 1)
    out.send(torch.zeros(2, 3))
    for other in (torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, 2).t()):
        with pytest.raises(ExecutionError, match="tensor 1 has another size or layout than in the first step"):
            out.send(other)


def test_receives_are_announced_ahead_as_far_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of 40, 40, 40 and 400 bytes with 100 bytes ahead: two, then the third, and the last when it is alone."""
    monkeypatch.setattr(rank_messages, "AHEAD_BYTES", 100)
    mailbox, inbox = Mailbox(), Inbox()
    sizes = [10, 10, 10, 100]
    ends = [pair(mailbox, tag) for tag in range(len(sizes))]
    takes = [inbox.add(CopyTensor(tag, 0, 1), lambda into=into: into) for tag, (_, into) in enumerate(ends)]  # type: ignore[misc]
    ahead = []
    for _ in range(2):
        for (out, _), size in zip(ends, sizes, strict=True):
            out.send(torch.zeros(size))
        inbox_was = mailbox.announced
        for take, size in zip(takes, sizes, strict=True):
            ahead.append(mailbox.announced)
            assert len(take()[0]) == size
        inbox.open()
    assert inbox_was == 2
    assert ahead == [0, 0, 0, 0, 2, 2, 1, 1]
    assert mailbox.announced == 2
