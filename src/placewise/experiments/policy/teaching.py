"""Teaches a policy network: by imitation of labels, then by policy gradient on the simulator. Everything is recorded.

A lesson's label is the best placement of its blocks that `auto` finds with a small effort. The policy gradient compares the
samples of a lesson with each other (Kool, van Hoof, Welling: Buy 4 REINFORCE samples, get a baseline for free. 2019).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from placewise.core.arrays import Floats, Ints
from placewise.core.errors import ProblemError, StoreError, one_line
from placewise.core.problem import Problem
from placewise.experiments.policy.corpus import Lesson
from placewise.experiments.policy.teaching_record import TeachingRecord
from placewise.formats.files import describe
from placewise.formats.safetensors_file import Arrays
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.auto import Auto
from placewise.strategies.blocks import Blocks
from placewise.strategies.learned.graph_policy.block_graph import BlockGraph, merge_blocks, read_block_graph
from placewise.strategies.learned.graph_policy.drawing import fitting, next_room, samples
from placewise.strategies.learned.graph_policy.placing import FEATURES, Placed, Scorer, place_blocks
from placewise.strategies.learned.graph_policy.policy_network import BEFORE_LEARNING, GraphTensors, PolicyNetwork
from placewise.strategies.learned.training import build_network, one_thread

TEACHER = Auto(chains=2, effort=300_000, populations=1, coarse=1_000_000)  # its budget is counted in ops, not in seconds
TEACHER_PROPOSALS = 25
EXAMINED = 7  # every seventh lesson is not learned from, to see how the rest carries over
MOST_GAIN = 3.0  # of an advantage, in standard deviations
LEAST_SPREAD = 0.02  # standard deviation of log(seconds) below which samples hardly differ


@dataclass(frozen=True)
class Teaching:
    """How a network is taught."""

    width: int = 48
    rounds: int = 3  # of messages between blocks
    imitation_epochs: int = 6
    gradient_epochs: int = 30
    batch: int = 8  # lessons for an update
    samples: int = 16  # placements of a lesson that are compared
    imitation_rate: float = 2e-3
    gradient_rate: float = 1e-3
    best_share: float = 1.0  # of the samples that are learned from; 1: all, against their mean
    label_weight: float = 0.3  # of the imitation of the best known placement, in the second part
    temperature: float = 1.0  # of samples
    seed: int = 0
    device: str = "cpu"


class Prepared(NamedTuple):
    """A lesson with its block graph and the best placement known."""

    lesson: Lesson
    graph: BlockGraph
    tensors: GraphTensors
    model: Simulator
    label: Ints  # [blocks]
    seconds: float  # cost of the label
    room: float = 1.0  # the share of the memory that samples may use


class Report(NamedTuple):
    """How an epoch went: greedy placements over labels, as the mean of the ratio's logarithm."""

    stage: str  # "label", "imitation" or "gradient"
    number: int  # of lessons labelled, or of epochs
    total: int
    ratio: float  # of greedy placements to labels on lessons that are not learned from; 1 without any
    loss: float


Listen = Callable[[Report], None]


def prepare(lessons: Sequence[Lesson], record: TeachingRecord, listen: Listen) -> list[Prepared]:
    """Returns the lessons with their labels, which are recorded one by one, and made once.

    Labels that are there are all looked at before the first one is made.
    """
    known = [_known_label(lesson, record) for lesson in lessons]
    prepared = []
    for number, (lesson, (merged, label)) in enumerate(zip(lessons, known, strict=True)):
        model = Simulator(merged, threads=1)
        graph = read_block_graph(merged)
        if label is None:
            label = best_placement(model, np.random.default_rng([lesson.seed, 2]))
            record.add_label(f"{lesson.key}: {merged.digest}", label)
        seconds = float(model(label[None]).cost[0])
        label = canonical(label, graph)
        prepared.append(Prepared(lesson, graph, GraphTensors.of(graph), model, label, seconds))
        listen(Report("label", number + 1, len(lessons), 1.0, 0.0))
    return prepared


def _known_label(lesson: Lesson, record: TeachingRecord) -> tuple[Problem, Ints | None]:
    """Returns a lesson's problem with blocks as groups, and its recorded label, which anybody can have changed."""
    problem, grouping = lesson.problem(), f"coarse:{lesson.num_blocks}"
    merged = merge_blocks(problem, Blocks.of(problem, grouping), grouping)
    label = record.label(f"{lesson.key}: {merged.digest}")
    if label is not None:
        try:
            merged.check_placements(label[None])
        except ProblemError as rule:
            raise StoreError(f"{record.source}: is damaged: the label of {lesson.key}: {rule}") from None
    return merged, label


def best_placement(model: Simulator, rng: np.random.Generator) -> Ints:
    """Returns the best placement of groups that `auto` finds, judged in the simulator's own order: [groups]."""
    proposals = TEACHER.search(model.problem, rng)
    best, best_cost = np.zeros(model.problem.num_groups, np.int64), math.inf
    evaluation = None
    for _ in range(TEACHER_PROPOSALS):
        try:
            proposal = next(proposals) if evaluation is None else proposals.send(evaluation)
        except StopIteration:
            break
        cost = model(proposal.placements).cost
        row = int(cost.argmin())
        if cost[row] < best_cost:
            best, best_cost = np.array(proposal.placements[row]), float(cost[row])
        evaluation = model(proposal.placements, proposal.orders)
    proposals.close()
    return best


def canonical(placement: Ints, graph: BlockGraph) -> Ints:
    """Returns the placement with devices that can be swapped in the order in which blocks are placed on them: [blocks]."""
    classes = graph.placing.classes
    free = {c: [d for d in range(len(classes)) if classes[d] == c] for c in sorted(set(classes.tolist()))}
    renamed: dict[int, int] = {}
    for block in graph.placing.sequence.tolist():
        device = int(placement[block])
        if device not in renamed:
            renamed[device] = free[int(classes[device])].pop(0)
    return np.array([renamed[int(device)] for device in placement], np.int64)


def teach(
    prepared: Sequence[Prepared], teaching: Teaching, record: TeachingRecord, name: str, listen: Listen
) -> PolicyNetwork:
    """Returns a network that has learned from the lessons; recorded epochs under this name are not repeated."""
    lessons = [one for number, one in enumerate(prepared) if number % EXAMINED]
    examined = [one for number, one in enumerate(prepared) if not number % EXAMINED]
    with one_thread():
        network = new_network(teaching.width, teaching.rounds, teaching.seed)
        network.to(teaching.device)
        states = {stage: record.state(name, stage) for stage in ("imitation", "gradient")}
        for stage, (done, state) in states.items():
            if done:
                try:
                    _check_state(state, network, lessons)
                except (ProblemError, ValueError) as problem:
                    raise StoreError(
                        f"{record.source}: can't be continued: its {stage} is damaged: {one_line(problem)}"
                    ) from None
        for stage, epochs, rate in (
            ("imitation", teaching.imitation_epochs, teaching.imitation_rate),
            ("gradient", teaching.gradient_epochs, teaching.gradient_rate),
        ):
            optimizer = torch.optim.Adam(network.parameters(), lr=rate)
            done, state = states[stage]
            if done:
                lessons = _restored(state, network, optimizer, lessons)
            for epoch in range(done, epochs):
                rng = np.random.default_rng([teaching.seed, stage == "gradient", epoch])
                loss = _epoch(stage, network, optimizer, lessons, teaching, rng, rate * _cooled(epoch, epochs))
                record.keep(name, stage, epoch + 1, _state(network, optimizer, lessons))
                listen(Report(stage, epoch + 1, epochs, examine(network, examined), loss))
    return network.to("cpu")


def new_network(width: int, rounds: int, seed: int) -> PolicyNetwork:
    """Returns a network whose weights are drawn with this seed."""
    network = build_network(lambda: PolicyNetwork(width, rounds), torch.Generator().manual_seed(seed))
    with torch.no_grad():
        network.direct.weight.zero_()
        for feature, weight in BEFORE_LEARNING.items():
            network.direct.weight[0, feature] = weight
    return network


def examine(network: PolicyNetwork, prepared: Sequence[Prepared]) -> float:
    """Returns the geometric mean of cost over that of the label, for the greedy placements; 1 without lessons."""
    ratios = []
    for one in prepared:
        scorer = network.scorer(_to(one.tensors, network))
        cost = float(one.model(fitting(one.graph, one.model, scorer).placement[None]).cost[0])
        ratios.append(math.log(max(cost, 1e-12) / max(one.seconds, 1e-12)))
    return math.exp(sum(ratios) / len(ratios)) if ratios else 1.0


def _state(network: PolicyNetwork, optimizer: torch.optim.Optimizer, lessons: Sequence[Prepared]) -> Arrays:
    """Returns all that the next epoch depends on."""
    arrays: Arrays = {f"network.{key}": value.cpu().numpy() for key, value in network.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        arrays |= {f"optimizer.{number}.{key}": value.cpu().numpy() for key, value in values.items()}
    arrays |= {f"label.{number}": one.label for number, one in enumerate(lessons)}
    known = [(one.seconds, one.room) for one in lessons]
    return {**arrays, "known": np.array(known, np.float64).reshape(-1, 2)}


def _check_state(state: Arrays, network: PolicyNetwork, lessons: Sequence[Prepared]) -> None:
    """Refuses a state that can't be restored.

    A ValueError names what is missing, of another shape or type or not finite; a ProblemError a label that is none.
    """
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        f"network.{key}": ("float32", tuple(value.shape)) for key, value in network.state_dict().items()
    }
    for number, parameter in enumerate(network.parameters() if lessons else ()):
        shape = tuple(parameter.shape)
        slots = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
        expected |= {f"optimizer.{number}.{slot}": ("float32", found) for slot, found in slots.items()}
    expected |= {f"label.{i}": ("int64", one.label.shape) for i, one in enumerate(lessons)}
    expected["known"] = ("float64", (len(lessons), 2))
    given = {key: (array.dtype.name, array.shape) for key, array in state.items()}
    if wrong := sorted(key for key in {*expected, *given} if expected.get(key) != given.get(key)):
        raise ValueError(f"{describe(wrong[0])} is missing, or of another shape or type")
    if wrong := [key for key, array in state.items() if not np.isfinite(array).all()]:
        raise ValueError(f"{wrong[0]} has a number that is not finite")
    for i, one in enumerate(lessons):
        one.graph.problem.check_placements(state[f"label.{i}"][None])


def _restored(
    state: Arrays, network: PolicyNetwork, optimizer: torch.optim.Optimizer, lessons: Sequence[Prepared]
) -> list[Prepared]:
    """Brings network and optimizer to a recorded state, and returns the lessons with its labels."""
    tensors = {key: torch.from_numpy(array) for key, array in state.items()}
    network.load_state_dict({key: tensors[f"network.{key}"] for key in network.state_dict()})
    slots: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimizer."):
            _, number, slot = key.split(".")
            slots.setdefault(int(number), {})[slot] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})
    known = state["known"].tolist()  # [lessons, 2]
    return [one._replace(label=state[f"label.{i}"], seconds=known[i][0], room=known[i][1]) for i, one in enumerate(lessons)]


def _cooled(epoch: int, epochs: int) -> float:
    """Returns the share of the learning rate: a cosine from 1 to 0.05."""
    return 0.05 + 0.95 * (1 + math.cos(math.pi * epoch / max(epochs, 1))) / 2


def _epoch(
    stage: str,
    network: PolicyNetwork,
    optimizer: torch.optim.Optimizer,
    lessons: list[Prepared],
    teaching: Teaching,
    rng: np.random.Generator,
    rate: float,
) -> float:
    """Learns from every lesson once, in random order; returns the mean loss."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    losses = []
    order = rng.permutation(len(lessons))
    for first in range(0, len(order), teaching.batch):
        optimizer.zero_grad()
        for i in order[first : first + teaching.batch].tolist():
            one = lessons[i]
            tensors = _to(one.tensors, network)
            if stage == "imitation":
                loss = _imitation_loss(network, one, tensors)
            else:
                loss, lessons[i] = _gradient_loss(network, one, tensors, teaching, rng)
                loss = loss + teaching.label_weight * _imitation_loss(network, lessons[i], tensors)
            torch.autograd.backward(loss / teaching.batch)
            losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    return float(np.mean(losses)) if losses else 0.0


def _imitation_loss(network: PolicyNetwork, one: Prepared, tensors: GraphTensors) -> Tensor:
    """Returns the cross-entropy of the label's decisions; half of the weight is by block, half by work."""
    shape = one.graph.placing.block_seconds.shape
    placed = place_blocks(one.graph.placing, _blind(), np.zeros(shape), one.label, 1.0, np.ones(shape[1], np.bool_))
    logs = _log_probabilities(network, one.graph, tensors, [placed])[0]  # [blocks, devices]
    sequence = one.graph.placing.sequence
    picked = logs.gather(1, _tensor(one.label[sequence], network)[:, None])[:, 0]
    work = one.graph.placing.fastest_seconds[sequence]
    weights = 0.5 / max(len(work), 1) + 0.5 * work / max(work.sum(), 1e-30)
    return -(picked * _tensor(weights, network)).sum()


def _gradient_loss(
    network: PolicyNetwork, one: Prepared, tensors: GraphTensors, teaching: Teaching, rng: np.random.Generator
) -> tuple[Tensor, Prepared]:
    """Returns REINFORCE's loss on log(cost) of some samples, and the lesson with the best of them if it beats the label."""
    placing = one.graph.placing
    placed = samples(one.graph, network.scorer(tensors), teaching.samples, teaching.temperature, one.room, rng)
    placements = np.stack([one_placed.placement for one_placed in placed])  # [samples, blocks]
    cost, _, overflow = one.model(placements)
    one = one._replace(room=next_room(one.room, float((overflow > 0).mean())))
    row = int(cost.argmin())
    if cost[row] < one.seconds:
        one = one._replace(label=placements[row], seconds=float(cost[row]))
    logs = _log_probabilities(network, one.graph, tensors, placed)
    chosen = logs.gather(2, _tensor(placements[:, placing.sequence], network)[:, :, None])[:, :, 0].sum(dim=1)
    return -(chosen * _tensor(sample_advantages(cost, teaching.best_share), network)).mean() / math.sqrt(
        placements.shape[1] + 1
    ), one


def sample_advantages(cost: Floats, share: float) -> Floats:
    """Returns by how many standard deviations of the logarithm a sample beats the worst of the best ones: [samples].

    `share` of the samples are the best ones; with 1, each sample is compared with the mean of all.
    """
    logs = np.log(np.maximum(cost, 1e-12))
    if share < 1:
        worst = np.sort(logs)[min(int(np.ceil(share * len(logs))), len(logs) - 1)]
        return np.asarray(np.clip((worst - logs) / (logs.std() + LEAST_SPREAD), 0.0, MOST_GAIN), np.float64)
    return np.asarray(np.clip((logs.mean() - logs) / (logs.std() + LEAST_SPREAD), -MOST_GAIN, MOST_GAIN), np.float64)


def _log_probabilities(network: PolicyNetwork, graph: BlockGraph, tensors: GraphTensors, placed: Sequence[Placed]) -> Tensor:
    """Returns the logarithms of the probabilities of all decisions: [placements, blocks in sequence, devices]."""
    of_block, of_device = network.read(tensors)
    features = _tensor(np.stack([one.features for one in placed]), network)
    is_open = torch.tensor(np.stack([one.is_open for one in placed]), device=features.device)
    in_sequence = of_block[torch.tensor(graph.placing.sequence, device=features.device)]
    return torch.log_softmax(network.score(in_sequence, of_device, features, is_open), dim=-1)


def _blind() -> Scorer:
    """Returns a scorer that likes everything equally: what is placed is given."""
    return Scorer(
        np.zeros((1, 0)),
        np.zeros((1, 0)),
        np.zeros((FEATURES, 0)),
        np.zeros((0, 0)),
        np.zeros(0),
        np.zeros(0),
        np.zeros(FEATURES),
    )


def _to(tensors: GraphTensors, network: PolicyNetwork) -> GraphTensors:
    device = next(network.parameters()).device
    return tensors if device.type == "cpu" else GraphTensors(*(tensor.to(device) for tensor in tensors))


def _tensor(values: Floats | Ints, network: PolicyNetwork) -> Tensor:
    kind = torch.int64 if values.dtype.kind == "i" else torch.float32
    return torch.tensor(values, dtype=kind, device=next(network.parameters()).device)
