"""Where walks begin: what other strategies say at once, and a small population that places coarse blocks."""

from collections.abc import Iterator

import numpy as np

from placewise.core.contracts import Evaluation
from placewise.core.errors import StrategyError
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.offload import offloads
from placewise.strategies.auto.walkers import Stand, best_of, settled
from placewise.strategies.blocks import Blocks
from placewise.strategies.sampling import Choices, Genetic, single_placements

PORTFOLIO = (  # strategies that answer at once
    "gpu-only", "cpu-only", "expert", "pipeline", "towers", "balanced", "metis", "mincut", "m-topo", "m-etf", "heft", "cpop",
)  # fmt: skip

SLOW, FEW_OPS = ("m-sct",), 5000  # those that answer at once only for steps of so few ops

POPULATION = Genetic(population=12, mutations=1.0)

SEEDS = 4

PATIENCE = 60  # generations without a better placement that end it


def portfolio(model: Simulator, rng: np.random.Generator) -> list[Stand]:
    """Returns what the portfolio proposes, each placement once, the best first.

    Strategies whose packages are not installed are left out.
    """
    from placewise.strategies import make

    stands = []
    for name in PORTFOLIO + (SLOW if model.problem.num_ops <= FEW_OPS else ()):
        try:
            proposals = make(name).search(model.problem, rng)
            proposal = next(proposals)
            while True:
                orders = proposal.orders
                for row, placement in enumerate(proposal.placements):
                    order = None if orders is None else orders[row % len(orders)]
                    stands.append(Stand.of(model, placement, order))
                proposal = proposals.send(model(proposal.placements, orders))
        except StopIteration:
            continue
        except StrategyError:
            continue
    if _memory_costs_time(stands):
        stands += offloads(model)
    return settled(stands)


def _memory_costs_time(stands: list[Stand]) -> bool:
    """Returns whether a placement that does not fit is faster than all that fit."""
    fitting = [stand.seconds for stand in stands if not stand.overflow_bytes]
    return min((stand.seconds for stand in stands), default=0.0) < min(fitting, default=np.inf)


def evolve(model: Simulator, starts: list[Stand], grouping: str, most_ops: int, rng: np.random.Generator) -> Iterator[Stand]:
    """Yields better and better placements of few blocks, from the starts and the single devices.

    Each is judged in its own priority order, which walks in one order can't do: it finds another kind of placement. It ends
    when the judged ops are `most_ops`, or when nothing better was found for long.
    """
    problem = model.problem
    blocks = Blocks.of(problem, grouping)
    first = [blocks.contract(placement) for placement in single_placements(problem)]
    first += [blocks.contract(stand.placement) for stand in starts[:SEEDS]]
    search = POPULATION.evolve(Choices.among(blocks.allowed), np.unique(np.stack(first), axis=0), rng)
    best, judged, idle = best_of(starts), 0, 0
    evaluation: Evaluation | None = None
    while judged < most_ops and idle < PATIENCE:
        try:
            proposal = search.send(evaluation)  # type: ignore[arg-type]  # None begins
        except StopIteration:
            return
        placements = blocks.expand(proposal.placements)
        evaluation = model(placements)
        judged += len(placements) * problem.num_ops
        row = int(evaluation.cost.argmin())
        idle += 1
        if evaluation.cost[row] < best.cost:
            best, idle = Stand.of(model, placements[row]), 0
            yield best
