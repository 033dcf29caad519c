"""Several hosts: each is a rank of torch.distributed, runs its own devices, and exchanges tensors with the others.

Every ordered pair of devices on two hosts has a thread on either side, which sends or receives in launch order. A send
waits for the op that makes its tensor, a receive for the send: only for what is earlier in the launch order, which all ranks
share. So the earliest copy that is not done can always go on, and no ranks wait for each other forever.
"""

import itertools
import json
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from placewise.core.cluster import Cluster
from placewise.core.errors import ExecutionError
from placewise.run.devices import RealDevice, real_devices
from placewise.run.lower.instructions import CopyTensor
from placewise.run.storage_copies import storage_bytes

HEARTBEAT_SECONDS = 1.0

MISSED_HEARTBEATS = 3  # after which a rank counts as ended or hanging

RETRY_SECONDS = 0.1  # between two attempts to reach the store of the ranks

MAX_PORT = 2**16 - 1

REASON = "reason"  # of the first failure, in the store

_numbers = itertools.count()  # of the compiled steps, which all ranks make in the same order


class Hosts:
    """The rank of this process among the hosts of a cluster: rank i is the i-th host."""

    def __init__(self, cluster: Cluster) -> None:
        self.rank, self.names = dist.get_rank(), cluster.host_names
        self.ranks: list[int] = cluster.hosts.tolist()  # [devices]
        if dist.get_world_size() != len(self.names):
            raise ExecutionError(
                f"cluster {cluster.name!r} has {len(self.names)} hosts ({', '.join(self.names)}), but torch.distributed has "
                f"{dist.get_world_size()} ranks: start one rank for each host"
            )
        self._presence, self._failure = Presence(self.rank, len(self.names)), ""
        weakref.finalize(self, self._presence.stop.set)

    def agree(self, facts: dict[str, str]) -> None:
        """Raises an ExecutionError on all ranks if they differ in a fact, such as the graph's digest."""
        everyone: list[dict[str, str]] = [{}] * len(self.names)
        self._guarded(None, lambda: dist.all_gather_object(everyone, facts))
        for rank, theirs in enumerate(everyone):
            for name, value in everyone[0].items():
                if theirs.get(name) != value:
                    raise ExecutionError(
                        f"rank {rank} ({self.names[rank]!r}) has another {name} than rank 0: {str(theirs.get(name))[:20]}, "
                        f"not {value[:20]}; all ranks must run the same code with the same plan"
                    )

    def real_devices(self, cluster: Cluster) -> tuple[RealDevice, ...]:
        """Returns the real devices of this rank, and stand-ins for those of other ranks, in the cluster's order."""
        own = tuple(device for device, rank in zip(cluster.devices, self.ranks, strict=True) if rank == self.rank)
        names = [device.name for device in own]
        links = tuple(link for link in cluster.links if link.source in names and link.target in names)
        mine = {device.name: device for device in real_devices(Cluster(cluster.name, own, links))}
        return tuple(
            mine.get(device.name) or RealDevice(device.name, "cpu", "cpu", rank=rank)
            for device, rank in zip(cluster.devices, self.ranks, strict=True)
        )

    def sender(self, copy: CopyTensor) -> Callable[..., None]:
        """Returns the function that sends a tensor's storage, given the views of it that readers start from.

        The first time it also sends what the views look like; they must look the same every time.
        """
        peer, tag = self.ranks[copy.target], self._tag(copy)
        known = ""

        def send(*views: Tensor) -> None:
            nonlocal known
            content = storage_bytes(views[0])
            described = json.dumps([content.numel(), *map(_describe, views)])
            if described != known:
                if known:
                    raise ExecutionError(f"tensor {copy.tensor} has another size or layout than in the first step")
                text = torch.frombuffer(bytearray(described.encode()), dtype=torch.uint8)
                self._guarded(peer, lambda: dist.send(torch.tensor([len(text)]), peer, tag=tag))
                self._guarded(peer, lambda: dist.send(text, peer, tag=tag))
                known = described
            if content.numel():
                self._guarded(peer, lambda: dist.send(content, peer, tag=tag))

        return send

    def receiver(self, copy: CopyTensor) -> Callable[[], tuple[Tensor, ...]]:
        """Returns the function that receives a tensor's storage, and returns the views that readers start from."""
        peer, tag = self.ranks[copy.source], self._tag(copy)
        known: list[Any] = []

        def receive() -> tuple[Tensor, ...]:
            nonlocal known
            if not known:
                length = torch.zeros(1, dtype=torch.int64)
                self._guarded(peer, lambda: dist.recv(length, peer, tag=tag))
                text = torch.zeros(int(length), dtype=torch.uint8)
                self._guarded(peer, lambda: dist.recv(text, peer, tag=tag))
                known = json.loads(bytes(text.tolist()))
            content = torch.empty(known[0], dtype=torch.uint8)
            if known[0]:
                self._guarded(peer, lambda: dist.recv(content, peer, tag=tag))
            return tuple(_view(content, *entry) for entry in known[1:])

        return receive

    def share(self, values: list[Any], devices: Sequence[int], drawing: int | None) -> list[Any]:
        """Returns values [n] with each taken from the rank of its device [n]; ends when all ranks are here.

        The random generator becomes that of the rank of the device `drawing`, if the step draws numbers.
        """
        mine = {i: value for i, value in enumerate(values) if self.ranks[devices[i]] == self.rank}
        rank = None if drawing is None else self.ranks[drawing]
        generator = torch.get_rng_state() if rank == self.rank else None
        everyone: list[Any] = [None] * len(self.names)
        self._guarded(None, lambda: dist.all_gather_object(everyone, (mine, generator)))
        if rank is not None:
            torch.set_rng_state(everyone[rank][1])
        return [everyone[self.ranks[device]][0][i] for i, device in enumerate(devices)]

    def collect(self, tensor: Tensor, device: int) -> None:
        """Writes the value that a device's rank has over this rank's tensor."""
        content = tensor.detach().contiguous()
        self._guarded(self.ranks[device], lambda: dist.broadcast(content, self.ranks[device]))
        if self.ranks[device] != self.rank:
            tensor.detach().copy_(content)

    def _tag(self, copy: CopyTensor) -> int:
        return 1 + copy.source * len(self.ranks) + copy.target

    @contextmanager
    def step(self) -> Iterator[None]:
        """Tells the other ranks that this one is in a step and, if it fails, why."""
        if self._failure:
            raise ExecutionError(f"an earlier step failed ({self._failure}): start all ranks again")
        self._presence.steps_begun += 1
        try:
            yield
        except BaseException as problem:
            what = str(problem).partition("\n")[0] or type(problem).__name__
            self._failure = self._presence.blame(f"{self._name(self.rank)} failed: {what}")
            raise
        self._presence.steps_ended += 1

    def _guarded(self, peer: int | None, communicate: Callable[[], Any]) -> None:
        """Communicates; a failure becomes an ExecutionError that names the rank that has failed, ended or hangs."""
        try:
            communicate()
        except RuntimeError as problem:
            raise ExecutionError(self._blame(peer)) from problem

    def _blame(self, peer: int | None) -> str:
        """Returns what all ranks give as the reason: what the first of them has found."""
        earlier = self._presence.blamed()
        if earlier:
            return earlier
        silent, late = self._presence.look()
        if silent:
            text = f"{' and '.join(map(self._name, silent))} ended or hangs, so the step can't go on"
        elif late:
            text = f"{' and '.join(map(self._name, late))} did not come to the step in time"
        else:
            who = "another rank" if peer is None else self._name(peer)
            text = f"{who} did not answer in time, or failed: see its own message"
        return self._presence.blame(text)

    def _name(self, rank: int) -> str:
        return f"rank {rank} (host {self.names[rank]!r})"


class Presence:
    """Tells the other ranks every second that this process lives and where it is, and looks where they are.

    It uses the store of the process group, under a name of its own for each compiled step.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.steps_begun = self.steps_ended = 0
        self._store: Any = dist.distributed_c10d.PrefixStore(
            f"placewise {next(_numbers)}", dist.distributed_c10d._get_default_store()
        )
        self._rank, self._num_ranks = rank, num_ranks
        self.stop = threading.Event()
        threading.Thread(target=_beat, args=(weakref.ref(self), self.stop), name="placewise heartbeat", daemon=True).start()

    def tell(self, number: int) -> None:
        """Writes down that this process lives, and whether it is in a step."""
        self._store.set(str(self._rank), f"{number} {self.steps_begun} {self.steps_ended}")

    def look(self) -> tuple[list[int], list[int]]:
        """Returns the ranks that don't tell anything in the next seconds, and those that others wait for before a step.

        Both are empty if the store does not answer.
        """
        before = self._ask(self._everyone)
        time.sleep(MISSED_HEARTBEATS * HEARTBEAT_SECONDS)
        now = self._ask(self._everyone)
        if before is None or now is None:
            return [], []
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        begun = {rank: int(now[rank].split()[1]) for rank in others if now[rank]}
        late = [rank for rank, count in begun.items() if count < self.steps_begun]
        return [rank for rank in others if before[rank] == now[rank]], late

    def blamed(self) -> str:
        """Returns the reason that a rank has given for a failure; "" if none has."""
        return self._ask(lambda: self._store.get(REASON).decode() if self._store.check([REASON]) else "") or ""

    def blame(self, reason: str) -> str:
        """Returns the first reason that any rank gives for a failure: this one, if no rank was earlier."""
        return self._ask(lambda: self._store.compare_set(REASON, "", reason).decode()) or reason

    def _everyone(self) -> list[str]:
        ranks = map(str, range(self._num_ranks))
        return [self._store.get(rank).decode() if self._store.check([rank]) else "" for rank in ranks]

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Returns what the store answers; None if it does not, because the process that has it has ended or hangs."""
        answers: list[Any] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(question())

        thread = threading.Thread(target=ask, name="placewise store", daemon=True)
        thread.start()
        thread.join(MISSED_HEARTBEATS * HEARTBEAT_SECONDS)
        return answers[0] if answers else None


def _beat(presence: "weakref.ref[Presence]", stop: threading.Event) -> None:
    number = 0
    with suppress(RuntimeError):  # the store goes with its process
        while not stop.is_set() and (alive := presence()) is not None:
            alive.tell(number)
            del alive
            number += 1
            stop.wait(HEARTBEAT_SECONDS)


@contextmanager
def joined_ranks(timeout_seconds: float) -> Iterator[int]:
    """Joins the ranks that torchrun has started, over Gloo, and gives this process's rank; leaves them at the end.

    A rank that does not answer for `timeout_seconds` ends the others.
    """
    _check_rendezvous(timeout_seconds)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
    except (RuntimeError, ValueError) as problem:
        raise ExecutionError(f"can't join the other ranks: {str(problem).splitlines()[0]}") from problem
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def _check_rendezvous(timeout_seconds: float) -> None:
    """Raises an ExecutionError unless the environment names a rank, and a store that answers.

    torch.distributed also prints a stack of C++ calls when it can't reach the store.
    """
    given = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    numbers = {name: int(text) for name, text in given.items() if re.fullmatch("[0-9]{1,9}", text)}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if name not in numbers:
            raise ExecutionError(f"can't join the other ranks: {name} must be a whole number, got {given[name][:40]!r}")
    rank, size, port, host = numbers["RANK"], numbers["WORLD_SIZE"], numbers["MASTER_PORT"], given["MASTER_ADDR"]
    if not host or port > MAX_PORT:
        raise ExecutionError(
            f"can't join the other ranks: MASTER_ADDR and MASTER_PORT are no address: {host[:80]!r}, {port}"
        )
    if not rank < size:
        raise ExecutionError(f"can't join the other ranks: RANK must be below WORLD_SIZE, got {rank} and {size}")
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return  # this process has the store
    until = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=timeout_seconds).close()
            return
        except (OSError, UnicodeError) as problem:
            if time.monotonic() >= until:
                raise ExecutionError(
                    f"can't join the other ranks: nothing answers at {host[:80]}:{port} ({problem}); rank 0 must run there"
                ) from problem
        time.sleep(RETRY_SECONDS)


def _describe(view: Tensor) -> list[Any]:
    return [str(view.dtype).removeprefix("torch."), list(view.size()), list(view.stride()), view.storage_offset()]


def _view(content: Tensor, dtype: str, size: list[int], stride: list[int], offset: int) -> Tensor:
    empty = torch.empty(0, dtype=getattr(torch, dtype))
    return empty.set_(content.untyped_storage(), offset, size, stride)
