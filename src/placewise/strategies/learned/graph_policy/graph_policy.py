"""A placement from weights that were learned on other graphs and machines, refined; then others like it are tried."""

import hashlib
from collections.abc import Generator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from placewise.core.arrays import Floats, Ints
from placewise.core.contracts import Evaluation, Proposal, Search
from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.formats.files import describe
from placewise.formats.safetensors_file import read_safetensors
from placewise.simulate.simulator import Simulator
from placewise.strategies.blocks import Blocks
from placewise.strategies.hyper_parameters import check_fields
from placewise.strategies.learned.graph_policy.block_graph import merge_blocks, read_block_graph
from placewise.strategies.learned.graph_policy.drawing import place_greedily, samples
from placewise.strategies.learned.graph_policy.policy_network import GraphTensors, PolicyNetwork
from placewise.strategies.learned.training import one_thread
from placewise.strategies.memory_repair import repair
from placewise.strategies.sampling import Choices, Genetic, expanded
from placewise.strategies.warm_start import begin, check_start

SHIPPED = "shipped"

MOST_OPS = 300_000  # that are simulated for one number of blocks; in a larger step there are fewer candidates

REFINED_OPS = 1_500_000  # that are simulated to refine them; in a larger step there are fewer refinements


@dataclass(frozen=True)
class GraphPolicy:
    """Places blocks one after another as a network that has learned on other graphs likes best, and evolves its samples.

    The simulator is its model of the machine: it judges the greedy placements for fewer and more devices, some samples, and
    what comes of crossing and mutating the best of them, and the best of all is the first proposal. All later placements are
    judged by the evaluator alone.
    """

    blocks: int = 64  # decisions of the first placements; as many others have twice as many
    candidates: int = 96  # that the simulator judges: greedy placements, then samples
    refinements: int = 600  # placements that it judges then: crossed and mutated candidates; the best one is proposed
    temperature: float = 1.0  # of samples: with less, they are more like the greedy placement
    population: int = 12  # of the placements that are crossed and mutated
    mutations: float = 1.0  # of a child, on average
    weights: str = SHIPPED  # or the path of a file that `placewise train-policy` wrote
    start: str = "none"
    start_evaluations: int = 480

    def __post_init__(self) -> None:
        check_fields(self, "blocks candidates start_evaluations", lambda v: v >= 1, "must be at least 1")
        check_fields(self, "population", lambda v: v >= 2, "must be at least 2")
        check_fields(self, "temperature", lambda v: v > 0, "must be above 0")
        check_fields(self, "refinements mutations", lambda v: v >= 0, "must be at least 0")
        check_start(self.start)
        if self.weights != SHIPPED and not Path(self.weights).is_file():
            raise ValueError(f"weights must be {SHIPPED} or the path of a file, it is {self.weights!r}")

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the answer of the weights, and then generations of its children; only the answer if there is no choice."""
        network = read_network(self.weights)
        known = yield from begin(problem, self.start, self.start_evaluations, rng)
        sizes = (self.blocks, 2 * self.blocks)[-min(self.candidates, 2) :]
        answers = [self.answer(network, problem, num_blocks, rng) for num_blocks in sizes]
        answer = self.refined(min(answers, key=lambda one: float(one.cost[0])), rng)
        blocks = answer.blocks
        found = answer.placements
        first = blocks.expand(found[:1])
        evaluation = yield Proposal(first, notes={"stage": "policy"})
        if evaluation.overflow_bytes[0]:
            whole = repair(Simulator(problem), first[0])
            if not np.array_equal(whole, first[0]):
                yield Proposal(whole[None], notes={"stage": "repair"})
            found = np.concatenate([blocks.contract(whole)[None], found])
        choices = Choices.among(blocks.allowed)
        if not len(choices.movable):
            return
        parents = np.stack([*([] if known is None else [blocks.contract(known)]), *found])[: self.population]
        if self.refinements:
            blocks, parents = yield from self.tuned(problem, blocks, blocks.expand(parents), rng)
            choices = Choices.among(blocks.allowed)
        evolution = Genetic(population=self.population, mutations=self.mutations)
        yield from expanded(evolution.evolve(choices, parents, rng), blocks, {"stage": "evolution"})

    def tuned(
        self, problem: Problem, blocks: Blocks, parents: Ints, rng: np.random.Generator
    ) -> Generator[Proposal, Evaluation, tuple[Blocks, Ints]]:
        """Yields refinements of placements [parents, groups] and of the best ones, until they find nothing new.

        The simulator refines, the evaluator judges what that finds, and its best ones are refined next. Whenever none is
        better than all before, there are twice as many blocks. Returns the last blocks and the best placements of them.
        """
        proposed: dict[bytes, None] = {}
        judged, costs, best = parents[:0], np.zeros(0), np.inf
        num_blocks, is_finest = blocks.num_blocks, blocks.num_blocks >= problem.num_groups
        model = _model(problem, blocks)
        while True:
            pool = np.concatenate([judged, parents])[: self.population]
            start = np.stack([blocks.contract(placement) for placement in pool])
            refined = self.refined(Draft(blocks, model, start, np.zeros(len(start))), rng)
            children = {_digest(child): child for child in blocks.expand(refined.placements[: 4 * self.population])}
            fresh = [digest for digest in children if digest not in proposed][: self.population]
            if fresh:
                placements = np.stack([children[digest] for digest in fresh])
                proposed |= dict.fromkeys(fresh)
                evaluation = yield Proposal(placements, notes={"stage": "tuning"})
                judged, costs = np.concatenate([judged, placements]), np.concatenate([costs, evaluation.cost])
                alive = np.argsort(costs, kind="stable")[: self.population]
                judged, costs = judged[alive], costs[alive]
            if not fresh or costs[0] >= best:
                if is_finest:
                    return blocks, start
                num_blocks *= 2
                is_finest = num_blocks >= problem.num_groups
                blocks = Blocks.of(problem, f"coarse:{num_blocks}")
                model = _model(problem, blocks)
            best = min(best, float(costs[0])) if len(costs) else best

    def answer(self, network: PolicyNetwork, problem: Problem, num_blocks: int, rng: np.random.Generator) -> "Draft":
        """Returns different placements of about so many blocks, the one that the simulator predicts best first."""
        blocks = Blocks.of(problem, f"coarse:{num_blocks}")
        model = _model(problem, blocks)
        with one_thread():
            graph = read_block_graph(model.problem)
            scorer = network.scorer(GraphTensors.of(graph))
        if blocks.num_blocks and not all(np.isfinite(array).all() for array in scorer):
            raise StrategyError(f"weights {self.weights}: their scores are not finite")
        most = max(min(MOST_OPS // max(problem.num_ops, 1), self.candidates // 2), 1)
        greedy = place_greedily(graph, model, scorer, most)
        drawn = samples(graph, scorer, most - len(greedy), self.temperature, greedy[0].room, rng)
        placements = np.stack([*(one.placement for one in greedy), *(one.placement for one in drawn)])
        return Draft.of(blocks, model, placements, model(placements).cost)

    def refined(self, draft: "Draft", rng: np.random.Generator) -> "Draft":
        """Returns the best placements that come of crossing and mutating those of a draft in the simulator."""
        num_ops = max(draft.model.problem.num_ops, 1)
        most = min(self.refinements, max(REFINED_OPS // num_ops, self.population))
        choices = Choices.among(draft.blocks.allowed)
        if not most or not len(choices.movable):
            return draft
        evolution = Genetic(population=self.population, mutations=self.mutations)
        proposals = evolution.evolve(choices, draft.placements[: self.population], rng)
        proposal, judged, found = next(proposals), 0, list[tuple[Ints, Floats]]()
        while judged < most:
            evaluation = draft.model(proposal.placements)
            found.append((proposal.placements, evaluation.cost))
            judged += len(proposal.placements)
            proposal = proposals.send(evaluation)
        proposals.close()
        placements, costs = (np.concatenate(entries) for entries in zip(*found, strict=True))
        return Draft.of(draft.blocks, draft.model, placements, costs)


class Draft(NamedTuple):
    """Different placements of blocks that the weights propose, the best first."""

    blocks: Blocks
    model: Simulator  # with the blocks as groups
    placements: Ints  # [drawn, blocks]
    cost: Floats  # [drawn], predicted

    @classmethod
    def of(cls, blocks: Blocks, model: Simulator, placements: Ints, cost: Floats) -> "Draft":
        """Returns the draft of placements in any order, which may repeat; ties go to the earlier one."""
        order = np.argsort(cost, kind="stable")
        _, firsts = np.unique(placements[order], axis=0, return_index=True)
        rows = order[np.sort(firsts)]
        return cls(blocks, model, np.asarray(placements[rows], np.int64), np.asarray(cost[rows], np.float64))


def _model(problem: Problem, blocks: Blocks) -> Simulator:
    """Returns the simulator of a problem with blocks as groups."""
    return Simulator(merge_blocks(problem, blocks, f"coarse:{blocks.num_blocks}"))


def _digest(placement: Ints) -> bytes:
    return hashlib.blake2b(placement.tobytes(), digest_size=16).digest()


def read_network(weights: str) -> PolicyNetwork:
    """Returns the network of a file, or of the shipped weights; a StrategyError names the rule that does not hold."""
    path = str(files("placewise.strategies.learned.graph_policy") / "weights.safetensors") if weights == SHIPPED else weights
    arrays, metadata = read_safetensors(path, StrategyError)
    try:
        width, rounds = int(metadata["width"]), int(metadata["rounds"])
    except (KeyError, ValueError):
        raise StrategyError(f"{path}: holds no weights of the graph policy: its metadata lack width and rounds") from None
    if not (1 <= width <= 1024 and 0 <= rounds <= 16):
        raise StrategyError(f"{path}: width must be from 1 to 1024 and rounds from 0 to 16, they are {width} and {rounds}")
    with torch.device("meta"):
        network = PolicyNetwork(width, rounds)
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    given = {name: array.shape for name, array in arrays.items()}
    if expected != given:
        wrong = next(name for name in (*expected, *given) if expected.get(name) != given.get(name))
        raise StrategyError(
            f"{path}: {describe(wrong)} must have the shape {expected.get(wrong)}, it has {given.get(wrong)}"
        )
    with np.errstate(over="ignore"):
        values = {name: array.astype(np.float32) for name, array in arrays.items()}
    if not all(np.isfinite(array).all() for array in values.values()):
        raise StrategyError(f"{path}: has a weight that is not finite")
    network.load_state_dict({name: torch.from_numpy(array) for name, array in values.items()}, assign=True)
    return network
