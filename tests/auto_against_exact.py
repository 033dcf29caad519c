"""auto's walks, compared with exact and the bound on random small problems that exact solves to the proved optimum.

python tests/auto_against_exact.py [PROBLEMS] [SECONDS]    prints how often auto is as good within SECONDS (default: 300 1)
python tests/auto_against_exact.py PROBLEMS SECONDS options    the same for steps with scarce memory and optional ops
"""

import sys
import time
from typing import NamedTuple

import numpy as np
from optional_steps import optional_step
from simulated import random_step

from placewise.bounds.best_bound import bound
from placewise.core.problem import Problem
from placewise.search.budget import Budget
from placewise.search.driver import search
from placewise.simulate.simulator import Simulator
from placewise.strategies import make
from placewise.strategies.auto.auto import Auto

ALIKE = 1e-6  # relative error from the solver's rounding of times


class Comparison(NamedTuple):
    """What was found for one problem."""

    optimum: float  # seconds, infinite if nothing fits
    found: float  # auto's seconds, infinite if it found nothing that fits
    bound: float


def small_step(seed: int) -> Problem:
    """Returns a random step of 6 to 14 ops on 2 to 4 devices; memory may be scarce."""
    return random_step(seed, 6 + seed % 9, 2 + seed % 3, 60, "colocated")[0].problem


def compare(problem: Problem, budget: Budget) -> Comparison | None:
    """Returns what auto finds, with the optimum; None if exact does not prove one."""
    simulator = Simulator(problem, threads=1)
    proposals, notes, optimum = make("exact").search(problem, np.random.default_rng(0)), {}, np.inf
    proposal = next(proposals)
    while True:
        evaluation, notes = simulator(proposal.placements, proposal.orders), dict(proposal.notes)
        fits = evaluation.overflow_bytes == 0
        optimum = min(optimum, float(evaluation.step_seconds[fits].min(initial=np.inf)))
        try:
            proposal = proposals.send(evaluation)
        except StopIteration:
            break
    if notes["status"] not in ("optimal", "infeasible"):
        return None
    outcome = search(problem, Auto(exact_ops=0), simulator, budget=budget, seed=0, bound_seconds=optimum)
    return Comparison(optimum, outcome.step_seconds, bound(problem).seconds)


def main(arguments: list[str]) -> None:
    """Prints the comparison."""
    wanted, seconds = int((*arguments, "300")[0]), float((*arguments[1:], "1")[0])
    draw = (lambda seed: optional_step(seed, 2 + seed % 3, 1 + seed % 3)) if "options" in arguments[2:] else small_step
    rows: list[Comparison] = []
    seed, began = 0, time.monotonic()
    while len(rows) < wanted:
        found = compare(draw(seed), Budget(seconds=seconds, target_gap=ALIKE))
        seed += 1
        if found is not None:
            rows.append(found)
            if not found.found <= found.optimum * (1 + ALIKE):
                print(f"seed {seed - 1}: auto {found.found:.6g} s, optimum {found.optimum:.6g} s", flush=True)
    with np.errstate(invalid="ignore"):
        ratios = np.array([1.0 if row.found == row.optimum else row.found / row.optimum for row in rows])
    over = sum(row.bound > row.optimum * (1 + ALIKE) for row in rows)
    print(f"{len(rows)} problems that exact solves, of {seed}; {time.monotonic() - began:.0f} s")
    print(
        f"auto is as good in {np.mean(ratios <= 1 + ALIKE):.1%} within {seconds:g} s; at worst {ratios.max() - 1:.1%} above"
    )
    print(
        f"auto is within 3% in {np.mean(ratios <= 1.03):.1%}; nothing fits in {sum(np.isinf(row.optimum) for row in rows)}"
    )
    print(f"the bound is above the optimum in {over}")


if __name__ == "__main__":
    main(sys.argv[1:])
