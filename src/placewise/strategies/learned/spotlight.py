"""A sequence-to-sequence network that learns by proximal policy optimisation with a KL penalty: Spotlight.

Gao, Chen, Li: Spotlight: Optimizing Device Placement for Training Deep Neural Networks. ICML 2018.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from placewise.core.arrays import Floats, Ints
from placewise.core.contracts import Evaluation, Proposal, Search
from placewise.core.problem import Problem
from placewise.strategies.blocks import Blocks, check_grouping
from placewise.strategies.hyper_parameters import check_fields
from placewise.strategies.learned import features, training
from placewise.strategies.learned.maths import Advantage, advantages, initial_probabilities, moving_average
from placewise.strategies.learned.networks import Policy, Seq2Seq
from placewise.strategies.warm_start import begin, check_start


@dataclass(frozen=True)
class Spotlight:
    """Places one block at each stage of a Markov decision process, and learns from the time at the end."""

    batch: int = 10
    grouping: str = "coarse:64"
    units: int = 128
    layers: int = 2
    learning_rate: float = 1e-4  # of the LSTMs
    output_rate: float = 0.003  # of the layers that give the logits
    table_rate: float = 0.0  # of a learned table of logits besides the network; 0: there is none
    baseline_decay: float = 0.9  # of the moving average of the times; 1: the mean of all earlier ones
    ascent_steps: int = 6
    kl_weight: float = 1.0  # beta
    exploration: float = 1.5  # decisions of a placement that are uniform, on average
    reward_scale: float = 1.0
    advantage: Advantage = "normalised"
    start: str = "none"
    start_evaluations: int = 480
    confidence: float = 0.9

    def __post_init__(self) -> None:
        check_fields(self, "batch units layers ascent_steps start_evaluations", lambda v: v >= 1, "must be at least 1")
        check_fields(self, "learning_rate output_rate reward_scale", lambda v: v > 0, "must be above 0")
        check_fields(self, "kl_weight exploration table_rate", lambda v: v >= 0, "must be at least 0")
        check_fields(self, "baseline_decay", lambda v: 0 <= v <= 1, "must be from 0 to 1")
        check_fields(self, "confidence", lambda v: 0 < v < 1, "must be above 0 and below 1")
        check_grouping(self.grouping)
        check_start(self.start)

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields batches of samples without end; only one placement if there is no choice."""
        blocks = Blocks.of(problem, self.grouping)
        known = yield from begin(problem, self.start, self.start_evaluations, rng)
        known = None if known is None else blocks.contract(known)
        initial = initial_probabilities(blocks.allowed, known, self.confidence)
        if (initial.max(axis=1, initial=0.0) == 1).all():
            yield Proposal(blocks.expand(initial.argmax(axis=1)[None]))
            return
        yield from training.learn_by_drawing(lambda: Stages(self, blocks, initial, rng))


class Trials(NamedTuple):
    """Placements that a policy has drawn, and their rewards."""

    placements: Tensor  # [batch, blocks]
    rewards: Tensor  # [batch]
    weights: Tensor  # [batch], with a sum of 1; equal for samples


def proximal_objective(new: Tensor, old: Tensor, trials: Trials, kl_weight: float) -> Tensor:
    """Returns what an update maximises: the mean over trials and stages of ratio · reward - beta · KL(q ‖ q').

    The ratio is q'(a|s) / q(a|s) of the chosen device, the divergence is over all devices of the stage. `new` and `old` are
    the logarithms of the probabilities q' and q: [batch, blocks, devices].
    """
    ratio = (training.chosen(new, trials.placements) - training.chosen(old, trials.placements)).exp()  # [batch, blocks]
    divergence = (old.exp() * (old - new)).sum(dim=2)  # [batch, blocks]
    return trials.weights @ (ratio * trials.rewards[:, None] - kl_weight * divergence).mean(dim=1)


def ascend(
    policy: nn.Module, optimizer: torch.optim.Optimizer, trials: Trials, settings: Spotlight, update: int
) -> tuple[float, float]:
    """Makes some steps that raise the objective; returns the objective at the last step and the old policy's entropy.

    `policy(placements)` gives the logarithms of its probabilities at every stage: [batch, blocks, devices].
    """
    old, objective = None, torch.zeros(())
    for _ in range(settings.ascent_steps):
        new = policy(trials.placements)
        old = new.detach() if old is None else old
        objective = proximal_objective(new, old, trials, settings.kl_weight)
        training.descend(optimizer, policy, training.gradients(-objective, policy, "spotlight", update))
    assert old is not None
    return objective.item(), training.mean_entropy(old).item()


class Stages:
    """Draws placements stage by stage, and learns from them."""

    def __init__(self, settings: Spotlight, blocks: Blocks, initial: Floats, rng: np.random.Generator) -> None:
        self.settings, self.blocks = settings, blocks
        self.generator = training.seeded_generator(rng)
        num_blocks, num_devices = initial.shape
        network = training.build_network(
            lambda: Seq2Seq(
                num_blocks,
                num_devices,
                units=settings.units,
                layers=settings.layers,
                table_blocks=num_blocks if settings.table_rate else 0,
            ),
            self.generator,
        )
        prior = training.prior_of(initial, blocks.allowed, settings.exploration)
        numbers = training.to_tensor(features.standardised(np.eye(num_blocks)))  # a block is only its number
        self.policy = Policy(network, numbers, prior)
        self.optimizer = training.adam(
            training.rated(self.policy, settings.learning_rate, settings.output_rate, settings.table_rate)
        )
        self.num_trials, self.baseline, self.updates = 0, 0.0, 0
        self.placements = torch.zeros(0, dtype=torch.int64)  # [batch, blocks], the last ones

    def draw(self) -> Ints:
        """Returns placements of groups: [batch, groups]."""
        waits = training.waiting_times((self.settings.batch, *self.policy.prior.bias.shape), self.generator)
        self.placements = self.policy.sample(waits)
        return self.blocks.expand(training.to_array(self.placements))

    def learn(self, evaluation: Evaluation) -> dict[str, float]:
        """Maximises the objective on the last batch; returns the notes."""
        self.updates += 1
        seconds = evaluation.cost
        trials = Trials(self.placements, self.rewards(seconds), torch.full((len(seconds),), 1 / len(seconds)))
        objective, entropy = ascend(self.policy, self.optimizer, trials, self.settings, self.updates)
        self._follow(seconds)
        return training.notes_of(evaluation, self.updates, loss=-objective, entropy=entropy, baseline=self.baseline)

    def rewards(self, seconds: Floats) -> Tensor:
        """Returns the scaled rewards, average time of earlier trials - time: [batch]; the first batch uses its own mean."""
        baseline = self.baseline if self.num_trials else float(seconds.mean())
        return training.to_tensor(self.settings.reward_scale * advantages(seconds, baseline, self.settings.advantage))

    def _follow(self, seconds: Floats) -> None:
        """Moves the baseline after a batch: the moving average, or with a decay of 1 the mean of all trials."""
        seen, decay = self.num_trials, self.settings.baseline_decay
        self.num_trials += len(seconds)
        if decay == 1:
            self.baseline += (float(seconds.sum()) - len(seconds) * self.baseline) / self.num_trials
        else:
            self.baseline = moving_average(self.baseline if seen else None, seconds, decay)
