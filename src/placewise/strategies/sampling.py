"""Search by drawing and changing placements: random, even, hill climbing, simulated annealing, a genetic algorithm.

Each decides for the blocks of its `grouping`; by default a block is a group of the problem.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints
from placewise.core.contracts import Evaluation, Proposal, Search
from placewise.core.grouping import COLOCATED
from placewise.core.problem import Problem
from placewise.strategies.blocks import Blocks, check_grouping
from placewise.strategies.hyper_parameters import check_fields
from placewise.strategies.single_device import accelerators, move_to_allowed

Start = Literal["single", "random"]


@dataclass(frozen=True)
class Random:
    """Draws every group's device uniformly from those that it can run on, without end."""

    batch: int = 64  # placements at a time
    grouping: str = COLOCATED

    def __post_init__(self) -> None:
        check_fields(self, "batch", lambda v: v >= 1, "must be at least 1")
        check_grouping(self.grouping)

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields random placements; only one if there is no choice."""
        blocks = Blocks.of(problem, self.grouping)
        yield from _drawn(blocks, Choices.among(blocks.allowed), self.batch, rng)


@dataclass(frozen=True)
class Even:
    """Draws a GPU for each block evenly, without end, and learns nothing: the control of strategies that learn.

    A block that no GPU can run is drawn among the devices that can run it. Without a GPU, all devices take their place.
    """

    batch: int = 64  # placements at a time
    grouping: str = "coarse:64"

    def __post_init__(self) -> None:
        check_fields(self, "batch", lambda v: v >= 1, "must be at least 1")
        check_grouping(self.grouping)

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields random placements; only one if there is no choice."""
        blocks = Blocks.of(problem, self.grouping)
        on_gpus = blocks.allowed & np.isin(np.arange(problem.num_devices), accelerators(problem))  # [blocks, devices]
        choices = Choices.among(np.where(on_gpus.any(axis=1, keepdims=True), on_gpus, blocks.allowed))
        yield from _drawn(blocks, choices, self.batch, rng)


@dataclass(frozen=True)
class HillClimb:
    """Takes the best of some single changes (one group to another device), unless it is worse.

    Ties go to the first change of a batch, and to a change rather than to the incumbent: most single changes in a large
    graph do not change the step time, and moving across such a plateau helps where a stricter search gets stuck.
    """

    neighbours: int = 16
    start: Start = "single"
    grouping: str = COLOCATED

    def __post_init__(self) -> None:
        check_fields(self, "neighbours", lambda v: v >= 1, "must be at least 1")
        check_grouping(self.grouping)

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the start, then changes to the incumbent without end; only the start if there is no choice."""
        blocks = Blocks.of(problem, self.grouping)
        choices = Choices.among(blocks.allowed)
        first = choices.start(single_blocks(problem, blocks), self.start, rng, 1)
        cost = (yield Proposal(blocks.expand(first))).cost
        best, best_cost = first[cost.argmin()], cost.min()
        while len(choices.movable):
            changed = choices.change(np.repeat(best[None], self.neighbours, axis=0), rng)
            cost = (yield Proposal(blocks.expand(changed))).cost
            row = cost.argmin()
            if cost[row] <= best_cost:
                best, best_cost = changed[row], cost[row]


@dataclass(frozen=True)
class Annealing:
    """Makes single changes, worse ones with probability exp(-increase / temperature) (Kirkpatrick et al. 1983).

    At the first temperature, the average increase among `calibration` changes to the start would be taken with probability
    `first_acceptance`. It falls geometrically by the factor `cooling` over `evaluations` evaluations, and then stays there.
    Several chains share the evaluations and the temperature; each changes one group at a time. All of them begin at the best
    placement of the calibration; ties go to the first.
    """

    chains: int = 1
    evaluations: int = 2400  # until it is cold; set it to the budget
    cooling: float = 1e-4  # the last temperature / the first
    calibration: int = 32  # changes to the start that set the first temperature
    first_acceptance: float = 0.1
    start: Start = "single"
    grouping: str = COLOCATED

    def __post_init__(self) -> None:
        check_grouping(self.grouping)
        check_fields(self, "chains evaluations calibration", lambda v: v >= 1, "must be at least 1")
        check_fields(self, "cooling first_acceptance", lambda v: 0 < v < 1, "must be above 0 and below 1")

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the start, changes to it, then a change of every chain without end."""
        blocks = Blocks.of(problem, self.grouping)
        choices = Choices.among(blocks.allowed)
        first = choices.start(single_blocks(problem, blocks), self.start, rng, 1)
        cost = (yield Proposal(blocks.expand(first))).cost
        if not len(choices.movable):
            return
        best, best_cost = first[cost.argmin()], cost.min()
        changed = choices.change(np.repeat(best[None], self.calibration, axis=0), rng)
        cost = (yield Proposal(blocks.expand(changed))).cost
        hot = _first_temperature(cost - best_cost, self.first_acceptance)
        spent = len(first) + len(changed)
        if cost.min() <= best_cost:
            best, best_cost = changed[cost.argmin()], cost.min()
        current = np.repeat(best[None], self.chains, axis=0)  # [chains, groups]
        current_cost = np.repeat(best_cost, self.chains)  # [chains]
        while True:
            temperature = hot * self.cooling ** min(spent / self.evaluations, 1.0)
            changed = choices.change(current, rng)
            cost = (yield Proposal(blocks.expand(changed), notes={"temperature": temperature})).cost
            spent += len(changed)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # 0 / 0 if nothing takes time
                taken = (cost <= current_cost) | (rng.random(len(cost)) < np.exp((current_cost - cost) / temperature))
            current = np.where(taken[:, None], changed, current)
            current_cost = np.where(taken, cost, current_cost)


@dataclass(frozen=True)
class Genetic:
    """Crosses and mutates a population; the best of parents and children survive (Holland 1975; a mu + lambda scheme).

    Parents win a tournament of two. A child has one parent's devices in a contiguous range of groups (groups are in the
    order of their first ops) or in random groups, and the other parent's elsewhere; then about `mutations` of its groups
    move to another device. Ties go to the older placement, and among children to the first.
    """

    population: int = 48
    crossover: Literal["stretch", "uniform"] = "stretch"
    mutations: float = 2.0
    start: Start = "single"
    grouping: str = COLOCATED

    def __post_init__(self) -> None:
        check_grouping(self.grouping)
        check_fields(self, "population", lambda v: v >= 2, "must be at least 2")
        check_fields(self, "mutations", lambda v: v >= 0, "must be at least 0")

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the first population, then generations of children without end."""
        blocks = Blocks.of(problem, self.grouping)
        choices = Choices.among(blocks.allowed)
        first = choices.start(single_blocks(problem, blocks), self.start, rng, self.population)
        yield from expanded(self.evolve(choices, first, rng), blocks, {})

    def evolve(self, choices: "Choices", parents: Ints, rng: np.random.Generator) -> Search:
        """Yields a given first population [at least 1, groups], then generations of children without end."""
        cost = (yield Proposal(parents)).cost
        while len(choices.movable):
            children = self._cross(parents, _tournament(cost, 2 * self.population, rng), rng)
            rate = min(self.mutations / len(choices.movable), 1.0)
            children = choices.mutate(children, rng, rate)
            child_cost = (yield Proposal(children)).cost
            everyone, costs = np.concatenate([parents, children]), np.concatenate([cost, child_cost])
            alive = np.argsort(costs, kind="stable")[: self.population]
            parents, cost = everyone[alive], costs[alive]

    def _cross(self, parents: Ints, pairs: Ints, rng: np.random.Generator) -> Ints:
        """Returns a child of each two parents in `pairs` [2 * population]: [population, groups]."""
        num_groups = parents.shape[1]
        if self.crossover == "uniform":
            from_first = rng.random((self.population, num_groups)) < 0.5
        else:
            low, high = np.sort(rng.integers(0, num_groups + 1, (2, self.population, 1)), axis=0)
            groups = np.arange(num_groups)
            from_first = (low <= groups) & (groups < high)
        return np.where(from_first, parents[pairs[::2]], parents[pairs[1::2]])


class Choices(NamedTuple):
    """The devices that each group can run on, in rising order, in the form that drawing and changing placements needs."""

    counts: Ints  # [groups], how many devices each group can run on
    devices: Ints  # [groups, devices], these devices are the first `counts` of a row
    ranks: Ints  # [groups, devices], the index of each device in its row of `devices`
    movable: Ints  # the groups that can run on several devices

    @classmethod
    def of(cls, problem: Problem) -> "Choices":
        """Returns the choices of a problem's groups."""
        return cls.among(problem.allowed)

    @classmethod
    def among(cls, allowed: Bools) -> "Choices":
        """Returns the choices of groups that can run on these devices: [groups, devices]."""
        devices = np.argsort(~allowed, axis=1, kind="stable")
        counts = allowed.sum(axis=1)
        return cls(counts, devices, np.argsort(devices, axis=1, kind="stable"), np.flatnonzero(counts > 1))

    def draw(self, rng: np.random.Generator, batch: int) -> Ints:
        """Returns placements that are drawn uniformly: [batch, groups]."""
        ranks = (rng.random((batch, len(self.counts))) * self.counts).astype(np.int64)
        placements: Ints = self.devices[np.arange(len(self.counts)), ranks]
        return placements

    def start(self, singles: Ints, kind: Start, rng: np.random.Generator, batch: int) -> Ints:
        """Returns at least `batch` placements to begin with: random ones, after those on a single device for "single"."""
        if kind == "random" or not len(self.movable):
            return self.draw(rng, batch)
        return np.concatenate([singles, self.draw(rng, max(batch - len(singles), 0))])

    def change(self, placements: Ints, rng: np.random.Generator) -> Ints:
        """Returns the placements [batch, groups], each with one random group on another random device."""
        rows = np.arange(len(placements))
        groups = self.movable[rng.integers(len(self.movable), size=len(placements))]
        changed = placements.copy()
        changed[rows, groups] = self._others(groups, placements[rows, groups], rng)
        return changed

    def mutate(self, placements: Ints, rng: np.random.Generator, rate: float) -> Ints:
        """Returns the placements [batch, groups], each movable group moved to another device with probability `rate`."""
        rows, columns = np.nonzero(rng.random((len(placements), len(self.movable))) < rate)
        groups = self.movable[columns]
        mutated = placements.copy()
        mutated[rows, groups] = self._others(groups, placements[rows, groups], rng)
        return mutated

    def _others(self, groups: Ints, devices: Ints, rng: np.random.Generator) -> Ints:
        """Returns another device than the given one for each group, at random: [groups]."""
        further = rng.integers(1, self.counts[groups])
        others: Ints = self.devices[groups, (self.ranks[groups, devices] + further) % self.counts[groups]]
        return others


def single_placements(problem: Problem) -> Ints:
    """Returns a placement for each device, with every group there that can run there: [devices, groups]."""
    return move_to_allowed(problem, np.repeat(np.arange(problem.num_devices)[:, None], problem.num_groups, axis=1))


def single_blocks(problem: Problem, blocks: Blocks) -> Ints:
    """Returns a placement of the blocks for each device, with every block there that can run there: [devices, blocks]."""
    return np.stack([blocks.contract(placement) for placement in single_placements(problem)])


def expanded(search: Search, blocks: Blocks, notes: Mapping[str, Any]) -> Search:
    """Yields a search's placements of blocks as placements of groups, with notes."""
    evaluation: Evaluation | None = None
    while True:
        try:
            proposal = next(search) if evaluation is None else search.send(evaluation)
        except StopIteration:
            return
        evaluation = yield Proposal(blocks.expand(proposal.placements), notes=notes)


def _drawn(blocks: Blocks, choices: "Choices", batch: int, rng: np.random.Generator) -> Search:
    """Yields batches of drawn placements without end; only one placement if there is no choice."""
    if not len(choices.movable):
        yield Proposal(blocks.expand(choices.draw(rng, 1)))
        return
    while True:
        yield Proposal(blocks.expand(choices.draw(rng, batch)))


def _first_temperature(increases: Floats, acceptance: float) -> float:
    """Returns the temperature at which the average positive increase is taken with this probability; 0 if there is none."""
    worse = increases[increases > 0]
    return float(worse.mean() / -np.log(acceptance)) if len(worse) else 0.0


def _tournament(cost: Floats, count: int, rng: np.random.Generator) -> Ints:
    """Returns the winners of tournaments between two random rows: [count]; ties go to the lower row."""
    rivals = np.sort(rng.integers(len(cost), size=(2, count)), axis=0)
    winners: Ints = np.where(cost[rivals[0]] <= cost[rivals[1]], rivals[0], rivals[1])
    return winners
