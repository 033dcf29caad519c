"""Several hosts: each is a rank of torch.distributed, runs its own devices, and exchanges tensors with the others.

Every ordered pair of devices on two hosts has a thread on either side, which sends or receives in launch order. A send
waits for the op that makes its tensor, a receive for the send: only for what is earlier in the launch order, which all ranks
share. So the earliest copy that is not done can always go on, and no ranks wait for each other forever.
"""

import json
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
        self._heartbeats = Heartbeats(self.rank, len(self.names))
        weakref.finalize(self, self._heartbeats.stop.set)

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

    def _guarded(self, peer: int | None, communicate: Callable[[], Any]) -> None:
        """Communicates; a failure becomes an ExecutionError that names the ranks that have ended or hang."""
        try:
            communicate()
        except RuntimeError as problem:
            raise ExecutionError(self._blame(peer)) from problem

    def _blame(self, peer: int | None) -> str:
        silent = self._heartbeats.silent_ranks()
        if silent:
            return f"{' and '.join(map(self._name, silent))} ended or hangs, so the step can't go on"
        return (
            f"{'another rank' if peer is None else self._name(peer)} did not answer in time, or failed: see its own message"
        )

    def _name(self, rank: int) -> str:
        return f"rank {rank} (host {self.names[rank]!r})"


class Heartbeats:
    """Tells the other ranks every second that this process lives, and knows which of them have stopped telling it."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._rank, self._num_ranks = rank, num_ranks
        self.stop = threading.Event()
        threading.Thread(
            target=_beat, args=(self._store, _key(rank), self.stop), name="placewise heartbeat", daemon=True
        ).start()

    def silent_ranks(self) -> list[int]:
        """Returns the other ranks without a heartbeat in the next seconds; none if the store is gone."""
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        try:
            before = [self._store.add(_key(rank), 0) for rank in others]
            time.sleep(MISSED_HEARTBEATS * HEARTBEAT_SECONDS)
            return [rank for rank, count in zip(others, before, strict=True) if self._store.add(_key(rank), 0) == count]
        except RuntimeError:
            return []


def _beat(store: Any, key: str, stop: threading.Event) -> None:
    with suppress(RuntimeError):  # the store goes with its process
        while not stop.is_set():
            store.add(key, 1)
            stop.wait(HEARTBEAT_SECONDS)


def _key(rank: int) -> str:
    return f"placewise heartbeat {rank}"


@contextmanager
def joined_ranks(timeout_seconds: float) -> Iterator[int]:
    """Joins the ranks that torchrun has started, over Gloo, and gives this process's rank; leaves them at the end.

    A rank that does not answer for `timeout_seconds` ends the others.
    """
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
    except (RuntimeError, ValueError) as problem:
        raise ExecutionError(f"can't join the other ranks: {str(problem).splitlines()[0]}") from problem
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def _describe(view: Tensor) -> list[Any]:
    return [str(view.dtype).removeprefix("torch."), list(view.size()), list(view.stride()), view.storage_offset()]


def _view(content: Tensor, dtype: str, size: list[int], stride: list[int], offset: int) -> Tensor:
    empty = torch.empty(0, dtype=getattr(torch, dtype))
    return empty.set_(content.untyped_storage(), offset, size, stride)
