"""Several hosts: each is a rank of torch.distributed, runs its own devices, and exchanges tensors with the others.

rank_messages.py sends and receives the tensors; here is what belongs to a rank: its devices, its failures and its presence.
"""

import itertools
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from placewise.core.cluster import Cluster
from placewise.core.errors import ExecutionError
from placewise.machines.detect import processors
from placewise.machines.slices import Cut
from placewise.run.backends import VISIBLE
from placewise.run.backends.rank_messages import Exchange, Inbox, Incoming, Outgoing, let_senders_run_first, new_tag
from placewise.run.devices import RealDevice, real_devices
from placewise.run.lower.instructions import CopyTensor, Instructions
from placewise.run.lower.rank_part import part_of
from placewise.run.storage_copies import Empty

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
        self._failures = RankFailures(self.names, self._presence)
        self._group = _gloo_group(dist.group.WORLD)
        let_senders_run_first()
        self._tags: dict[CopyTensor, int] = {}
        self._outgoing: dict[CopyTensor, Outgoing] = {}
        self._inboxes: dict[int, Inbox] = {}  # by device
        self._exchange = Exchange(self.rank, len(self.names), new_tag(), self._group, self._failures.guarded)
        weakref.finalize(self, self._presence.stop.set)

    def agree(self, facts: dict[str, str]) -> None:
        """Raises an ExecutionError on all ranks if they differ in a fact, such as the graph's digest."""
        everyone: list[dict[str, str]] = [{}] * len(self.names)
        self._failures.guarded(None, lambda: dist.all_gather_object(everyone, facts, self._group))
        for rank, theirs in enumerate(everyone):
            for name, value in everyone[0].items():
                if theirs.get(name) != value:
                    raise ExecutionError(
                        f"rank {rank} ({self.names[rank]!r}) has another {name} than rank 0: {str(theirs.get(name))[:20]}, "
                        f"not {value[:20]}; all ranks must run the same code with the same plan"
                    )

    def real_devices(self, cluster: Cluster, virtual: Mapping[str, Cut] | None = None) -> tuple[RealDevice, ...]:
        """Returns the real devices of this rank, and stand-ins for those of other ranks, in the cluster's order.

        Ranks that see the same cores, or the same GPUs, share them as the devices of one process would.
        """
        facts: list[dict[str, Any]] = [{}] * len(self.names)
        self._failures.guarded(None, lambda: dist.all_gather_object(facts, _hardware(), self._group))
        mine = facts[self.rank]
        beside = tuple(
            device
            for device, rank in zip(cluster.devices, self.ranks, strict=True)
            if facts[rank].get(device.kind, facts[rank]["machine"]) == mine.get(device.kind, mine["machine"])
        )
        names = [device.name for device in beside]
        links = tuple(link for link in cluster.links if link.source in names and link.target in names)
        found = dict(zip(names, real_devices(Cluster(cluster.name, beside, links), virtual), strict=True))
        return tuple(
            found[device.name] if rank == self.rank else RealDevice(device.name, "cpu", "cpu", rank=rank)
            for device, rank in zip(cluster.devices, self.ranks, strict=True)
        )

    def part_of(self, whole: Instructions) -> Instructions:
        """Returns this rank's part of the instructions; copies between ranks get numbers that all ranks agree on."""
        crossing = [copy for copy in whole.sequence if isinstance(copy, CopyTensor) and self._crosses(copy)]
        self._tags = {copy: new_tag() for copy in crossing}
        return part_of(whole, self.ranks, self.rank)

    def _crosses(self, copy: CopyTensor) -> bool:
        return self.ranks[copy.source] != self.ranks[copy.target]

    def sender(self, copy: CopyTensor) -> Callable[..., None]:
        """Returns what begins to send a tensor's storage, given the views of it that readers start from."""
        return self._outgoing_of(copy).send

    def finisher(self, copy: CopyTensor) -> Callable[[], None]:
        """Returns what waits until the tensor has been sent."""
        return self._outgoing_of(copy).finish

    def receiver(self, copy: CopyTensor, empty: Empty) -> Callable[[], tuple[Tensor, ...]]:
        """Returns what waits for a tensor's storage, and returns the views that readers start from, in such memory."""
        peer = self.ranks[copy.source]
        make = partial(Incoming, peer, self._tags[copy], self._group, self._failures.guarded, empty)
        return self._inboxes.setdefault(copy.target, Inbox()).add(copy, make)

    def _outgoing_of(self, copy: CopyTensor) -> Outgoing:
        if copy not in self._outgoing:
            peer, name = self.ranks[copy.target], f"tensor {copy.tensor}"
            self._outgoing[copy] = Outgoing(peer, self._tags[copy], self._group, self._failures.guarded, name)
        return self._outgoing[copy]

    def share(self, values: list[Any], devices: Sequence[int], drawing: int | None) -> list[Any]:
        """Returns values [n] with each taken from the rank of its device [n]; ends when all ranks are here.

        The random generator becomes that of the rank of the device `drawing`, if the step draws numbers. The receives of the
        next step are announced now: while ranks wait for each other, Gloo's threads have time for that.
        """
        for inbox in self._inboxes.values():
            inbox.open()
        mine = [value.cpu() for value, device in zip(values, devices, strict=True) if self.ranks[device] == self.rank]
        drawn = None if drawing is None else self.ranks[drawing]
        everyone = self._exchange(mine + ([torch.get_rng_state()] if drawn == self.rank else []))
        if drawn is not None and drawn != self.rank:
            torch.set_rng_state(everyone[drawn][-1].clone())
        given = list(map(iter, everyone))
        found = [next(given[self.ranks[device]]) for device in devices]
        return [
            value if self.ranks[device] == self.rank else other
            for value, other, device in zip(values, found, devices, strict=True)
        ]

    def collect(self, tensor: Tensor, device: int) -> None:
        """Writes the value that a device's rank has over this rank's tensor."""
        content = tensor.detach().cpu().contiguous()
        self._failures.guarded(self.ranks[device], lambda: dist.broadcast(content, self.ranks[device], self._group))
        if self.ranks[device] != self.rank:
            tensor.detach().copy_(content)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Tells the other ranks that this one is in a step and, if it fails, why."""
        if self._failure:
            raise ExecutionError(f"an earlier step failed ({self._failure}): start all ranks again")
        self._presence.steps_begun += 1
        try:
            yield
            for outgoing in self._outgoing.values():
                outgoing.finish()
        except BaseException as problem:
            what = str(problem).partition("\n")[0] or type(problem).__name__
            self._failure = self._presence.blame(f"{self._failures.name(self.rank)} failed: {what}")
            raise
        self._presence.steps_ended += 1


class RankFailures:
    """Names the rank that has failed when ranks can't communicate any more."""

    def __init__(self, names: Sequence[str], presence: "Presence") -> None:
        self._names, self._presence = names, presence

    def guarded(self, peer: int | None, communicate: Callable[[], Any]) -> Any:
        """Communicates; a failure becomes an ExecutionError that names the rank that has failed, ended or hangs."""
        try:
            return communicate()
        except RuntimeError as problem:
            raise ExecutionError(self._reason(peer)) from problem

    def _reason(self, peer: int | None) -> str:
        """Returns what all ranks give as the reason: what the first of them has found."""
        earlier = self._presence.blamed()
        if earlier:
            return earlier
        silent, late = self._presence.look()
        if silent:
            text = f"{' and '.join(map(self.name, silent))} ended or hangs, so the step can't go on"
        elif late:
            text = f"{' and '.join(map(self.name, late))} did not come to the step in time"
        else:
            who = "another rank" if peer is None else self.name(peer)
            text = f"{who} did not answer in time, or failed: see its own message"
        return self._presence.blame(text)

    def name(self, rank: int) -> str:
        """Returns a rank's name in messages."""
        return f"rank {rank} (host {self._names[rank]!r})"


class Presence:
    """Tells the other ranks every second that this process lives and where it is, and looks where they are.

    It uses the store of the process group, under a name of its own for each compiled step.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.steps_begun = self.steps_ended = 0
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep its store for the next one
        self._store: Any = dist.distributed_c10d.PrefixStore(
            f"placewise {attempt} {next(_numbers)}", dist.distributed_c10d._get_default_store()
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


def _gloo_group(world: Any) -> dist.ProcessGroup:
    """Returns a group of all ranks that moves CPU tensors: the world, or a new one if that has only NCCL."""
    if "gloo" in dist.get_backend(world) or "cpu:gloo" in str(dist.get_backend_config(world)):
        return cast(dist.ProcessGroup, world)
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo"))


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


def _hardware() -> dict[str, Any]:
    """Returns which hardware of each kind this process sees: equal on ranks that see the same."""
    machine = socket.gethostname()
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:  # the same in all containers of a machine
        machine = file.read().strip()
    gpus = {kind: (machine, os.environ.get(name)) for kind, name in VISIBLE.items()}
    return {"machine": machine, "cpu": (machine, processors()), **gpus}
