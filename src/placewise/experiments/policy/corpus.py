"""Problems to learn from: models of the zoo with random options and random steps, on known and random machines."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Ragged
from placewise.core.cluster import Cluster
from placewise.core.graph import PHASES, TENSOR_KINDS, Graph, Ops, Tensors
from placewise.core.problem import Problem
from placewise.models import load_graph
from placewise.simulate.simulator import Simulator

MACHINES = (
    "1xK40", "3xK40", "2xK80", "4xK80", "8xK80", "4xV100-nvlink", "8xA100-nvlink", "2xH200", "4090+3060", "laptop",
    "3090+1080ti", "4xA100-nvlink", "2x(4090+3060)@10GbE", "3080+T4+1080ti",
)  # fmt: skip

CHANGED, TIGHT = 0.5, 0.25  # shares of machines with other speeds, and with little memory

LATTICES = 1 / 3  # share of the random steps

MACHINES_OF_MODEL = 5

MOST_DRAWS = 1000  # until a family has no model left that is not known

BLOCKS = (64, 192)  # the range of the numbers of blocks


@dataclass(frozen=True)
class Lesson:
    """A problem to learn from, by names and seeds, from which it is made again."""

    family: str
    model: str  # a zoo name with options, or random-step:SEED
    machine: str
    seed: int  # of the changes to the machine
    num_blocks: int

    @property
    def key(self) -> str:
        """The lesson in one line."""
        return f"{self.model} on {self.machine}, seed {self.seed}, {self.num_blocks} blocks"

    def problem(self) -> Problem:
        """Returns the problem, without a grouping."""
        graph, rng = graph_of_lesson(self.model), np.random.default_rng([self.seed, 1])
        cluster = Cluster.load(self.machine)
        if rng.random() < CHANGED:
            cluster = changed(cluster, rng)
        if rng.random() < TIGHT:
            cluster = with_little_memory(graph, cluster, rng)
        return Problem.of(graph, cluster)


def draw_lessons(count: int, seed: int, hold_out: tuple[str, ...] = ()) -> list[Lesson]:
    """Returns about `count` lessons of all families in turn, without those held out, which do not change the others."""
    lessons = []
    for family, model in islice(_models(seed), -(-count // MACHINES_OF_MODEL)):
        rng = np.random.default_rng([seed, zlib.crc32(model.encode())])
        for machine in rng.choice(len(MACHINES), MACHINES_OF_MODEL, replace=False).tolist():
            drawn = int(rng.integers(2**31)), int(rng.integers(BLOCKS[0], BLOCKS[1] + 1))
            if family not in hold_out:
                lessons.append(Lesson(family, model, MACHINES[machine], *drawn))
    return lessons


def _models(seed: int) -> Iterator[tuple[str, str]]:
    """Yields families in turn, each with another model, without end; one that has hardly any left is passed over."""
    rng = np.random.default_rng([seed, 0])
    known: set[str] = set()
    while True:
        for family, draw in FAMILIES.items():
            drawn = (draw(rng) for _ in range(MOST_DRAWS))
            if (model := next((model for model in drawn if model not in known), None)) is not None:
                known.add(model)
                yield family, model


def _one(rng: np.random.Generator, *choices: int) -> int:
    return choices[int(rng.integers(len(choices)))]


def _nmt(rng: np.random.Generator) -> str:
    size = f"hidden={_one(rng, 256, 512, 1024)},batch={_one(rng, 16, 32, 64, 128)},vocab={_one(rng, 8000, 32000)}"
    return f"nmt:layers={_one(rng, 1, 2, 3, 4)},length={_one(rng, 4, 6, 8)},{size}"


def _rnnlm(rng: np.random.Generator) -> str:
    size = f"hidden={_one(rng, 512, 1024, 2048)},batch={_one(rng, 16, 32, 64, 128)},vocab={_one(rng, 5000, 10000, 40000)}"
    return f"rnnlm:layers={_one(rng, 1, 2, 3, 4)},steps={_one(rng, 5, 8, 12, 16)},{size}"


def _inception(rng: np.random.Generator) -> str:
    image = _one(rng, 149, 224, 299)
    aux = "true" if image == 299 else "false"  # the auxiliary head needs large images
    return f"inception-v3:batch={_one(rng, 4, 8, 16, 32, 64)},image={image},aux={aux},micro_batches={_one(rng, 1, 1, 2)}"


def _resnet(rng: np.random.Generator) -> str:
    size = f"batch={_one(rng, 4, 8, 16, 32, 64)},image={_one(rng, 112, 224, 320)}"
    return f"resnet:depth={_one(rng, 50, 50, 101)},{size},micro_batches={_one(rng, 1, 1, 2, 4)}"


def _cifar(rng: np.random.Generator) -> str:
    return f"cifar-cnn:batch={8 * _one(rng, *range(2, 129))},micro_batches={_one(rng, 1, 1, 2, 4)}"


def _gpt(rng: np.random.Generator) -> str:
    heads = _one(rng, 4, 8, 12, 16)
    size = f"layers={_one(rng, 2, 3, 4, 6)},hidden={64 * heads},heads={heads},length={_one(rng, 128, 256, 512, 1024)}"
    return f"gpt:{size},batch={_one(rng, 4, 8, 16)},micro_batches={_one(rng, 1, 1, 2, 4)}"


def _bert(rng: np.random.Generator) -> str:
    heads = _one(rng, 4, 8, 12, 16)
    size = f"layers={_one(rng, 2, 3, 4, 6)},hidden={64 * heads},heads={heads},length={_one(rng, 64, 128, 256)}"
    return f"bert:{size},batch={_one(rng, 8, 16, 32)},micro_batches={_one(rng, 1, 1, 2, 4)}"


def _random(rng: np.random.Generator) -> str:
    return f"random-step:{int(rng.integers(10**6))}"


FAMILIES: dict[str, Callable[[np.random.Generator], str]] = {
    "nmt": _nmt, "random": _random, "rnnlm": _rnnlm, "inception": _inception, "resnet": _resnet, "cifar": _cifar,
    "gpt": _gpt, "bert": _bert,
}  # fmt: skip


@lru_cache(maxsize=1)
def graph_of_lesson(model: str) -> Graph:
    """Returns the graph of a lesson's model."""
    name, _, seed = model.partition(":")
    return random_step(int(seed)) if name == "random-step" else load_graph(model)


def random_step(seed: int) -> Graph:
    """Returns a random training step: a forward pass, a backward one that mirrors it, and updates.

    Op n of the forward pass reads one to three activations of the last few; in a third of the steps it is a lattice, where
    an op reads the one before it and the one a row earlier. About every second op has a parameter, which it may share with
    others. A backward op reads the same, and the gradients from those that read its result.
    """
    rng = np.random.default_rng(seed)
    count = int(rng.integers(30, 250))
    reach, row = int(rng.integers(1, 30)), int(rng.integers(3, 25)) if rng.random() < LATTICES else 0
    sources = [_sources(n, reach, row, rng) for n in range(count)]
    shared = int(rng.integers(1, 12)) if rng.random() < 0.5 else 1  # ops that share a parameter
    weight_of = np.where(rng.random(count) < 0.5, np.arange(count) // shared if not row else np.arange(count) // row, -1)
    weight_of = np.unique(weight_of, return_inverse=True)[1].ravel() - int((weight_of < 0).any())
    num_weights = int(weight_of.max(initial=-1)) + 1
    sizes = 10 ** rng.uniform(4, 7.5) * np.exp(rng.normal(0, 1, count))
    works = 10 ** rng.uniform(7, 10.5) * np.exp(rng.normal(0, 1.2, count))
    weights = 10 ** rng.uniform(4, 7.5) * np.exp(rng.normal(0, 1.5, num_weights))
    tensors, ops = _Tensors([], [], [], []), list[_Op]()
    parameters = [tensors.add(f"w{w}", "parameter", weights[w], 2 * count + w) for w in range(num_weights)]
    forward: list[int] = []
    for n in range(count):
        forward.append(tensors.add(f"m{n // 4}.a{n}", "activation", sizes[n]))
        reads = [forward[m] for m in sources[n]] + ([parameters[weight_of[n]]] if weight_of[n] >= 0 else [])
        moved = sizes[n] + sum(sizes[m] for m in sources[n])
        ops.append(_Op(f"m{n // 4}.op{n}", "forward", n, reads, [forward[n]], works[n], moved))
    gradients: list[list[int]] = [[] for _ in range(count)]  # of each activation
    of_weight: list[list[int]] = [[] for _ in range(num_weights)]
    for n in reversed(range(count)):
        reads = [*gradients[n], *(forward[m] for m in sources[n])] or [forward[n]]
        writes = [tensors.add(f"m{n // 4}.g{n}.{m}", "gradient", sizes[m]) for m in sources[n]]
        for m, gradient in zip(sources[n], writes, strict=True):
            gradients[m].append(gradient)
        if (w := int(weight_of[n])) >= 0:
            reads.append(parameters[w])
            of_weight[w].append(tensors.add(f"m{n // 4}.gw{n}", "gradient", weights[w]))
            writes.append(of_weight[w][-1])
        moved = 2 * sizes[n] + sum(sizes[m] for m in sources[n])
        ops.append(_Op(f"m{n // 4}.op{n}.backward", "backward", count + n, reads, writes, 2 * works[n], moved))
    for w in range(num_weights):
        reads = [parameters[w], *of_weight[w]]
        ops.append(_Op(f"w{w}.add_.update", "update", 2 * count + w, reads, [], weights[w] / 2, 3 * weights[w]))
    return _as_graph(f"random-step:{seed}", tensors, ops)


def _sources(n: int, reach: int, row: int, rng: np.random.Generator) -> list[int]:
    """Returns the ops whose activations op n reads; a row of 0 means that it is no lattice."""
    if not n:
        return []
    if row:
        return sorted({m for m in (n - 1 if n % row else -1, n - row) if m >= 0}) or [n - 1]
    return sorted({max(n - 1 - int(rng.integers(reach)), 0) for _ in range(int(rng.integers(1, 4)))})


class _Tensors(NamedTuple):
    """The tensors of a step that is being made."""

    names: list[str]
    kinds: list[int]
    homes: list[int]
    nbytes: list[int]

    def add(self, name: str, kind: str, nbytes: float, home: int = -1) -> int:
        """Adds a tensor and returns its number."""
        self.names.append(name)
        self.kinds.append(TENSOR_KINDS.index(kind))
        self.homes.append(home)
        self.nbytes.append(max(int(nbytes), 4))
        return len(self.names) - 1


class _Op(NamedTuple):
    """An op of a step that is being made."""

    name: str
    phase: str
    group: int
    reads: list[int]
    writes: list[int]
    flops: float
    bytes_moved: float


def _as_graph(name: str, tensors: _Tensors, ops: list[_Op]) -> Graph:
    count = len(ops)
    return Graph(
        name,
        Tensors(
            tuple(tensors.names), np.array(tensors.nbytes), np.array(tensors.kinds), np.array(tensors.homes),
            np.full(len(tensors.names), -1),
        ),
        Ops(
            tuple(op.name for op in ops), ("op",) * count, np.array([PHASES.index(op.phase) for op in ops]),
            np.array([op.group for op in ops]), Ragged.of([op.reads for op in ops]), Ragged.of([op.writes for op in ops]),
            Ragged.of([[] for _ in ops]), np.array([op.flops for op in ops]), np.array([op.bytes_moved for op in ops]),
            (None,) * count, np.full(count, -1),
        ),
        np.zeros(0, np.int64),
    )  # fmt: skip


def changed(cluster: Cluster, rng: np.random.Generator) -> Cluster:
    """Returns a cluster whose devices, links and host are faster or slower, each kind of them alike."""
    speed = {flops: float(np.exp(rng.normal(0, 0.5))) for flops in sorted({device.flops for device in cluster.devices})}
    pace = {rate: 10 ** float(rng.uniform(-0.7, 0.5)) for rate in sorted({link.bytes_per_second for link in cluster.links})}
    devices = [
        replace(
            device,
            flops=device.flops * speed[device.flops],
            bytes_per_second=device.bytes_per_second * speed[device.flops],
            flops_by_type=tuple((name, flops * speed[device.flops]) for name, flops in device.flops_by_type),
        )
        for device in cluster.devices
    ]
    links = [replace(link, bytes_per_second=link.bytes_per_second * pace[link.bytes_per_second]) for link in cluster.links]
    launches = cluster.dispatch_seconds * 10 ** float(rng.uniform(-1, 0.3))
    return replace(cluster, devices=tuple(devices), links=tuple(links), dispatch_seconds=launches)


def with_little_memory(graph: Graph, cluster: Cluster, rng: np.random.Generator) -> Cluster:
    """Returns a cluster whose GPUs have less memory than the step needs on one device, in sum mostly enough for it."""
    problem = Problem.of(graph, cluster)
    gpus = [device.name for device in cluster.devices if device.kind != "cpu"]
    everywhere = problem.allowed.argmax(axis=1)[None]  # [1, groups], the first device that can run it
    need = int(Simulator(problem, "program", threads=1).simulate(everywhere).peak_bytes.max())
    share = need * float(rng.uniform(1.1, 2.2)) / len(gpus)
    limits = {device.name: int(share) for device in cluster.devices if device.name in gpus and share < device.memory_bytes}
    return cluster.limited(limits)
