"""A table of probabilities that learns where good placements are: Post, and three strategies that its paper compares.

Gao, Chen, Li: Post: Device Placement with Cross-Entropy Minimization and Proximal Policy Optimization. NeurIPS 2018.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints
from placewise.core.contracts import Proposal, Search
from placewise.core.problem import Problem
from placewise.strategies.blocks import Blocks, check_grouping
from placewise.strategies.hyper_parameters import check_fields
from placewise.strategies.learned import maths
from placewise.strategies.learned.maths import Advantage
from placewise.strategies.warm_start import begin, check_start


@dataclass(frozen=True, eq=False)
class Samples:
    """The placements that were drawn and evaluated, as far as the next update needs them."""

    placements: Ints  # [kept, blocks], the last ones
    seconds: Floats  # [kept]
    count: int = 0  # of all placements that were drawn
    baseline: float | None = None  # a moving average of all times
    best_seconds: float = np.inf

    def add(self, placements: Ints, seconds: Floats, decay: float, kept: int) -> "Samples":
        """Returns the samples with one more batch; the last `kept` stay."""
        return Samples(
            np.concatenate([self.placements, placements])[-kept:],
            np.concatenate([self.seconds, seconds])[-kept:],
            self.count + len(seconds),
            maths.moving_average(self.baseline, seconds, decay),
            min(self.best_seconds, float(seconds.min())),
        )


class Update(NamedTuple):
    """A distribution that has learned from samples."""

    probabilities: Floats  # [blocks, devices]
    loss: float


@dataclass(frozen=True)
class _Table(ABC):
    """Draws placements from a table of probabilities [blocks, devices] that learns from every batch."""

    name: ClassVar[str]

    batch: int = 12  # K
    baseline_decay: float = 0.9
    failing_seconds: float = 0.0  # time of a placement that does not fit; 0: its cost, as for all others
    grouping: str = "coarse:64"
    start: str = "none"
    start_evaluations: int = 480
    confidence: float = 0.9

    def __post_init__(self) -> None:
        check_fields(self, "batch start_evaluations", lambda v: v >= 1, "must be at least 1")
        check_fields(self, "baseline_decay", lambda v: 0 <= v < 1, "must be at least 0 and below 1")
        check_fields(self, "failing_seconds", lambda v: v >= 0, "must be at least 0")
        check_fields(self, "confidence", lambda v: 0 < v < 1, "must be above 0 and below 1")
        check_grouping(self.grouping)
        check_start(self.start)

    @abstractmethod
    def learn(self, probabilities: Floats, samples: Samples, allowed: Bools) -> Update | None:
        """Returns the next distribution, from all samples up to now; None if there is nothing to learn yet."""

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields batches of samples; ends when all probabilities are 0 or 1 and will stay so."""
        blocks = Blocks.of(problem, self.grouping)
        known = yield from begin(problem, self.start, self.start_evaluations, rng)
        known = None if known is None else blocks.contract(known)
        probabilities = maths.initial_probabilities(blocks.allowed, known, self.confidence)
        samples = Samples(np.zeros((0, blocks.num_blocks), np.int64), np.zeros(0))
        notes: dict[str, Any] = {}  # of the last update
        updates = 0
        while not self._is_settled(probabilities, samples.count, blocks.allowed):
            placements = maths.draw_placements(probabilities, self.batch, rng)
            evaluation = yield Proposal(blocks.expand(placements), notes=notes)
            seconds = maths.times(evaluation, self.failing_seconds)
            maths.check_finite(seconds, self.name, updates + 1)
            samples = samples.add(placements, seconds, self.baseline_decay, self._kept)
            update = self.learn(probabilities, samples, blocks.allowed)
            if update is not None:
                updates += 1
                probabilities = update.probabilities
                maths.check_finite(probabilities, self.name, updates)
                notes = {"update": updates, "loss": update.loss, **_notes(probabilities, samples, seconds)}
        yield Proposal(blocks.expand(maths.draw_placements(probabilities, 1, rng)), notes=notes)

    @property
    def _kept(self) -> int:
        return self.batch

    def _is_settled(self, probabilities: Floats, count: int, allowed: Bools) -> bool:
        """Returns whether the table can only give one placement after `count` samples."""
        has_choice = (allowed.sum(axis=1) > 1) & (self._epsilon(count) > 0)
        return bool(((probabilities.max(axis=1) == 1.0) & ~has_choice).all())

    def _epsilon(self, count: int) -> float:
        """Returns the weight of the uniform distribution that is mixed in after `count` samples."""
        return 0.0


@dataclass(frozen=True)
class _Gradient(_Table):
    """A table that follows the advantages of its samples."""

    rate: float = 1.0  # alpha
    advantage: Advantage = "relative"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "rate", lambda v: v > 0, "must be above 0")

    def _gain(self, samples: Samples) -> tuple[Ints, Floats]:
        """Returns the last batch: its placements [batch, blocks] and advantages / batch [batch]."""
        placements, seconds = samples.placements[-self.batch :], samples.seconds[-self.batch :]
        assert samples.baseline is not None
        return placements, maths.advantages(seconds, samples.baseline, self.advantage) / len(seconds)


@dataclass(frozen=True)
class PolicyGradient(_Gradient):
    """REINFORCE on the table (Williams 1992), the policy gradient of Post's paper."""

    name: ClassVar[str] = "policy-gradient"

    def learn(self, probabilities: Floats, samples: Samples, allowed: Bools) -> Update:
        """Takes one step along the gradient of the expected advantage."""
        placements, weights = self._gain(samples)
        chosen = maths.tally(placements, weights, allowed.shape[1])  # [blocks, devices]
        gradient = chosen - weights.sum() * probabilities
        loss = -float(weights @ maths.log_probabilities(probabilities, placements))
        return Update(maths.softmax(maths.logits_of(probabilities) + self.rate * gradient), loss)


@dataclass(frozen=True)
class _Proximal(_Gradient):
    """A table that can ascend Eq. 11."""

    ascent_steps: int = 10
    kl_weight: float = 1.0  # beta

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "ascent_steps", lambda v: v >= 1, "must be at least 1")
        check_fields(self, "kl_weight", lambda v: v >= 0, "must be at least 0")

    def _ascend(self, probabilities: Floats, samples: Samples) -> Update:
        """Maximises Eq. 11, starting from the current distribution."""
        placements, weights = self._gain(samples)
        gain = maths.tally(placements, weights, probabilities.shape[1])
        gain = np.divide(gain, probabilities, out=np.zeros_like(gain), where=probabilities > 0)
        logits, new = maths.logits_of(probabilities), probabilities
        for _ in range(self.ascent_steps):
            logits = logits + self.rate * maths.ppo_gradient(new, probabilities, gain, self.kl_weight)
            new = maths.softmax(logits)
        return Update(new, -maths.ppo_objective(new, probabilities, gain, self.kl_weight))


@dataclass(frozen=True)
class Ppo(_Proximal):
    """Proximal policy optimisation with a KL penalty of fixed weight, without clipping (Post, Eq. 11)."""

    name: ClassVar[str] = "ppo"

    def learn(self, probabilities: Floats, samples: Samples, allowed: Bools) -> Update:
        """Maximises Eq. 11 after every batch."""
        return self._ascend(probabilities, samples)


@dataclass(frozen=True)
class _Elites(_Table):
    """A table that can imitate its best samples."""

    elite_batch: int = 60  # N
    elite_share: float = 0.1  # rho
    mixing: float = 0.1  # epsilon at first
    evaluations: int = 2400  # L, until epsilon is 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"must be a multiple of batch ({self.batch})"
        check_fields(self, "elite_batch", lambda v: v >= 1 and v % self.batch == 0, rule)
        check_fields(self, "elite_share", lambda v: 0 < v <= 1, "must be above 0 and at most 1")
        check_fields(self, "mixing", lambda v: 0 <= v <= 1, "must be at least 0 and at most 1")
        check_fields(self, "evaluations", lambda v: v >= 1, "must be at least 1")

    @property
    def _kept(self) -> int:
        return self.elite_batch

    def _imitate(self, samples: Samples, allowed: Bools) -> Update:
        """Minimises Eq. 9 by Theorem 1, and mixes in the uniform distribution."""
        promising = maths.elites(samples.placements, samples.seconds, self.elite_share)
        probabilities = maths.shares(promising, allowed.shape[1])
        loss = -float(maths.log_probabilities(probabilities, promising).sum()) / len(samples.seconds)
        return Update(maths.mix(probabilities, allowed, self._epsilon(samples.count)), loss)

    def _epsilon(self, count: int) -> float:
        return self.mixing * max(1.0 - count / self.evaluations, 0.0)


@dataclass(frozen=True)
class CrossEntropy(_Elites):
    """Cross-entropy minimisation alone: the distribution becomes that of the best samples (Rubinstein 1999; Post, Eq. 9)."""

    name: ClassVar[str] = "cross-entropy"

    def learn(self, probabilities: Floats, samples: Samples, allowed: Bools) -> Update | None:
        """Imitates the best tenth of every 60 samples."""
        return self._imitate(samples, allowed) if samples.count % self.elite_batch == 0 else None


@dataclass(frozen=True)
class Post(_Elites, _Proximal):
    """Cross-entropy minimisation after every N samples, proximal steps after every K between them (Post, Algorithm 1)."""

    name: ClassVar[str] = "post"

    def learn(self, probabilities: Floats, samples: Samples, allowed: Bools) -> Update:
        """Imitates or ascends, by Algorithm 1: if both are due, only cross-entropy."""
        if samples.count % self.elite_batch == 0:
            return self._imitate(samples, allowed)
        return self._ascend(probabilities, samples)


def _notes(probabilities: Floats, samples: Samples, seconds: Floats) -> dict[str, float]:
    """Returns the notes for a learning curve; the entropy is the mean over the blocks, in nats."""
    return {
        "entropy": float(maths.entropy(probabilities).mean()),
        "baseline": float(samples.baseline or 0.0),
        "average_seconds": float(seconds.mean()),
        "best_seconds": samples.best_seconds,
    }
