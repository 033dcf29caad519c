"""A sequence-to-sequence network that learns by policy gradient: ColocRL.

Mirhoseini et al.: Device Placement Optimization with Reinforcement Learning. ICML 2017.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from placewise.core.arrays import Floats, Ints
from placewise.core.contracts import Evaluation, Proposal, Search
from placewise.core.problem import Problem
from placewise.strategies.blocks import Blocks, check_grouping
from placewise.strategies.hyper_parameters import check_fields
from placewise.strategies.learned import features, training
from placewise.strategies.learned.maths import Advantage, advantages, initial_probabilities, moving_average
from placewise.strategies.learned.networks import KIND_WIDTH, KindEmbedding, Policy, Seq2Seq
from placewise.strategies.warm_start import begin, check_start


@dataclass(frozen=True)
class ColocRL:
    """Samples placements from an LSTM with attention, and moves it towards those that are faster than usual."""

    samples: int = 4  # placements of a controller for an update
    controllers: int = 4  # they share the network
    grouping: str = "coarse:64"
    max_blocks: int = 256  # most decisions; if the grouping has more, coarse:max_blocks replaces it
    units: int = 256
    learning_rate: float = 1e-4  # of the LSTMs
    output_rate: float = 0.005  # of the layers that give the logits
    table_rate: float = 0.0  # of a learned table of logits besides the network; 0: there is none
    max_norm: float = 1.0
    baseline_decay: float = 0.9
    first_baseline: Literal["mean", "failing"] = "mean"  # of the first samples, or the signal of what barely fails to fit
    advantage: Advantage = "normalised"
    exploration: float = 1.0  # decisions of a placement that are uniform, on average
    valid_only_after: int = 5000  # updates, from which on only placements that fit teach
    start: str = "none"
    start_evaluations: int = 480
    confidence: float = 0.9

    def __post_init__(self) -> None:
        check_fields(self, "samples controllers max_blocks units start_evaluations", lambda v: v >= 1, "must be at least 1")
        check_fields(self, "learning_rate output_rate max_norm", lambda v: v > 0, "must be above 0")
        check_fields(self, "baseline_decay", lambda v: 0 <= v < 1, "must be at least 0 and below 1")
        check_fields(self, "confidence", lambda v: 0 < v < 1, "must be above 0 and below 1")
        check_fields(self, "exploration valid_only_after table_rate", lambda v: v >= 0, "must be at least 0")
        check_grouping(self.grouping)
        check_start(self.start)

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the samples of all controllers in one batch, without end; only one placement if there is no choice."""
        blocks = self.blocks(problem)
        known = yield from begin(problem, self.start, self.start_evaluations, rng)
        known = None if known is None else blocks.contract(known)
        initial = initial_probabilities(blocks.allowed, known, self.confidence)
        if (initial.max(axis=1, initial=0.0) == 1).all():
            yield Proposal(blocks.expand(initial.argmax(axis=1)[None]))
            return
        yield from training.learn_by_drawing(lambda: Controllers(self, problem, blocks, initial, rng))

    def blocks(self, problem: Problem) -> Blocks:
        """Returns the blocks that one decision each places."""
        blocks = Blocks.of(problem, self.grouping)
        return blocks if blocks.num_blocks <= self.max_blocks else Blocks.of(problem, f"coarse:{self.max_blocks}")


def read_blocks(problem: Problem, blocks: Blocks) -> tuple[Floats, Floats]:
    """Returns each block's shares of the kinds of op, and the shapes of its outputs with its neighbours.

    They are [blocks, kinds] and [blocks, 24 + 2 blocks]: after the shapes come the blocks that read from it and those that
    it reads from.
    """
    kinds, labels = features.Kinds.of(problem.graph), blocks.of_group[problem.op_groups]
    counts = kinds.counted(labels, blocks.num_blocks)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    shapes, _ = features.output_shapes(problem.graph, labels, blocks.num_blocks)
    readers = features.adjacency(*features.edges_between(problem.graph, labels, blocks.num_blocks), blocks.num_blocks)
    return shares, np.concatenate([shapes, readers, readers.T], axis=1)


class Controllers:
    """Learners that share one policy: each draws its own placements, and they update it in turn.

    All gradients of a round belong to the policy that drew the placements, so the later ones are slightly stale, as with the
    paper's asynchronous controllers.
    """

    def __init__(
        self, settings: ColocRL, problem: Problem, blocks: Blocks, initial: Floats, rng: np.random.Generator
    ) -> None:
        self.settings, self.blocks = settings, blocks
        self.generator = training.seeded_generator(rng)
        shares, others = read_blocks(problem, blocks)
        width, num_kinds = KIND_WIDTH + others.shape[1], shares.shape[1]
        network = training.build_network(
            lambda: Seq2Seq(
                width,
                problem.num_devices,
                units=settings.units,
                layers=1,
                table_blocks=blocks.num_blocks if settings.table_rate else 0,
            ),
            self.generator,
        )
        embedding = training.build_network(lambda: KindEmbedding(num_kinds), self.generator)
        inputs = training.to_tensor(features.standardised(np.concatenate([shares, others], axis=1)))
        prior = training.prior_of(initial, blocks.allowed, settings.exploration)
        self.policy = Policy(network, inputs, prior, embedding)
        self.optimizer: torch.optim.Optimizer = training.adam(
            training.rated(self.policy, settings.learning_rate, settings.output_rate, settings.table_rate)
        )
        self.baseline = training.failing_signal(problem) if settings.first_baseline == "failing" else None
        self.updates = 0
        self.placements = torch.zeros(0, dtype=torch.int64)  # [controllers * samples, blocks], the last ones

    def draw(self) -> Ints:
        """Returns the placements of all controllers: [controllers * samples, groups]."""
        batch = self.settings.controllers * self.settings.samples
        self.placements = self.policy.sample(training.waiting_times((batch, *self.policy.prior.bias.shape), self.generator))
        return self.blocks.expand(training.to_array(self.placements))

    def learn(self, evaluation: Evaluation) -> dict[str, float]:
        """Updates the policy once for each controller; returns the notes."""
        signals = training.signals(evaluation.cost)
        teaches = (evaluation.overflow_bytes == 0) | (self.updates < self.settings.valid_only_after)
        baseline = float(signals.mean()) if self.baseline is None else self.baseline
        better = advantages(signals, baseline, self.settings.advantage)
        gains = training.to_tensor(np.where(teaches, better, 0.0))
        found: list[list[Tensor]] = []
        losses, entropies = [], []
        for first in range(0, len(signals), self.settings.samples):
            rows = slice(first, first + self.settings.samples)
            logs = self.policy(self.placements[rows])
            loss = training.reinforce_loss(training.chosen(logs, self.placements[rows]).mean(dim=1), gains[rows])
            found.append(training.gradients(loss, self.policy, "colocrl", self.updates + len(found) + 1))
            losses.append(loss.item())
            entropies.append(training.mean_entropy(logs.detach()).item())
        for number, gradients in enumerate(found):
            if not gains[number * self.settings.samples :][: self.settings.samples].any():
                continue  # or else momentum alone would move the policy
            training.descend(self.optimizer, self.policy, gradients, self.settings.max_norm)
        self.updates += len(found)
        self.baseline = moving_average(baseline, signals[teaches], self.settings.baseline_decay)
        means = {"loss": float(np.mean(losses)), "entropy": float(np.mean(entropies))}
        return training.notes_of(evaluation, self.updates, **means, baseline=self.baseline)
