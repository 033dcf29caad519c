"""Finds where each operation of a neural network's training step should run on a mix of CPUs and GPUs."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from placewise.core.cluster import Cluster as Cluster
    from placewise.core.errors import CaptureError as CaptureError
    from placewise.core.errors import ClusterError as ClusterError
    from placewise.core.errors import ExecutionError as ExecutionError
    from placewise.core.errors import GraphError as GraphError
    from placewise.core.errors import InputError as InputError
    from placewise.core.errors import ModelError as ModelError
    from placewise.core.errors import NothingFits as NothingFits
    from placewise.core.errors import OtherBranch as OtherBranch
    from placewise.core.errors import PlacewiseError as PlacewiseError
    from placewise.core.errors import PlanError as PlanError
    from placewise.core.errors import ProblemError as ProblemError
    from placewise.core.errors import ProfileError as ProfileError
    from placewise.core.errors import StepChanged as StepChanged
    from placewise.core.errors import StoreError as StoreError
    from placewise.core.errors import StrategyError as StrategyError
    from placewise.core.errors import WorkerDied as WorkerDied
    from placewise.core.graph import Graph as Graph
    from placewise.core.plan import Plan as Plan
    from placewise.core.problem import Problem as Problem
    from placewise.graph_capture.capture import capture as capture
    from placewise.graph_capture.capture import capture_inference as capture_inference
    from placewise.run.deferred_weights import DeferredWeights as DeferredWeights
    from placewise.run.step.step_result import StepResult as StepResult
    from placewise.search.planner import place as place
    from placewise.simulate.simulator import Simulator as Simulator
    from placewise.training.planned_steps import train_step as train_step

__version__ = "0.1.0"

_ERRORS = (
    "CaptureError", "ClusterError", "ExecutionError", "GraphError", "InputError", "ModelError", "NothingFits",
    "OtherBranch", "PlacewiseError", "PlanError", "ProblemError", "ProfileError", "StepChanged", "StoreError",
    "StrategyError", "WorkerDied",
)  # fmt: skip

_MODULES = {  # public name -> its module, imported on first use: importing placewise loads nothing heavy
    **dict.fromkeys(_ERRORS, "placewise.core.errors"),
    "Cluster": "placewise.core.cluster",
    "DeferredWeights": "placewise.run.deferred_weights",
    "Graph": "placewise.core.graph",
    "Plan": "placewise.core.plan",
    "Problem": "placewise.core.problem",
    "Simulator": "placewise.simulate.simulator",
    "StepResult": "placewise.run.step.step_result",
    "capture": "placewise.graph_capture.capture",
    "capture_inference": "placewise.graph_capture.capture",
    "place": "placewise.search.planner",
    "train_step": "placewise.training.planned_steps",
}

__all__ = [
    "CaptureError", "Cluster", "ClusterError", "DeferredWeights", "ExecutionError", "Graph", "GraphError", "InputError",
    "ModelError", "NothingFits", "OtherBranch", "PlacewiseError", "Plan", "PlanError", "Problem", "ProblemError",
    "ProfileError", "Simulator", "StepChanged", "StepResult", "StoreError", "StrategyError", "WorkerDied", "capture",
    "capture_inference", "place", "train_step",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'placewise' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
