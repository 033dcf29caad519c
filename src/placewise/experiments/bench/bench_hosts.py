"""Steps over two hosts, which are network namespaces of this machine: `placewise bench hosts`."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placewise.core.errors import InputError, PlacewiseError
from placewise.experiments.bench import Benchmark, Findings, Rows, option, table_of
from placewise.experiments.bench.delayed_cable import TUN_FILE, open_card

SUBNET = "10.213.0"  # of the hosts' network, which nothing outside can see

PERIOD_MICROSECONDS = 100_000  # of the kernel's CPU quotas

PORT = "29517"

MTU, JUMBO_MTU, ETHERNET_HEADER = 1500, 9000, 14  # bytes, of packets

FAST = 500  # Mbit/s from which on cards have jumbo frames

MODELS = (
    "gpt:layers=4,hidden=128,heads=4,length=64,batch=8,vocab=500,micro_batches=4,dropout=0",
    "bert:layers=4,hidden=128,heads=4,length=64,batch=8,vocab=500,micro_batches=4,dropout=0",
    "nmt:layers=2,hidden=128,length=8,batch=16,vocab=500",
    "resnet:depth=50,image=64,batch=8,classes=10",
)

LARGE = "gpt:layers=8,hidden=768,heads=12,length=64,batch=2,vocab=8000,dropout=0"  # for memory

PLACEMENTS = ("cpu-only", "pipeline", "m-etf", "random")


PARTS = ("predictions", "plans", "pipelining", "memory")

WORDS = "predictions, plans, pipelining and memory"


@dataclass(frozen=True)
class OverHosts(Benchmark):
    """Steps over two hosts: predicted and measured over slow networks, plans for other networks, and each rank's memory.

    The hosts are network namespaces, which need root, `ip` and `tc`; without --rates the network is this machine's own.
    """

    parts: tuple[str, ...] = option("list", f"of {WORDS} (default: all)", default=PARTS)
    rates: tuple[str, ...] = option("list", "of the network, in Mbit/s, for example 100,1000", default=())
    models: tuple[str, ...] = option("models", "of predictions and plans, instead of the usual four", default=())
    steps: int = option("positive", "that are measured of each placement", default=10)
    seconds: float = option("seconds", "of a search by auto", default=20.0)
    share: float = option("share", "of a core that the second host gets (needs cgroups), in pipelining", default=1.0)
    delay: float = option("seconds", "that a packet takes from host to host, with --rates", default=0.0)

    def run(self) -> Findings:
        """Returns the rows of each part."""
        data: dict[str, Any] = {}
        for part in self.parts:
            if part not in PARTS:
                raise InputError(f"--parts: must be of {WORDS}, one is {part!r}")
        for rate in self.rates:
            if not rate.isdecimal() or not 0 < int(rate) <= 100_000:
                raise InputError(f"--rates: must be whole numbers of Mbit/s up to 100000, one is {rate!r}")
        if self.delay and not self.rates:
            raise InputError("--delay: needs --rates, because only a network of the benchmark's own can delay packets")
        settings = {"steps": self.steps, "seconds": self.seconds, "models": self.models or MODELS, "placements": PLACEMENTS}
        for part in self.parts:
            if part == "memory":
                rows: Rows = []
                for own in (True, False):
                    found = _run_ranks({"part": part, "models": self.models or (LARGE,), "own": own}, None, 0.0)
                    rows += [{"holds": "its own part" if own else "the whole model", **row} for row in found]
                data[part] = rows
                continue
            if part == "pipelining":
                with _group(self.share) as group:
                    data[part] = _run_ranks({**settings, "part": part, "group": group}, None, 0.0)
                continue
            for rate in self.rates or ("",):
                found = _run_ranks({**settings, "part": part}, int(rate) if rate else None, self.delay)
                data.setdefault(part, [])
                data[part] += [{"Mbit/s": rate or "-", **row} for row in found]
        lines = [f"{part}\n{table_of(rows)}" for part, rows in data.items()]
        if data.get("predictions"):
            lines.append(_errors(data["predictions"]))
        return Findings({self.name(): data}, "\n\n".join(lines))


@contextmanager
def _group(share: float) -> Iterator[str]:
    """Gives the folder of a control group whose processes get a share of a core together; "" for a whole one."""
    if share == 1:
        yield ""
        return
    first = Path("/sys/fs/cgroup/cpu")
    folder = (first if first.is_dir() else first.parent) / f"placewise-{os.getpid()}"
    try:
        folder.mkdir()
        if first.is_dir():
            Path(folder, "cpu.cfs_quota_us").write_text(str(int(share * PERIOD_MICROSECONDS)))
        else:
            Path(folder, "cpu.max").write_text(f"{int(share * PERIOD_MICROSECONDS)} {PERIOD_MICROSECONDS}")
    except OSError as problem:
        raise InputError(f"--share needs control groups of the CPU, and the right to make one: {problem}") from problem
    try:
        yield str(folder)
    finally:
        folder.rmdir()


def _errors(rows: Rows) -> str:
    """Returns the median error of the predictions, and how often two placements of a model are in the right order."""
    import numpy as np

    errors = [abs(row["predicted ms"] / row["measured ms"] - 1) for row in rows]
    right = total = 0
    for i, a in enumerate(rows):
        for b in rows[:i]:
            if (a["model"], a["Mbit/s"]) == (b["model"], b["Mbit/s"]):
                total += 1
                right += (a["predicted ms"] < b["predicted ms"]) == (a["measured ms"] < b["measured ms"])
    return f"median error {np.median(errors):.0%}, at most {max(errors):.0%}; {right} of {total} pairs in the right order"


def _run_ranks(settings: dict[str, Any], rate: int | None, delay: float) -> Rows:
    """Runs the two ranks, each in its host, and returns what they have found."""
    with tempfile.TemporaryDirectory(prefix="placewise-") as folder, _hosts(rate, delay) as hosts:
        output = Path(folder, "rows.json")
        text = json.dumps({**settings, "output": str(output)})
        ranks = []
        for rank, (prefix, _, interface) in enumerate(hosts):
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": hosts[0][1], "MASTER_PORT": PORT,
                "OMP_NUM_THREADS": "1", **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
            }  # fmt: skip
            command = [*prefix, sys.executable, "-m", "placewise.experiments.bench.hosts_rank", text]
            ranks.append(subprocess.Popen(command, env=environment))
        try:
            while not any(codes := [rank.poll() for rank in ranks]) and None in codes:
                time.sleep(0.1)
        finally:
            for process in ranks:
                process.kill()
                process.wait()  # its control group can be removed then
        if any(codes):
            raise PlacewiseError(f"a rank ended with {next(filter(None, codes))}: see its own message")
        found: Rows = json.loads(output.read_text())
        return found


@contextmanager
def _hosts(rate: int | None, delay: float) -> Iterator[list[tuple[list[str], str, str]]]:
    """Gives for each host what its commands begin with, its address and its network interface.

    With a rate in Mbit/s, hosts are network namespaces, whose cards send at this rate.
    """
    if rate is None:
        yield [([], "127.0.0.1", ""), ([], "127.0.0.1", "")]
        return
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise InputError("--rates needs ip and tc: install iproute2")
    names = [f"placewise-{os.getpid()}-{host}" for host in "ab"]
    cards = [f"pw{os.getpid() % 10**8}{host}" for host in "ab"]
    with ExitStack() as undo:
        for name in names:
            undo.callback(subprocess.run, ["ip", "netns", "delete", name], capture_output=True, check=False)
            _command("ip", "netns", "add", name)
        if delay:
            undo.enter_context(_delayed_cable(names, cards, delay))
        else:
            ends = ("peer", "name", cards[1], "netns", names[1])
            _command("ip", "link", "add", cards[0], "netns", names[0], "type", "veth", *ends)
        for number, (name, card) in enumerate(zip(names, cards, strict=True), 1):
            _command("ip", "-n", name, "address", "add", f"{SUBNET}.{number}/24", "dev", card)
            for link in (card, "lo"):
                _command("ip", "-n", name, "link", "set", link, "up")
            # A card sends at its rate: what it may send at once is two packets, and 100 us of a fast one. Fast ones have
            # jumbo frames: cutting a stream into small packets at 1 Gbit/s would take half a core, which the steps need.
            packet = JUMBO_MTU if rate >= FAST or delay else MTU
            _command("ip", "-n", name, "link", "set", card, "mtu", str(packet))
            burst = max(rate * 125 // 10, 2 * (packet + ETHERNET_HEADER))
            limit = ["tbf", "rate", f"{rate}mbit", "burst", f"{burst}", "latency", "100ms"]
            _command("tc", "-n", name, "qdisc", "add", "dev", card, "root", *limit)
        yield [
            (["ip", "netns", "exec", name], f"{SUBNET}.{number}", card)
            for number, (name, card) in enumerate(zip(names, cards, strict=True), 1)
        ]


@contextmanager
def _delayed_cable(names: list[str], cards: list[str], delay: float) -> Iterator[None]:
    """Makes the cards in these network namespaces, with a process between them that delays packets."""
    try:
        files = [open_card(card) for card in cards]
    except OSError as problem:
        raise InputError(f"--delay needs {TUN_FILE}, and the right to make network cards: {problem}") from problem
    for name, card in zip(names, cards, strict=True):
        _command("ip", "link", "set", card, "netns", name)
    command = [sys.executable, "-m", "placewise.experiments.bench.delayed_cable", *map(str, files), str(delay)]
    cable = subprocess.Popen(command, pass_fds=files)
    try:
        yield
    finally:
        cable.kill()
        cable.wait()
        for file in files:
            os.close(file)


def _command(*words: str) -> None:
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    if result.returncode:
        raise PlacewiseError(f"{' '.join(words)}: {result.stderr.strip()}")
