"""A network that groups ops and one that places the groups, which learn together: HDP.

Mirhoseini et al.: A Hierarchical Model for Device Placement. ICLR 2018.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from placewise.core.arrays import Floats, Ints
from placewise.core.contracts import Evaluation, Proposal, Search
from placewise.core.errors import StrategyError
from placewise.core.labels import sum_by_label
from placewise.core.problem import Problem
from placewise.strategies.blocks import Blocks
from placewise.strategies.hyper_parameters import check_fields
from placewise.strategies.learned import features, training
from placewise.strategies.learned.maths import Advantage, advantages, initial_probabilities, moving_average
from placewise.strategies.learned.networks import KIND_WIDTH, KindEmbedding, Prior, Seq2Seq
from placewise.strategies.single_device import move_to_allowed
from placewise.strategies.warm_start import begin, check_start

MOST_UNGROUPED = 4096  # decisions without a grouping; attention takes time and memory in proportion to the square of it


@dataclass(frozen=True, eq=False)
class Units:
    """The groups of a problem as HDP reads them. They are called units here, as a group is one that HDP makes of them."""

    kinds: Floats  # [units, kinds], the number of ops of each kind
    shapes: Floats  # [units, 24 + 1], of the largest outputs, padded with -1, and log10(1 + number of outputs)
    neighbours: Floats  # [units, 12], number / units of up to 6 that it reads from and 6 that read from it, padded with -1
    output_bytes: Floats  # [units], of all tensors that its ops write
    source: Ints  # [edges], units that write
    target: Ints  # [edges], units that read from them, each pair once

    @classmethod
    def of(cls, problem: Problem) -> "Units":
        """Returns the units of a problem."""
        graph, labels, count = problem.graph, problem.op_groups, problem.num_groups
        shapes, num_outputs = features.output_shapes(graph, labels, count)
        source, target = features.edges_between(graph, labels, count)
        written = graph.ops.writes
        return cls(
            features.Kinds.of(graph).counted(labels, count),
            np.concatenate([shapes, np.log10(1.0 + num_outputs)[:, None]], axis=1),
            features.neighbours(source, target, count),
            sum_by_label(labels[written.rows], graph.tensors.nbytes[written.values].astype(np.float64), count),
            source,
            target,
        )

    def embedded(self) -> Floats:
        """Returns the grouper's inputs: shares of kinds, shapes of outputs, neighbours: [units, kinds + 25 + 12]."""
        shares = self.kinds / np.maximum(self.kinds.sum(axis=1, keepdims=True), 1.0)
        return np.concatenate([shares, self.shapes, self.neighbours], axis=1)

    def grouped(self, groups: Ints, num_groups: int) -> Floats:
        """Returns the placer's inputs, from each unit's group [units]: [groups, kinds + 1 + 2 groups].

        The columns are log10(1 + number of ops of a kind), the total size of all outputs, 1 for every group that reads from
        it, and 1 for every group that it reads from.
        """
        counts = features.column_sums(groups, self.kinds, num_groups)
        nbytes = sum_by_label(groups, self.output_bytes, num_groups)
        source, target = groups[self.source], groups[self.target]
        between = source != target
        readers = features.adjacency(source[between], target[between], num_groups)
        return np.concatenate([np.log10(1.0 + counts), features.scaled(nbytes)[:, None], readers, readers.T], axis=1)


@dataclass(frozen=True)
class Hdp:
    """Draws a grouping and some placements of it, and moves both networks towards faster ones."""

    placements: int = 4  # of one grouping for an update
    groups: int = 64
    grouping: Literal["learned", "fixed", "none"] = "learned"
    first_groups: Literal["coarse", "stretches", "random"] = "coarse"  # what the grouper begins at, or keeps if it is fixed
    group_confidence: float = 0.999  # the probability of a unit's first group
    hidden: int = 64  # units of the grouper
    units: int = 256  # of the placer's LSTMs
    ceiling: float = 5.0  # C
    temperature: float = 10.0  # T
    learning_rate: float = 1e-4  # of the placer's LSTMs
    grouper_rate: float = 1e-3  # of the grouper
    output_rate: float = 0.01  # of the layers that give the logits
    table_rate: float = 0.0  # of a learned table of logits besides the placer; 0: there is none
    max_norm: float = 1.0
    baseline_decay: float = 0.9
    advantage: Advantage = "normalised"
    noise: float = 0.1  # the most that is added to a logit
    early_updates: int = 500  # with noise, and in which placements that do not fit teach too
    exploration: float = 1.0  # decisions of a placement that are uniform, on average
    start: str = "none"
    start_evaluations: int = 480
    confidence: float = 0.9

    def __post_init__(self) -> None:
        check_fields(self, "placements groups hidden units start_evaluations", lambda v: v >= 1, "must be at least 1")
        check_fields(
            self, "ceiling temperature learning_rate grouper_rate output_rate max_norm", lambda v: v > 0, "must be above 0"
        )
        check_fields(self, "noise early_updates exploration table_rate", lambda v: v >= 0, "must be at least 0")
        check_fields(self, "baseline_decay", lambda v: 0 <= v < 1, "must be at least 0 and below 1")
        check_fields(self, "confidence group_confidence", lambda v: 0 < v < 1, "must be above 0 and below 1")
        check_start(self.start)

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the placements of one grouping at a time, without end; only one if there is no choice."""
        if self.grouping == "none" and problem.num_groups > MOST_UNGROUPED:
            raise StrategyError(
                f"strategy 'hdp': grouping none takes at most {MOST_UNGROUPED} groups, the problem has {problem.num_groups}"
            )
        known = yield from begin(problem, self.start, self.start_evaluations, rng)
        if not (problem.allowed.sum(axis=1) > 1).any():
            yield Proposal(problem.allowed.argmax(axis=1)[None])
            return
        yield from training.learn_by_drawing(lambda: Hierarchy(self, problem, known, rng))


class Grouper(nn.Module):
    """A feed-forward network that gives logits for each unit's group: [units, width] -> [units, groups]."""

    def __init__(self, num_kinds: int, width: int, hidden: int, num_groups: int) -> None:
        super().__init__()
        self.embed = KindEmbedding(num_kinds)
        self.hidden = nn.Linear(KIND_WIDTH + width - num_kinds, hidden)
        self.output = nn.Linear(hidden, num_groups)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the logits."""
        logits: Tensor = self.output(torch.relu(self.hidden(self.embed(inputs))))
        return logits


class Hierarchy:
    """The grouper and the placer, which draw placements and learn from them."""

    def __init__(self, settings: Hdp, problem: Problem, known: Ints | None, rng: np.random.Generator) -> None:
        self.settings, self.problem = settings, problem
        self.generator = training.seeded_generator(rng)
        self.units = Units.of(problem)
        self.num_groups = problem.num_groups if settings.grouping == "none" else min(settings.groups, problem.num_groups)
        embedded, num_kinds = self.units.embedded(), self.units.kinds.shape[1]
        self.inputs = training.to_tensor(features.standardised(embedded))
        self.grouper = training.build_network(
            lambda: Grouper(num_kinds, embedded.shape[1], settings.hidden, self.num_groups), self.generator
        )
        self.placer = training.build_network(
            lambda: Seq2Seq(
                num_kinds + 1 + 2 * self.num_groups,
                problem.num_devices,
                units=settings.units,
                layers=1,
                two_ways=True,
                ceiling=settings.ceiling,
                temperature=settings.temperature,
                table_blocks=self.num_groups if settings.table_rate else 0,
            ),
            self.generator,
        )
        self.learning = nn.ModuleList([self.grouper, self.placer] if settings.grouping == "learned" else [self.placer])
        parts = training.rated(self.placer, settings.learning_rate, settings.output_rate, settings.table_rate)
        if settings.grouping == "learned":
            parts = training.rated(self.grouper, settings.grouper_rate) + parts
        self.optimizer = training.adam(parts)
        self.initial = initial_probabilities(problem.allowed, known, settings.confidence)  # [units, devices]
        self.groups = self._first_groups(known, rng)  # [units], the last ones that were drawn
        self.bias = self._grouper_bias()  # [units, groups]
        self.placements = torch.zeros(0, dtype=torch.int64)  # [placements, groups], the last ones
        self.baseline: float | None = None
        self.updates = 0

    def draw(self) -> Ints:
        """Returns some placements of one grouping: [placements, groups of the problem]."""
        if self.settings.grouping == "learned":
            with torch.no_grad():
                logits = self.grouper(self.inputs) + self.bias
            self.groups = training.to_array(self._draw_groups(torch.softmax(logits + self.noise(logits.shape), dim=1)))
        prior = self._prior()
        prior = prior._replace(bias=prior.bias + self.noise(prior.bias.shape))
        with torch.no_grad():
            memory = self.placer.read(self._placer_inputs())
        waits = training.waiting_times((self.settings.placements, *prior.bias.shape), self.generator)
        self.placements = self.placer.sample(memory, prior, waits)
        return move_to_allowed(self.problem, training.to_array(self.placements)[:, self.groups])

    def _draw_groups(self, chances: Tensor) -> Tensor:
        """Returns a group for each unit, drawn by its chances: [units] from [units, groups]."""
        reach = chances.cumsum(dim=1)
        points = torch.rand((len(reach), 1), generator=self.generator) * reach[:, -1:]
        drawn: Tensor = torch.searchsorted(reach, points, right=True)[:, 0].clamp_(max=self.num_groups - 1)
        return drawn

    def learn(self, evaluation: Evaluation) -> dict[str, float]:
        """Updates both networks; returns the notes."""
        self.updates += 1
        signals = training.signals(evaluation.cost)
        teaches = (evaluation.overflow_bytes == 0) | (self.updates <= self.settings.early_updates)
        baseline = float(signals.mean()) if self.baseline is None else self.baseline
        gains = training.to_tensor(np.where(teaches, advantages(signals, baseline, self.settings.advantage), 0.0))
        logs = self.placer_logs()  # [placements, groups, devices]
        used = torch.tensor(np.bincount(self.groups, minlength=self.num_groups) > 0)
        loss = training.reinforce_loss(training.chosen(logs, self.placements)[:, used].mean(dim=1), gains)
        grouper_entropy = {}
        if self.settings.grouping == "learned":
            group_logs = torch.log_softmax(self.grouper(self.inputs) + self.bias, dim=1)
            loss = loss + training.reinforce_loss(training.chosen(group_logs, torch.tensor(self.groups)).mean(), gains)
            grouper_entropy = {"grouper_entropy": training.mean_entropy(group_logs.detach()).item()}
        gradients = training.gradients(loss, self.learning, "hdp", self.updates)
        if gains.any():  # or else momentum alone would move them
            training.descend(self.optimizer, self.learning, gradients, self.settings.max_norm)
        self.baseline = moving_average(baseline, signals[teaches], self.settings.baseline_decay)
        seen = {"entropy": training.mean_entropy(logs.detach()[:, used]).item(), "baseline": self.baseline}
        seen |= {"groups_used": float(used.sum())} | grouper_entropy
        return training.notes_of(evaluation, self.updates, loss=loss.item(), **seen)

    def _placer_inputs(self) -> Tensor:
        return training.to_tensor(features.standardised(self.units.grouped(self.groups, self.num_groups)))

    def placer_logs(self) -> Tensor:
        """Returns the logarithms of the probabilities at every group of the last placements."""
        logits = self.placer(self.placer.read(self._placer_inputs()), self.placements)
        return self._prior().log_probabilities(logits)

    def _prior(self) -> Prior:
        """Returns the placer's prior: for a group the mean over its units; uniform for a group without units."""
        summed = features.column_sums(self.groups, self.initial, self.num_groups)
        summed[summed.sum(axis=1) == 0] = 1.0
        return training.prior_of(summed / summed.sum(axis=1, keepdims=True), summed > 0, self.settings.exploration)

    def noise(self, shape: torch.Size) -> Tensor:
        """Returns what is added to logits: normal, clipped to -noise .. noise; 0 after the early updates."""
        if self.updates >= self.settings.early_updates or not self.settings.noise:
            return torch.zeros(())
        return self.settings.noise * torch.randn(shape, generator=self.generator).clamp_(-1, 1)

    def _grouper_bias(self) -> Tensor:
        """Returns the grouper's bias [units, groups], towards the first groups."""
        if self.settings.grouping != "learned":
            return torch.zeros(())
        every = np.ones((len(self.groups), self.num_groups), np.bool_)
        chances = initial_probabilities(every, self.groups, self.settings.group_confidence)
        return training.prior_of(chances, every, 0.0).bias

    def _first_groups(self, known: Ints | None, rng: np.random.Generator) -> Ints:
        """Returns the groups that the grouper begins at: [units].

        With a known placement they are split by its devices; otherwise they are coarse blocks of the graph, stretches of the
        program, or random.
        """
        num_units, settings = self.problem.num_groups, self.settings
        if settings.grouping == "none":
            return np.arange(num_units)
        if known is not None:
            return split_by_device(known, self.num_groups)
        if settings.first_groups == "coarse":
            blocks = Blocks.of(self.problem, f"coarse:{self.num_groups}").of_group
            return blocks if int(blocks.max(initial=0)) < self.num_groups else _at_most(blocks, self.num_groups)
        if settings.first_groups == "stretches":
            return split_by_device(np.zeros(num_units, np.int64), self.num_groups)
        return rng.integers(self.num_groups, size=num_units)


def _at_most(groups: Ints, most: int) -> Ints:
    """Returns groups of which those with the highest numbers, more than `most`, have joined others in turn: [units]."""
    return np.where(groups < most, groups, groups % most)


def split_by_device(placement: Ints, num_groups: int) -> Ints:
    """Returns a group for each unit: equal shares of the units, sorted by device and then by number: [units].

    So the units of a group are near each other and, except for the few groups where two devices meet, on one device.
    """
    order = np.lexsort((np.arange(len(placement)), placement))
    groups = np.empty(len(placement), np.int64)
    groups[order] = np.arange(len(placement)) * num_groups // max(len(placement), 1)
    return groups
