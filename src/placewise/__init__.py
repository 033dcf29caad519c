"""Finds where each operation of a neural network's training step should run on a mix of CPUs and GPUs."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from placewise.core.cluster import Cluster as Cluster
    from placewise.core.errors import PlacewiseError as PlacewiseError
    from placewise.core.graph import Graph as Graph
    from placewise.core.plan import Plan as Plan
    from placewise.core.problem import Problem as Problem
    from placewise.graph_capture.capture import capture as capture
    from placewise.graph_capture.capture import capture_inference as capture_inference
    from placewise.search.planner import place as place
    from placewise.simulate.simulator import Simulator as Simulator

__version__ = "0.1.0"

__all__ = ["Cluster", "Graph", "PlacewiseError", "Plan", "Problem", "Simulator", "capture", "capture_inference", "place"]

_MODULES = {  # public name -> its module, imported on first use: importing placewise loads nothing heavy
    "Cluster": "placewise.core.cluster",
    "Graph": "placewise.core.graph",
    "PlacewiseError": "placewise.core.errors",
    "Plan": "placewise.core.plan",
    "Problem": "placewise.core.problem",
    "Simulator": "placewise.simulate.simulator",
    "capture": "placewise.graph_capture.capture",
    "capture_inference": "placewise.graph_capture.capture",
    "place": "placewise.search.planner",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'placewise' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
