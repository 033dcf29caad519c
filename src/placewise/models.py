"""MODEL on the command line: a zoo model with options, a graph file, package.module:function or path/to/file.py:function.

fused:MODEL, which --fuse stands for, is that model with chains of small ops as one op each.
"""

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from placewise import zoo
from placewise.core.errors import InputError, ModelError, one_line
from placewise.core.graph import Graph
from placewise.core.suggestions import did_you_mean
from placewise.formats.files import check_regular, parse_json, read_bytes

if TYPE_CHECKING:
    from placewise.graph_capture.capture import CapturedStep
    from placewise.graph_capture.training_step import TrainingStep

FUNCTION = re.compile(r"([A-Za-z_][\w.]*|.+\.py):([A-Za-z_]\w*)")

FUSED = "fused:"

OTHER_FILES = {"placewise-plan": "a plan", "placewise-profile": "a profile"}  # by format


def is_zoo_model(model: str) -> bool:
    """Returns whether MODEL names a model of the zoo: loading it runs no code of the user's."""
    return model.removeprefix(FUSED).partition(":")[0] in zoo.MODELS


def names_code(model: str) -> bool:
    """Returns whether MODEL is a function of the user's, which loading it imports and calls."""
    return not is_zoo_model(model) and FUNCTION.fullmatch(model.removeprefix(FUSED)) is not None


def load_graph(model: str) -> Graph:
    """Returns the graph of a model; a graph file is read without loading torch."""
    if _is_file(model):
        from placewise.formats.importers import read_any_graph

        return read_any_graph(model)
    found = _build(model)
    return found if isinstance(found, Graph) else found.graph


def load_step(model: str, device: str = "meta") -> "CapturedStep":
    """Returns the captured step of a model; a graph file does not have one.

    Tensors on the meta device, the default, have no values; use a real device ("cpu") for a step that will be run.
    """
    if _is_file(model):
        raise ModelError(f"{model}: is {_kind_of(model)}")
    found = _build(model, device)
    if isinstance(found, Graph):
        raise ModelError(f"model {model!r}: returns a graph, which can't be run: return the step to capture")
    return found


def check_name(model: str) -> None:
    """Refuses what names no step that can be run; neither calls a user's function nor captures a step."""
    plain = model.removeprefix(FUSED)
    if _is_file(plain):
        raise ModelError(f"{plain}: is {_kind_of(plain)}")
    if is_zoo_model(plain):
        zoo.build_step(plain)
    elif function := FUNCTION.fullmatch(plain):
        with _importable(function[1]):
            _find(plain, function[1], function[2])
    else:
        _refuse(plain)


def _kind_of(path: str) -> str:
    """Returns what a file is that can't be run, and what is needed instead."""
    try:
        data = parse_json(path, read_bytes(path, ModelError), ModelError)
    except ModelError:
        data = None
    if what := OTHER_FILES.get(str(data.get("format")) if isinstance(data, dict) else ""):
        return (
            f"{what}, but MODEL must be a zoo model with options (nmt:layers=4), package.module:function or "
            "path/to/file.py:function"
        )
    return "a graph file, which can't be run: name the model that it was captured from"


def _is_file(model: str) -> bool:
    return not is_zoo_model(model) and not model.endswith(".py") and os.path.isfile(model)


def _build(model: str, device: str = "meta") -> "CapturedStep | Graph":
    if model.startswith(FUSED):
        return _fused(model, device)
    if is_zoo_model(model):
        step = zoo.build_step(model, device)
    elif function := FUNCTION.fullmatch(model):
        step = _call(model, function[1], function[2], device)
    else:
        _refuse(model)
    return _captured(step, model)


def _refuse(model: str) -> NoReturn:
    """Says what is wrong with what is no model."""
    if model.endswith(".py"):
        raise ModelError(f"{model}: name the function that returns the step, as in {model}:step")
    if os.path.exists(model):
        check_regular(model, os.stat(model), ModelError)
    raise ModelError(
        f"{model}: is neither a file, nor a function (package.module:function or path/to/file.py:function), nor a "
        f"model of the zoo: {did_you_mean(model.partition(':')[0], zoo.MODELS)}"
    )


def _fused(model: str, device: str) -> "CapturedStep":
    from placewise.rewrite.rewritten_steps import FUSE, rewrite

    plain = model.removeprefix(FUSED)
    if _is_file(plain):
        raise ModelError(f"{plain}: a file can't be fused: fuse the model when you capture it (placewise capture --fuse)")
    found = _build(plain, device)
    if isinstance(found, Graph):
        raise ModelError(f"model {plain!r}: returns a graph, which can't be fused: return the step to capture")
    fused = rewrite(found, [FUSE])
    return replace(fused, graph=replace(fused.graph, name=model))


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


def _call(model: str, module_name: str, function_name: str, device: str) -> Any:
    """Returns what the user's function returns, called with this default device: on meta it allocates nothing."""
    import torch

    with _importable(module_name):
        function = _find(model, module_name, function_name)
        with _blamed(model), torch.device(device):
            return function()


def _find(model: str, module_name: str, function_name: str) -> Any:
    """Returns the user's function."""
    with _blamed(model):
        module = _load_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
        if not hasattr(module, function_name):
            functions = [name for name, value in vars(module).items() if callable(value)]
            hint = did_you_mean(function_name, functions) if functions else "it has no functions"
            raise ModelError(f"model {model!r}: there is no function {function_name!r} in {module_name}: {hint}")
        return getattr(module, function_name)


@contextmanager
def _blamed(model: str) -> Iterator[None]:
    """Says of what the user's code raises which model it was."""
    try:
        yield
    except InputError:
        raise
    except Exception as problem:
        reason = f"{type(problem).__name__}: {one_line(problem)}{_line_of(problem)}{_cause_of(problem)}"
        raise ModelError(f"model {model!r}: {reason}") from problem


@contextmanager
def _importable(module_name: str) -> Iterator[None]:
    """Lets a module of the current folder be imported, or by a file its neighbours, as if the file were run as a script.

    Later the file's folder is the last that is searched, here and in processes that we start: a neighbour may be called
    json.py.
    """
    if not module_name.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        yield
        return
    folder = os.path.dirname(os.path.realpath(module_name))
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


def _load_file(path: str) -> ModuleType:
    """Returns the module of a file; it is loaded once, under its full path if its name is taken."""
    if not os.path.isfile(path):
        raise ModelError(f"{path}: there is no such file")
    path = os.path.realpath(path)
    name = os.path.basename(path).removesuffix(".py")
    for module in (sys.modules.get(name), sys.modules.get(path)):
        if module is not None and getattr(module, "__file__", None) == path:
            return module
    spec = importlib.util.spec_from_file_location(path if name in sys.modules else name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _cause_of(problem: BaseException) -> str:
    """Returns what an error was raised from, at first: libraries that import late only say what they could not import."""
    first = problem
    while first.__cause__ is not None:
        first = first.__cause__
    return f"; the cause: {type(first).__name__}: {one_line(first)}" if first is not problem else ""


def _line_of(problem: BaseException) -> str:
    """Returns where in the user's code it happened."""
    from placewise.graph_capture.capture import user_frame

    place = user_frame(problem)
    return f" ({place})" if place else ""


def load_training_step(model: str) -> "TrainingStep | None":
    """Returns the step of a model before it is captured, on the meta device; None for a graph, or a file of one."""
    from placewise.graph_capture.capture import CapturedStep
    from placewise.graph_capture.training_step import TrainingStep

    plain = model.removeprefix(FUSED)
    if _is_file(plain):
        return None
    found: Any
    if is_zoo_model(plain):
        found = zoo.build_step(plain)
    elif function := FUNCTION.fullmatch(plain):
        found = _call(plain, function[1], function[2], "meta")
    else:
        return None
    if isinstance(found, CapturedStep):
        found = found.step
    if isinstance(found, tuple) and len(found) in (4, 5):
        found = TrainingStep(*found)
    if not isinstance(found, TrainingStep):
        return None
    return replace(found, fuse=True) if model.startswith(FUSED) else found


def in_bfloat16(step: "TrainingStep") -> "TrainingStep":
    """Returns a step with autocast in bfloat16."""
    import torch

    return replace(step, autocast=torch.bfloat16)


def with_twice_the_batch(step: "TrainingStep") -> "TrainingStep | None":
    """Returns a step whose batch has each of its tensors twice; None if the tensors have different numbers of rows."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    tensors = [leaf for leaf in tree_leaves(step.batch) if isinstance(leaf, torch.Tensor)]
    if len({tensor.shape[:1] for tensor in tensors}) != 1 or not tensors[0].ndim:
        return None
    twice = tree_map(lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, torch.Tensor) else leaf, step.batch)
    return replace(step, batch=twice)
