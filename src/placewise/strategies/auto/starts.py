"""Where walks begin: what other strategies propose at once, and a small population that places coarse blocks."""

from collections.abc import Iterator, Sequence

import numpy as np

from placewise.bounds.dag import alike
from placewise.core.contracts import Evaluation
from placewise.core.errors import StrategyError
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.candidates import Candidate, best_first, best_of, candidates_of
from placewise.strategies.auto.offload import offloads
from placewise.strategies.blocks import Blocks
from placewise.strategies.sampling import Choices, Genetic, single_placements
from placewise.strategies.single_device import accelerators, move_to_allowed

PORTFOLIO = (  # strategies that answer at once
    "gpu-only", "cpu-only", "expert", "pipeline", "towers", "balanced", "metis", "mincut", "m-topo", "m-etf", "heft", "cpop",
)  # fmt: skip
SLOW, FEW_OPS = ("m-sct", "m-etf:ties=breadth", "m-etf:ties=path"), 5000  # at once for steps of at most this many ops
LARGE_STEP = 20_000  # ops of a step of which each start, or population, takes a while

POPULATION = Genetic(population=12, mutations=1.0)
SEEDS = 4  # starts that are in the first generation
PATIENCE = 60  # generations without a better placement, after which a population ends


def portfolio(model: Simulator, rng: np.random.Generator) -> list[Candidate]:
    """Returns what the portfolio's strategies propose, each placement once, the best first.

    Strategies whose packages are not installed are left out.
    """
    *_, found = growing_portfolio(model, rng)
    return found


def growing_portfolio(model: Simulator, rng: np.random.Generator) -> Iterator[list[Candidate]]:
    """Yields the portfolio; for a large step first what there is of it after each strategy."""
    is_large = model.problem.num_ops >= LARGE_STEP
    names = PORTFOLIO + (SLOW if model.problem.num_ops <= FEW_OPS else ())
    candidates: list[Candidate] = []
    for name in names:
        if is_large and name == "gpu-only":
            candidates += _one_device_of_each_class(model)
        else:
            candidates += proposals_of([name], model, rng)
        if is_large and candidates:
            yield best_first(candidates)
    if memory_costs_time(candidates):
        candidates += offloads(model)
    yield best_first(candidates)


def _one_device_of_each_class(model: Simulator) -> list[Candidate]:
    """Returns what `gpu-only` proposes, for one GPU of those that are alike."""
    problem = model.problem
    gpus = accelerators(problem)
    firsts = gpus[np.unique(alike(problem)[gpus], return_index=True)[1]]
    wanted = np.repeat(np.sort(firsts)[:, None], problem.num_groups, axis=1)
    return [Candidate.of(model, placement) for placement in move_to_allowed(problem, wanted)]


def proposals_of(names: Sequence[str], model: Simulator, rng: np.random.Generator) -> Iterator[Candidate]:
    """Yields all that these strategies (NAME or NAME:PARAMETER=VALUE) propose, as far as their packages are installed."""
    from placewise.strategies import make

    for name in names:
        strategy, _, setting = name.partition(":")
        try:
            proposals = make(strategy, dict([setting.split("=")] if setting else [])).search(model.problem, rng)
            proposal = next(proposals)
            while True:
                found, evaluation = candidates_of(model, proposal.placements, proposal.orders)
                yield from found
                proposal = proposals.send(evaluation)
        except (StopIteration, StrategyError):
            continue


def memory_costs_time(candidates: list[Candidate]) -> bool:
    """Returns whether a placement that does not fit is faster than all that do."""
    fitting = [candidate.seconds for candidate in candidates if not candidate.overflow_bytes]
    return min((candidate.seconds for candidate in candidates), default=0.0) < min(fitting, default=np.inf)


def evolve(
    model: Simulator, starts: list[Candidate], grouping: str, most_ops: int, rng: np.random.Generator
) -> Iterator[Candidate]:
    """Yields better and better placements of coarse blocks, from the starts and from everything on one device.

    Each is judged in its own priority order and not in one fixed order as in walks, so it finds other kinds of placements.
    It ends when it has judged `most_ops` ops, or when it has not found anything better for long.
    """
    problem = model.problem
    blocks = Blocks.of(problem, grouping)
    is_large = problem.num_ops >= LARGE_STEP  # of each device alone would take long; the best ones are among the starts
    first = [] if is_large else [blocks.contract(placement) for placement in single_placements(problem)]
    first += [blocks.contract(candidate.placement) for candidate in starts[:SEEDS]]
    search = POPULATION.evolve(Choices.among(blocks.allowed), np.unique(np.stack(first), axis=0), rng)
    best, judged, idle = best_of(starts), 0, 0
    evaluation: Evaluation | None = None
    while judged < most_ops and idle < PATIENCE:
        try:
            proposal = search.send(evaluation)  # type: ignore[arg-type]  # None starts it
        except StopIteration:
            return
        placements = blocks.expand(proposal.placements)
        evaluation = model(placements)
        judged += len(placements) * problem.num_ops
        row = int(evaluation.cost.argmin())
        idle += 1
        if evaluation.cost[row] < best.cost:
            best, idle = Candidate.of(model, placements[row]), 0
            yield best
