"""What a placement means, in the plainest Python: slow, obvious, and what the kernels are tested against.

It works on plain data as the files have it: a graph, a cluster, and a device name for each group.
"""

from typing import Any

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def size(text: int | str) -> int:
    """Returns a number of bytes from 4096 or "12GiB"."""
    if not isinstance(text, str):
        return int(text)
    unit = next((u for u in UNITS if text.endswith(u)), None)
    return int(float(text.removesuffix(unit)) * UNITS[unit]) if unit else int(text)


def links(cluster: Any) -> dict[tuple[str, str], tuple[float, float, tuple[str, ...]]]:
    """Returns {(source, target): (latency in seconds, bytes per second, channels)}, by device name.

    `channel` is a name or a list of two: a copy needs both at once (the sender's network card and the receiver's, say).
    """
    names = [d["name"] for d in cluster["devices"]]
    found = {}

    def channels(link: Any, a: str, b: str) -> tuple[str, ...]:
        given = link.get("channel", f"{a}->{b}")
        return tuple(given) if isinstance(given, list) else (given,)

    if default := cluster.get("default_link"):
        for a in names:
            for b in names:
                if a != b:
                    found[a, b] = (
                        default["latency_seconds"],
                        default["bytes_per_second"],
                        channels(default, a, b),
                    )
    for link in cluster.get("links", []):
        for a, b in [(link["from"], link["to"])] + ([(link["to"], link["from"])] if link.get("both", False) else []):
            found[a, b] = (link["latency_seconds"], link["bytes_per_second"], channels(link, a, b))
    return found


def links_with_host_waits(cluster: Any) -> set[tuple[str, str]]:
    """Returns the (source, target) of links over which the host launches a copy only when its tensor is made."""
    names = [d["name"] for d in cluster["devices"]]
    default = cluster.get("default_link", {}).get("host_waits", False)
    found = {(a, b) for a in names for b in names if a != b and default}
    for link in cluster.get("links", []):
        for ends in [(link["from"], link["to"])] + ([(link["to"], link["from"])] if link.get("both", False) else []):
            found.discard(ends)
            if link.get("host_waits", False):
                found.add(ends)
    return found


def delays(cluster: Any) -> dict[tuple[str, str], float]:
    """Returns {(source, target): seconds that a copy is still on its way when its channels are free}, by device name."""
    names = [d["name"] for d in cluster["devices"]]
    found = {(a, b): cluster.get("default_link", {}).get("delay_seconds", 0.0) for a in names for b in names}
    for link in cluster.get("links", []):
        for ends in [(link["from"], link["to"])] + ([(link["to"], link["from"])] if link.get("both", False) else []):
            found[ends] = link.get("delay_seconds", 0.0)
    return found


def work_of_copies(cluster: Any) -> dict[tuple[str, str], tuple[Any, Any]]:
    """Returns {(source, target): what a copy takes of the source's own time, and of the target's}, by device name."""
    names = [d["name"] for d in cluster["devices"]]
    default = cluster.get("default_link", {})
    found = {(a, b): (default.get("source_work", {}), default.get("target_work", {})) for a in names for b in names}
    for link in cluster.get("links", []):
        for ends in [(link["from"], link["to"])] + ([(link["to"], link["from"])] if link.get("both", False) else []):
            found[ends] = (link.get("source_work", {}), link.get("target_work", {}))
    return found


def seconds_of_work(work: Any, nbytes: int) -> float:
    """Returns how long a copy of some bytes keeps the device at one of its ends."""
    return float(work.get("seconds", 0.0) + nbytes * (1 / work.get("bytes_per_second", float("inf"))))


def seconds_on(op: Any, device: Any) -> float:
    """Returns how long an op runs on a device: a given time (by the device's name, then its kind), else the roofline.

    A device's `flops` is a number, or a table by the type that an op computes in; a type that it lacks counts as float32.
    """
    given: dict[str, float] = op.get("seconds", {})
    for key in (device["name"], device["kind"]):
        if key in given:
            return given[key]
    flops = device["flops"]
    if isinstance(flops, dict):
        flops = flops.get(op.get("compute", "float32"), flops["float32"])
    work: float = max(op.get("flops", 0) / flops, op.get("nbytes_moved", 0) / device["bytes_per_second"])
    overhead: float = device.get("overhead_seconds", 0.0)
    return work + overhead if work else 0.0


def simulate(graph: Any, cluster: Any, placement: Any, order: list[int] | None = None) -> dict[str, Any]:
    """Returns the step of a placement (a device name for each group) whose ops are launched in `order`.

    A group of optional ops may be nowhere (None): they do not run, and whoever reads what they would have written reads the
    tensor that it stands for.
    """
    ops, tensors = graph["ops"], graph["tensors"]
    devices = {d["name"]: d for d in cluster["devices"]}
    link_of, dispatch = links(cluster), cluster.get("dispatch_seconds", 0.0)
    awaited, work_of, delay = links_with_host_waits(cluster), work_of_copies(cluster), delays(cluster)
    device_of: list[Any] = [placement[op["group"]] for op in ops]
    order = [n for n in (range(len(ops)) if order is None else order) if device_of[n] is not None]
    producer = {t: n for n, op in enumerate(ops) for t in op["writes"]}

    def read(t: int) -> int:
        """Returns the tensor that is read where `t` is asked for: what it stands for, while its producer is nowhere."""
        while t in producer and device_of[producer[t]] is None:
            t = tensors[t]["stands_for"]
        return t

    reads = [[read(t) for t in op["reads"]] for op in ops]
    first_reader = {t: n for n in reversed(range(len(ops))) if device_of[n] is not None for t in reads[n]}

    def home(t: int) -> str:
        """Returns the device that a tensor is on first: its producer's, or a resident tensor's home."""
        if t in producer:
            return str(device_of[producer[t]])
        if "home" in tensors[t]:
            return str(placement[tensors[t]["home"]])
        return str(device_of[first_reader[t]] if t in first_reader else cluster["devices"][0]["name"])

    def storage(t: int) -> int:
        """Returns the tensor whose memory this one shares (itself if it has its own)."""
        while "alias_of" in tensors[t]:
            t = tensors[t]["alias_of"]
        return t

    # 1. Time: each host launches its ops one by one; every device and channel works through its own queue in that order.
    host_of = {name: device.get("host", "") for name, device in devices.items()}
    host, device_free = dict.fromkeys(host_of.values(), 0.0), dict.fromkeys(devices, 0.0)
    channel_free: dict[str, float] = {}
    ready = {(t, home(t)): 0.0 for t in range(len(tensors)) if t not in producer}
    start: dict[int, float] = {}
    end: dict[int, float] = {}
    copies = []
    for n in order:
        here = device_of[n]
        for t in reads[n]:
            if (t, here) not in ready:
                there = home(t)
                latency, bandwidth, channels = link_of[there, here]
                launching = dict.fromkeys([host_of[there], host_of[here]])  # one sends, the other receives
                if (there, here) in awaited:
                    host[host_of[here]] = max(host[host_of[here]], ready[t, there])
                for h in launching:
                    host[h] += cluster.get("copy_dispatch_seconds", dispatch)
                queues = [channel_free.get(channel, 0.0) for channel in channels]
                begin = max(ready[t, there], *(host[h] for h in launching), *queues)
                left = begin + latency + tensors[t]["nbytes"] / bandwidth
                ready[t, here] = left + delay[there, here]
                for channel in channels:
                    channel_free[channel] = left
                for end_of_link, work in zip((there, here), work_of[there, here], strict=True):
                    device_free[end_of_link] += seconds_of_work(work, tensors[t]["nbytes"])
                copies.append({"tensor": t, "from": there, "to": here, "start": begin, "end": ready[t, here], "for": n})
        host[host_of[here]] += dispatch
        waits = (
            [host[host_of[here]], device_free[here]]
            + [ready[t, here] for t in reads[n]]
            + [end[m] for m in ops[n].get("after", []) if device_of[m] is not None]
        )
        start[n] = max(waits)
        end[n] = device_free[here] = start[n] + seconds_on(ops[n], devices[here])
        for t in ops[n]["writes"]:
            ready[t, here] = end[n]

    # 2. Memory: bytes are taken and given back at launches, in launch order, so they do not depend on the times above.
    last_use: dict[Any, int] = {}  # (storage or copied tensor, device) -> position in `order`
    taken_at: dict[Any, int] = {}
    kept: set[Any] = {(storage(t), home(t)) for t in map(read, graph.get("outputs", []))}
    bytes_of: dict[Any, int] = {}
    for position, n in enumerate(order):
        here = device_of[n]
        for t in reads[n]:
            there = home(t)
            if there == here:
                last_use[storage(t), here] = position
            else:
                key: Any = (("copy", t), here)
                bytes_of[key] = tensors[t]["nbytes"]
                if taken_at.setdefault(key, position) == position:
                    last_use[storage(t), there] = max(position, last_use.get((storage(t), there), 0))
                last_use[key] = position
        for t in ops[n]["writes"]:
            root = storage(t)
            last_use[root, here] = position
            if root == t:
                bytes_of[root, here], taken_at[root, here] = tensors[t]["nbytes"], position
    used = dict.fromkeys(devices, 0)
    for t in range(len(tensors)):
        if t not in producer and storage(t) == t:
            used[home(t)] += tensors[t]["nbytes"]
    take: dict[int, list[Any]] = {}
    give: dict[int, list[Any]] = {}
    for key, position in taken_at.items():
        take.setdefault(position, []).append(key)
        if key not in kept:
            give.setdefault(last_use[key], []).append(key)
    peak = dict(used)
    for position in range(len(order)):
        for key in take.get(position, []):
            used[key[1]] += bytes_of[key]
        peak = {d: max(peak[d], used[d]) for d in devices}
        for key in give.get(position, []):
            used[key[1]] -= bytes_of[key]

    return {
        "step_seconds": max(device_free.values()),
        "fits": all(peak[d] <= size(devices[d]["memory"]) for d in devices),
        "peak_bytes": peak,
        "start": [start.get(n) for n in range(len(ops))],
        "end": [end.get(n) for n in range(len(ops))],
        "copies": copies,
    }
