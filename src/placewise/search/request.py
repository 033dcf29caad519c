"""A request: what to search and how; and its specification, as a run file records it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from placewise import __version__
from placewise.core.errors import InputError, StoreError
from placewise.core.problem import Problem
from placewise.evaluate.measured import Measure
from placewise.formats.files import Fields
from placewise.machines.slices import Cut, parse_cut
from placewise.search.budget import DEFAULT_EVALUATIONS, Budget
from placewise.search.run_rows import Specification
from placewise.strategies import make, parameters

DEFAULT_STRATEGY = "auto"


@dataclass(frozen=True)
class Request:
    """What to search and how. The names of the model and the cluster are for people, and to load the model for measuring."""

    strategy: str = DEFAULT_STRATEGY
    settings: Mapping[str, str] = field(default_factory=dict)
    budget: Budget = field(default_factory=lambda: Budget(DEFAULT_EVALUATIONS))
    seed: int = 0
    order: str = "priority"
    model: str = ""
    cluster: str = ""
    measure: Measure | None = None  # None: simulate placements
    simple: float = 0.0  # by how much the plan may be slower than the fastest one found, if it is simpler

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise InputError(f"seed must be at least 0, got {self.seed}")


def specify(problem: Problem, request: Request) -> Specification:
    """Returns the specification of a run."""
    return Specification(
        model=request.model,
        cluster=request.cluster,
        problem_digest=problem.digest,
        order=request.order,
        strategy=request.strategy,
        parameters=parameters_of(request),
        seed=request.seed,
        budget=request.budget,
        versions={"placewise": __version__, "numpy": np.__version__},
        measured={} if request.measure is None else request.measure.to_json(),
        simple=request.simple,
    )


def parameters_of(request: Request) -> dict[str, Any]:
    """Returns all hyper-parameters of the requested strategy, including those that were not set."""
    strategy = make(request.strategy, dict(request.settings))
    return {name: getattr(strategy, name) for name in parameters(request.strategy)}


def requested(specification: Specification) -> Request:
    """Returns the request that a specification was made from."""
    s = specification
    measure = _recorded_measure(s.measured) if s.measured else None
    return Request(s.strategy, as_text(s.parameters), s.budget, s.seed, s.order, s.model, s.cluster, measure, s.simple)


def _recorded_measure(given: Mapping[str, Any]) -> Measure:
    """Returns how a run measures, as its file says it."""
    fields = Fields("measured", given, tuple(Measure.__dataclass_fields__), StoreError)
    slices = Fields("measured: virtual", virtual := fields.mapping("virtual"), tuple(virtual), StoreError)
    numbers = {name: fields.integer(name) for name in ("steps", "warm_up")}
    timeout = fields.number("timeout_seconds", above_zero=True)
    cuts: dict[str, Cut] = {}
    for name, cut in virtual.items():
        try:
            cuts[name] = parse_cut(cut) if isinstance(cut, str) else slices.integer(name)
        except ValueError as wrong:
            raise slices.wrong(f"{name} {wrong}") from None
    return Measure(**numbers, timeout_seconds=timeout, virtual=cuts)


def as_text(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Returns hyper-parameters as text, as the command line takes them."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in parameters.items()}
