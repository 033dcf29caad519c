"""Placements by layer, as experts, Accelerate and pipelines do it, and by micro-batch, as data parallelism does."""

import re
from dataclasses import dataclass

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.contracts import Proposal, Search
from placewise.core.graph import TENSOR_KINDS
from placewise.core.labels import sum_by_label
from placewise.core.problem import Problem
from placewise.strategies.hyper_parameters import check_fields
from placewise.strategies.layers import accelerate
from placewise.strategies.layers.model_layers import Layers, find_layers, layer_bytes, layer_seconds
from placewise.strategies.layers.pipeline_order import one_forward_one_backward
from placewise.strategies.single_device import accelerators, cpus, fastest, move_to_allowed, run_seconds

# What the experts of the papers (ColocRL, HDP, Spotlight, Post) do with the zoo's models.
ONE_GPU = ("inception-v3", "resnet", "cifar-cnn")  # a CNN is on one GPU
LAYER_PER_GPU = ("rnnlm", "nmt")  # an LSTM network has one layer on each GPU, in the encoder as in the decoder:
WITH_FIRST = re.compile(r"((encoder|decoder)\.)?embedding")  # the embedding is with the first layer
LSTM_LAYER = re.compile(r"((encoder|decoder)\.)?layers\.(?P<number>\d+)")
WITH_LAST = re.compile(r"attention(\..+)?|projection")  # attention, softmax and loss are with the last layer

MOST_PLACES = 1000  # where a pipeline may be cut: finding the best cuts takes time with their square


@dataclass(frozen=True)
class Expert:
    """What people do by hand: the rules above, from Mirhoseini et al. (2017, 2018) and Gao et al. (2018).

    With fewer GPUs than LSTM layers (L), layer i is on GPU floor(i · GPUs / L); with more, the others are idle. A CNN is on
    the fastest GPU; ties go to the first. For any other model it is a `Pipeline`.
    """

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields one placement, with the paper's rule in its notes, or what `Pipeline` yields."""
        gpus, layers = accelerators(problem), find_layers(problem)
        model = problem.graph.name.partition(":")[0]
        places = lstm_places(layers.names, len(gpus)) if model in LAYER_PER_GPU else None
        if model in ONE_GPU:
            wanted = np.full(problem.num_groups, fastest(problem, gpus))
            yield Proposal(move_to_allowed(problem, wanted[None]), notes={"rule": "one-gpu"})
        elif places is not None:
            yield Proposal(move_to_allowed(problem, gpus[places][layers.of_group][None]), notes={"rule": "layer-per-gpu"})
        else:
            yield from Pipeline().search(problem, rng)


@dataclass(frozen=True)
class Balanced:
    """What device_map="balanced" of Hugging Face Accelerate does: modules in order, by bytes of parameters and buffers.

    What fits on no GPU goes to the first CPU, or to the last GPU if there is no CPU. By default a transformer's blocks are
    not split, as the models of Transformers ask for with `_no_split_modules`.
    """

    no_split: str = r"(.+\.)?(blocks?|layers?|h)\.\d+"  # a regular expression: paths of modules that are not split

    def __post_init__(self) -> None:
        try:
            re.compile(self.no_split)
        except re.error as error:
            raise ValueError(f"no_split must be a regular expression, it is {self.no_split!r}: {error}") from None

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields one placement."""
        graph, layers = problem.graph, find_layers(problem)
        gpus = accelerators(problem).tolist()
        spare = [device for device in cpus(problem) if device not in gpus][:1] or gpus[-1:]
        modules = accelerate.modules_of(graph, self.no_split)
        memory = problem.cluster.memory_bytes.tolist()
        limits = accelerate.balanced_limits(modules, [memory[gpu] for gpu in gpus])
        places = accelerate.infer_device_map(modules, limits)
        devices = [*gpus, *spare]

        def device_of(path: str) -> int:
            found = accelerate.find_device(places, path)
            return int(gpus[0] if found is None else devices[found])

        own = {name.rpartition(".")[0]: name for name in reversed([*modules.parameters])}  # each module's first parameter
        wanted = np.array([device_of(own.get(path, path)) for path in layers.names], np.int64)[layers.of_group]
        is_parameter = (graph.tensors.kinds == TENSOR_KINDS.index("parameter")) & (graph.tensors.home >= 0)
        for t in np.flatnonzero(is_parameter)[::-1].tolist():  # in reverse, so that the first parameter of a group decides
            wanted[problem.merged[graph.tensors.home[t]]] = device_of(graph.tensors.names[t])
        yield Proposal(move_to_allowed(problem, wanted[None]))


@dataclass(frozen=True)
class Pipeline:
    """Contiguous stages of layers in forward order, one for each GPU in order, with the fastest possible slowest stage.

    A stage must fit its device's memory, as `layer_bytes` estimates it; if that is impossible, the stages overflow by as few
    bytes as possible. A slow GPU gets fewer layers, or none. Ties go to the last cut: a layer stays on the earlier GPU. Of
    more than `MOST_PLACES` layers, neighbours stay together, the same number each.
    """

    stages: int = 0  # how many GPUs at most, 0: all

    def __post_init__(self) -> None:
        check_fields(self, "stages", lambda v: v >= 0, "must be at least 0")

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields one placement; with micro-batches it yields it again, in the order of one forward, one backward."""
        gpus, layers = accelerators(problem), find_layers(problem)
        gpus = gpus[: self.stages or None]
        stages = _stages(problem, layers, gpus)[layers.of_group]  # [groups]
        placements = move_to_allowed(problem, gpus[stages][None])
        yield Proposal(placements)
        if (problem.graph.ops.micro_batches > 0).any():
            _, used = np.unique(stages, return_inverse=True)  # numbers without empty stages
            order = one_forward_one_backward(problem, used[problem.op_groups], int(used.max()) + 1)
            yield Proposal(placements, order[None])


@dataclass(frozen=True)
class Towers:
    """Data parallelism: micro-batch i is on GPU i mod n; what belongs to no micro-batch or to several is on the first GPU.

    So the parameters, the sums of their gradients and their updates are on the first GPU, and every step copies parameters
    to the other GPUs and gradients back. Without micro-batches everything is on the fastest GPU.
    """

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields one placement, with the number of micro-batches in its notes."""
        gpus, micro_batches = accelerators(problem), problem.graph.ops.micro_batches
        lowest, highest = np.full((2, problem.num_groups), -1)  # of each group's ops
        lowest[problem.op_groups] = problem.num_ops + micro_batches.max(initial=-1)
        np.minimum.at(lowest, problem.op_groups, micro_batches)
        np.maximum.at(highest, problem.op_groups, micro_batches)
        wanted = gpus[np.where((lowest == highest) & (lowest >= 0), lowest, 0) % len(gpus)]
        count = len(np.unique(micro_batches[micro_batches >= 0]))
        if not count:
            wanted[:] = fastest(problem, gpus)
        yield Proposal(move_to_allowed(problem, wanted[None]), notes={"micro_batches": count})


def lstm_places(names: tuple[str, ...], num_gpus: int) -> Ints | None:
    """Returns the GPU of each layer of an LSTM network: [layers]; None if the rules do not cover a layer."""
    numbers = [int(match["number"]) for name in names if (match := LSTM_LAYER.fullmatch(name))]
    if not numbers:
        return None
    depth = max(numbers) + 1
    used = min(depth, num_gpus)
    places = []
    for name in names:
        if WITH_FIRST.fullmatch(name):
            places.append(0)
        elif match := LSTM_LAYER.fullmatch(name):
            places.append(int(match["number"]) * used // depth)
        elif WITH_LAST.fullmatch(name):
            places.append(used - 1)
        else:
            return None
    return np.array(places, np.int64)


def cut_stages(seconds: Floats, nbytes: Floats, memory_bytes: Floats) -> Ints:
    """Returns the stage of each layer with the least overflow, and then with the fastest slowest stage: [layers].

    Times and bytes are [layers, stages], memories [stages]. Overflow is the sum of the bytes over the stages' memories. A
    stage may be empty. Ties go to the last cut. A dynamic program takes stages · layers² / 2 steps: the best cut of the
    first `end` layers into some stages is, over all `start`, the best cut of the first `start` layers into all but the last
    of these stages, with the layers from start to end in the last one.
    """
    num_layers, num_stages = seconds.shape
    times = np.concatenate(
        [np.zeros((1, num_stages)), seconds.cumsum(axis=0)]
    )  # [layers + 1, stages], sums over the first layers
    sizes = np.concatenate([np.zeros((1, num_stages)), nbytes.cumsum(axis=0)])  # the same
    overflow, slowest = np.where(np.arange(num_layers + 1) == 0, 0.0, np.inf), np.zeros(num_layers + 1)
    starts = np.zeros((num_stages, num_layers + 1), np.int64)
    for stage in range(num_stages):
        best = np.empty((2, num_layers + 1))
        for end in range(num_layers + 1):
            head = slice(0, end + 1)
            over = overflow[head] + np.maximum(sizes[end, stage] - sizes[head, stage] - memory_bytes[stage], 0.0)
            slow = np.maximum(slowest[head], times[end, stage] - times[head, stage])
            slow = np.where(over == over.min(), slow, np.inf)
            start = starts[stage, end] = end - slow[::-1].argmin()
            best[:, end] = over[start], slow[start]
        overflow, slowest = best
    stages, end = np.zeros(num_layers, np.int64), num_layers
    for stage in reversed(range(num_stages)):
        start = starts[stage, end]
        stages[start:end] = stage
        end = start
    return stages


def _stages(problem: Problem, layers: Layers, gpus: Ints) -> Ints:
    """Returns the stage of each layer: [layers]."""
    seconds = layer_seconds(problem, layers, run_seconds(problem))[:, gpus]
    always, passing = layer_bytes(problem, layers)
    micro_batches = problem.graph.ops.micro_batches
    count = max(len(np.unique(micro_batches[micro_batches >= 0])), 1)
    under_way = np.minimum(np.arange(len(gpus), 0, -1) / count, 1.0)  # [stages], share of the micro-batches
    nbytes = always[:, None] + passing[:, None] * under_way
    memory_bytes = problem.cluster.memory_bytes[gpus].astype(np.float64)
    places = min(layers.num_layers, MOST_PLACES)
    piece = np.arange(layers.num_layers) * places // layers.num_layers  # [layers], what stays together

    def summed(table: Floats) -> Floats:
        return np.stack([sum_by_label(piece, column, places) for column in table.T], axis=1)

    return cut_stages(summed(seconds), summed(nbytes), memory_bytes)[piece]
