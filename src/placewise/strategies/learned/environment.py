"""Spotlight's decision process as a Gymnasium environment, for other people's agents.

Gao, Chen, Li: Spotlight: Optimizing Device Placement for Training Deep Neural Networks. ICML 2018, §3.
"""

from typing import Any

import gymnasium
import numpy as np

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluator
from placewise.core.errors import ProblemError
from placewise.core.problem import Problem
from placewise.strategies.blocks import Blocks


class Placing(gymnasium.Env[Ints, np.int64]):
    """Places one block at each stage; an episode is a placement, which the evaluator judges at the end.

    The observation is the placement so far: [blocks], 0 for a block that is not placed yet, else its device + 1. The action
    is the next block's device; `info["action_mask"]` has the devices that it can run on, and any other device means the
    lowest of these. The reward is 0 except at the last stage: the mean cost of all earlier episodes - this one's, and 0 for
    the first episode. The last `info` of an episode has its `cost`, `step_seconds`, `fits` and `placement` [groups].
    """

    def __init__(self, problem: Problem, evaluator: Evaluator, grouping: str = "name-prefix:2") -> None:
        self._blocks = Blocks.of(problem, grouping)
        if not self._blocks.num_blocks:
            raise ProblemError(f"graph {problem.graph.name!r} has nothing to place, so there is nothing to decide")
        self._evaluator = evaluator
        self.observation_space = gymnasium.spaces.MultiDiscrete([problem.num_devices + 1] * self._blocks.num_blocks)
        self.action_space = gymnasium.spaces.Discrete(problem.num_devices)
        self._devices: list[int] = []  # of the blocks that are placed so far
        self._episodes, self._total_cost = 0, 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Ints, dict[str, Any]]:
        """Begins an episode; earlier ones still count in its reward. Nothing here is random."""
        super().reset(seed=seed)
        self._devices = []
        return self._observation(), self._information()

    def step(self, action: np.int64) -> tuple[Ints, float, bool, bool, dict[str, Any]]:
        """Places the next block, and judges the placement if it was the last block."""
        allowed = self._blocks.allowed[len(self._devices)]
        self._devices.append(int(action) if allowed[action] else int(allowed.argmax()))
        if len(self._devices) < self._blocks.num_blocks:
            return self._observation(), 0.0, False, False, self._information()
        placement = self._blocks.expand(np.array([self._devices], np.int64))
        evaluation = self._evaluator(placement)
        cost = float(evaluation.cost[0])
        reward = self._total_cost / self._episodes - cost if self._episodes else 0.0
        self._episodes, self._total_cost = self._episodes + 1, self._total_cost + cost
        judged = {"cost": cost, "step_seconds": float(evaluation.step_seconds[0]), "placement": placement[0]}
        judged["fits"] = bool(evaluation.overflow_bytes[0] == 0)
        return self._observation(), reward, True, False, {**self._information(), **judged}

    def _observation(self) -> Ints:
        seen = np.zeros(self._blocks.num_blocks, np.int64)
        seen[: len(self._devices)] = np.array(self._devices, np.int64) + 1
        return seen

    def _information(self) -> dict[str, Any]:
        stage = min(len(self._devices), self._blocks.num_blocks - 1)
        return {"action_mask": self._blocks.allowed[stage].astype(np.int8)}
