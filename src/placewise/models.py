"""MODEL on the command line: a zoo name with options, a graph file, or package.module:function."""

import importlib
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from placewise import zoo
from placewise.core.errors import InputError, ModelError, one_line
from placewise.core.graph import Graph
from placewise.formats.files import parse_json, read_bytes

if TYPE_CHECKING:
    from placewise.graph_capture.capture import CapturedStep

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

NO_MODELS = {"placewise-plan": "a plan", "placewise-profile": "a profile"}  # by a file's format


def load_graph(model: str) -> Graph:
    """Returns the graph of a model; a file is read without loading torch."""
    if _is_file(model):
        from placewise.formats.importers import read_any_graph

        return read_any_graph(model)
    found = _build(model)
    return found if isinstance(found, Graph) else found.graph


def load_step(model: str, device: str = "meta") -> "CapturedStep":
    """Returns the captured step of a model; a graph file has lost it.

    On the meta device, the default, its tensors have no values; to run it, build it on a real one ("cpu").
    """
    if _is_file(model):
        raise ModelError(f"{model}: is {_kind_of(model)}")
    found = _build(model, device)
    if isinstance(found, Graph):
        raise ModelError(f"model {model!r}: returns a graph, which can't be run: return the step to capture")
    return found


def _kind_of(path: str) -> str:
    """Returns what a file is that is no model, and what is needed."""
    try:
        data = parse_json(path, read_bytes(path, ModelError), ModelError)
    except ModelError:
        data = None
    if what := NO_MODELS.get(str(data.get("format")) if isinstance(data, dict) else ""):
        return f"{what}, MODEL must be a zoo name with options (nmt:layers=4), or package.module:function"
    return "a graph file, which can't be run: name the model that it was captured from"


def _is_file(model: str) -> bool:
    return model.partition(":")[0] not in zoo.MODELS and os.path.isfile(model)


def _build(model: str, device: str = "meta") -> "CapturedStep | Graph":
    if model.partition(":")[0] in zoo.MODELS:
        step = zoo.build_step(model, device)
    elif FUNCTION.fullmatch(model):
        step = _call(model, device)
    else:
        raise ModelError(
            f"{model}: is neither a file, nor package.module:function, nor one of the zoo's models: {', '.join(zoo.MODELS)}"
        )
    return _captured(step, model)


def _captured(step: Any, model: str) -> "CapturedStep | Graph":
    from placewise.graph_capture.capture import CapturedStep, capture_step
    from placewise.graph_capture.training_step import TrainingStep

    if isinstance(step, (CapturedStep, Graph)):
        return step
    if isinstance(step, tuple) and len(step) in (4, 5):
        step = TrainingStep(*step)
    if not isinstance(step, TrainingStep):
        raise ModelError(
            f"model {model!r}: must return (model, loss_fn, optimizer, example_batch), a TrainingStep, "
            f"a captured step or a Graph, it returned a {type(step).__name__}"
        )
    return capture_step(step, model)


def _call(model: str, device: str) -> Any:
    """Returns what the user's function returns, called with this default device: on meta it allocates nothing."""
    import torch

    module_name, _, function_name = model.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        with torch.device(device):
            return function()
    except InputError:
        raise
    except Exception as problem:
        raise ModelError(f"model {model!r}: {type(problem).__name__}: {one_line(problem)}{_line_of(problem)}") from problem


def _line_of(problem: BaseException) -> str:
    """Returns where in the user's code it happened."""
    from placewise.graph_capture.capture import user_frame

    place = user_frame(problem)
    return f" ({place})" if place else ""
