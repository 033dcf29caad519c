"""Strategies propose placements: a file or a folder for each family, and the one dict of all of them, STRATEGIES."""

import dataclasses
import importlib
import math
import typing
from dataclasses import dataclass
from typing import Any

from placewise.core.contracts import Strategy
from placewise.core.errors import StrategyError
from placewise.core.suggestions import did_you_mean
from placewise.formats.files import describe

__all__ = ["FAMILIES", "STRATEGIES", "Listing", "make", "names_of", "parameters"]


@dataclass(frozen=True)
class Listing:
    """Where a strategy is ('module:Class' in this package), its family, and what it does in one line."""

    location: str
    family: str
    summary: str


MOST = 10**9  # of a whole number that is a hyper-parameter

FAMILIES = ("own", "classical", "exact", "learned")

STRATEGIES: dict[str, Listing] = {
    "auto": Listing("auto.auto:Auto", "own", "a portfolio of starts, then annealed walks in the simulator (the default)"),
    "cpu-only": Listing("single_device:CpuOnly", "classical", "everything on the CPU"),
    "gpu-only": Listing(
        "single_device:GpuOnly",
        "classical",
        "everything on the best GPU that it fits on; ops without a GPU kernel on the CPU",
    ),
    "random": Listing("sampling:Random", "classical", "a random device for every group"),
    "even": Listing(
        "sampling:Even", "classical", "a random GPU for every block, learning nothing: the control of the learned"
    ),
    "round-robin": Listing("single_device:RoundRobin", "classical", "groups on the devices in turn"),
    "expert": Listing(
        "layers.placers:Expert",
        "classical",
        "the papers' hand-written rules; for other models, contiguous layers balanced by time",
    ),
    "balanced": Listing(
        "layers.placers:Balanced", "classical", "modules in order, balanced by parameter bytes, as Accelerate does"
    ),
    "pipeline": Listing(
        "layers.placers:Pipeline", "classical", "contiguous stages of layers, balanced by time with dynamic programming"
    ),
    "towers": Listing("layers.placers:Towers", "classical", "data parallelism: micro-batch i on GPU i"),
    "hill-climb": Listing("sampling:HillClimb", "classical", "the best of some single changes, unless it is worse"),
    "annealing": Listing("sampling:Annealing", "classical", "single changes, at first worse ones too (simulated annealing)"),
    "genetic": Listing("sampling:Genetic", "classical", "a population that is crossed and mutated (genetic algorithm)"),
    "heft": Listing(
        "list_scheduling.schedulers:Heft", "classical", "ops by upward rank, each where it ends first (Topcuoglu 2002)"
    ),
    "cpop": Listing(
        "list_scheduling.schedulers:Cpop",
        "classical",
        "the critical path on one device, the rest by priority (Topcuoglu 2002)",
    ),
    "critical-path": Listing(
        "list_scheduling.schedulers:CriticalPath",
        "classical",
        "the critical path on the fastest device, the rest balanced by time (Mayer 2017)",
    ),
    "m-topo": Listing(
        "baechi.baechi:MTopo",
        "classical",
        "devices filled in program order, each up to an equal share of memory (Baechi 2020)",
    ),
    "m-etf": Listing(
        "baechi.baechi:MEtf", "classical", "always the op that can start earliest, where it fits (Baechi 2020)"
    ),
    "m-sct": Listing(
        "baechi.baechi:MSct", "classical", "m-etf, with favourite children from a linear program (Baechi 2020)"
    ),
    "metis": Listing("partition:Metis", "classical", "a part for each GPU, with little copying between parts (Metis)"),
    "scotch": Listing("partition:Scotch", "classical", "static mapping to all devices (Scotch)"),
    "mincut": Listing("partition:MinCut", "classical", "static mapping to the GPUs only (Scotch)"),
    "exact": Listing(
        "exact.exact:Exact", "exact", "the best placement and order, with a proof, for steps with few ops (CP-SAT)"
    ),
    "post": Listing(
        "learned.post:Post", "learned", "cross-entropy and proximal steps on a table of probabilities (Post 2018)"
    ),
    "cross-entropy": Listing(
        "learned.post:CrossEntropy", "learned", "Post's first part: imitates the best tenth of the samples"
    ),
    "ppo": Listing("learned.post:Ppo", "learned", "Post's second part: proximal policy optimisation of the table"),
    "policy-gradient": Listing("learned.post:PolicyGradient", "learned", "REINFORCE on Post's table"),
    "colocrl": Listing(
        "learned.colocrl:ColocRL", "learned", "a sequence-to-sequence LSTM, trained by policy gradient (ColocRL 2017)"
    ),
    "spotlight": Listing(
        "learned.spotlight:Spotlight",
        "learned",
        "a sequence-to-sequence LSTM, trained by proximal steps with a KL penalty (Spotlight 2018)",
    ),
    "hdp": Listing("learned.hdp:Hdp", "learned", "a network that groups ops, and one that places the groups (HDP 2018)"),
    "graph-policy": Listing(
        "learned.graph_policy.graph_policy:GraphPolicy",
        "learned",
        "weights that were learned on other graphs and machines place blocks; then its samples evolve",
    ),
}


def names_of(text: str) -> tuple[str, ...]:
    """Returns the names in 'a,b,c'; a family stands for all its strategies, and 'all' for all strategies."""
    names: list[str] = []
    for word in text.split(","):
        family = [n for n, listing in STRATEGIES.items() if word in ("all", listing.family)]
        if not family and word not in STRATEGIES:
            raise StrategyError(f"unknown strategy {word!r}: {did_you_mean(word, (*FAMILIES, 'all', *STRATEGIES))}")
        names += [name for name in family or [word] if name not in names]
    return tuple(names)


def parameters(name: str) -> dict[str, Any]:
    """Returns the hyper-parameters of a strategy with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(_class(name))}


def make(name: str, settings: dict[str, str] | None = None) -> Strategy:
    """Returns the strategy of this name; settings are hyper-parameters as text, which are checked."""
    kind = _class(name)
    fields, types = {f.name: f for f in dataclasses.fields(kind)}, typing.get_type_hints(kind)
    values = {}
    for key, text in (settings or {}).items():
        if key not in fields:
            raise StrategyError(f"strategy {name!r}: unknown parameter {key!r}: {did_you_mean(key, fields)}")
        values[key] = _value(name, key, text, types[key])
    try:
        strategy: Strategy = kind(**values)
        return strategy
    except ValueError as rule:
        raise StrategyError(f"strategy {name!r}: {rule}") from None


def _class(name: str) -> Any:
    if name not in STRATEGIES:
        raise StrategyError(f"unknown strategy {name!r}: {did_you_mean(name, STRATEGIES)}")
    module, _, attribute = STRATEGIES[name].location.partition(":")
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    except ModuleNotFoundError as reason:
        if reason.name is not None and reason.name.partition(".")[0] == "torch":
            raise StrategyError(f"strategy {name!r} needs PyTorch: pip install 'placewise[learned]'") from None
        raise


def _value(name: str, key: str, text: str, kind: Any) -> Any:
    """Returns the text as a value of a field's type: bool, int, float, str, or one of some words (Literal)."""
    choices = (
        typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ("true", "false") if kind is bool else ()
    )
    if choices and text not in choices:
        raise StrategyError(f"strategy {name!r}: {key} must be one of {', '.join(choices)}, it is {text!r}")
    if choices or kind is str:
        return text == "true" if kind is bool else text
    try:
        value = kind(text)
        is_right = abs(value) <= MOST if kind is int else math.isfinite(value)
    except ValueError:
        is_right = False
    if not is_right:
        words = {int: f"a whole number of at most {MOST:,}", float: "a finite number"}
        raise StrategyError(f"strategy {name!r}: {key} must be {words[kind]}, it is {describe(text)}")
    return value
