"""Every strategy that only places, for graphs with optional ops: its placements are made to fit."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from placewise.core.contracts import Proposal, Search, Strategy
from placewise.core.problem import NOWHERE, Problem
from placewise.simulate.simulator import Simulator
from placewise.strategies.options.choice_walk import ChoiceModel
from placewise.strategies.options.fit import fit
from placewise.strategies.options.launch_order import with_options
from placewise.strategies.options.streamed import streamed

MOST_FITS = 4  # placements of a batch that are made to fit: the fastest


@runtime_checkable
class Chooses(Protocol):
    """A strategy that chooses among optional ops itself."""

    chooses_options: bool


def made_to_fit(strategy: Strategy, problem: Problem) -> Strategy:
    """Returns the strategy for a problem: itself, or with its placements made to fit if it can't choose optional ops."""
    return strategy if not problem.graph.has_options or isinstance(strategy, Chooses) else Fitted(strategy)


@dataclass(frozen=True, eq=False)
class Fitted:
    """A strategy that places the ops that always run; where they don't fit, optional ops are chosen, else none runs.

    Only placements that would be faster than the best that fits so far are made to fit.
    """

    strategy: Strategy

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the strategy's proposals, made to fit, and passes it their evaluations."""
        always = problem.present(np.where(problem.optional, NOWHERE, 0))
        model, choices, best_seconds = Simulator(always.problem), ChoiceModel(problem), np.inf
        proposals = self.strategy.search(always.problem, rng)
        try:
            proposal = next(proposals)
            while True:
                found = model.simulate(proposal.placements, proposal.orders, keep_orders=True)
                overflows = (found.peak_bytes > problem.cluster.memory_bytes).any(axis=1)
                promising = np.flatnonzero(overflows & (found.step_seconds < best_seconds))
                promising = promising[np.argsort(found.step_seconds[promising], kind="stable")][:MOST_FITS]
                placements = np.stack([always.restore_placement(row) for row in proposal.placements])
                orders = found.orders if len(promising) else proposal.orders
                if orders is not None:
                    orders = np.stack([always.restore_order(np.asarray(order, np.int64)) for order in orders])
                    for row in promising.tolist():
                        order = with_options(problem, orders[row][: always.problem.num_ops])
                        chosen = fit(choices, placements[row], order)
                        if chosen.result.overflow_bytes:
                            chosen = min(chosen, streamed(choices, placements[row], order), key=lambda one: one.key)
                        placements[row], orders[row] = chosen.placement, chosen.order
                evaluation = yield Proposal(placements, orders, proposal.notes)
                fits = evaluation.overflow_bytes == 0
                best_seconds = min(best_seconds, float(evaluation.step_seconds[fits].min(initial=np.inf)))
                proposal = proposals.send(evaluation)
        except StopIteration:
            return
        finally:
            proposals.close()
