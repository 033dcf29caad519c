"""What a recorded step assumes about the model besides its tensors; every step checks that it still holds."""

import inspect
from collections.abc import Collection
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from placewise.core.errors import CaptureError, StepChanged
from placewise.graph_capture.module_attributes import HOOKS, INTERNAL, read_names
from placewise.graph_capture.python_values import PythonValues
from placewise.graph_capture.training_step import StepModules

GLOBAL_HOOKS = tuple(getattr(torch_modules, f"_global{name}") for name in HOOKS)

_training, _requires_grad = attrgetter("training"), attrgetter("requires_grad")  # as fast as a loop gets

_hooks_of = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")

UPDATE_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class ModelGuard:
    """Which modules a model has, their modes, parameters, hooks and plain attributes, and what the optimizer updates.

    Of the attributes only those count that the code of some module mentions: a counter that a training loop keeps in the
    model may change. `PythonValues` has what the code reads elsewhere.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Any, *, optimizer: Optimizer | None = None,
        changing: Collection[tuple[nn.Module, str]] = (),
    ) -> None:  # fmt: skip
        """Looks at a model, its loss and its optimizer; `changing` are attributes of modules that steps change."""
        self._read = PythonValues(model, loss_fn, changing=changing)
        models = {"": model, "the loss": loss_fn} if isinstance(loss_fn, nn.Module) else {"": model}
        known = {id(module) for owner in models.values() for module in owner.modules()}
        self._modules = [
            (".".join(filter(None, (prefix, name))), module)
            for prefix, owner in {**models, **self._read.modules}.items()
            for name, module in owner.named_modules(remove_duplicate=False)
            if prefix in models or id(module) not in known
        ]
        modules = [module for _, module in self._modules]
        self._only_modules, self._attributes = modules, [vars(module) for module in modules]
        self._children = [(module._modules, key) for module in modules for key in module._modules]
        self._child_names = [f"{name}.{key}" if name else key for name, module in self._modules for key in module._modules]
        self._found = [children[key] for children, key in self._children]
        self._tables = [module._modules for module in modules]
        self._is_training = [module.training for module in modules]
        self._forwards = [attributes.get("forward") for attributes in self._attributes]
        self._parameters = [
            (f"{name}.{key}" if name else key, parameter)
            for name, module in self._modules
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._places = [
            (module._parameters, key)
            for _, module in self._modules
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._only_parameters = [parameter for _, parameter in self._parameters]
        self._is_trained = [parameter.requires_grad for parameter in self._only_parameters]
        self._optimizer = optimizer
        self._updated = self._present_updated()
        self._hook_tables = [(name or "the model", getattr(m, kind)) for name, m in self._modules for kind in HOOKS]
        self._hook_tables += [("all modules", hooks) for hooks in GLOBAL_HOOKS]
        if optimizer is not None:
            self._hook_tables += [("the optimizer", getattr(optimizer, kind)) for kind in UPDATE_HOOKS]
            self._hook_tables += [
                ("all optimizers", hooks) for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
            ]
        self._hooks = [tuple(hooks) for _, hooks in self._hook_tables]
        self._only_hooks = [hooks for _, hooks in self._hook_tables]
        self._hook_numbers = list(chain.from_iterable(self._hooks))
        self._no_tensor_hooks: list[tuple[Any, ...]] = [()] * len(self._parameters)
        self._tensor_hooks = self._present_tensor_hooks()
        names = (read_names(module for _, module in self._modules) | self._read.names) - INTERNAL
        self._settings = [
            (vars(module), key, f"{name}.{key}" if name else key)
            for name, module in self._modules
            for key, value in vars(module).items()
            if key in names and (value is None or type(value) in (bool, int, float, str)) and (module, key) not in changing
        ]
        if optimizer is not None:
            self._settings += [
                (vars(optimizer), key, f"the optimizer's {key}")
                for key, value in vars(optimizer).items()
                if type(value) in (bool, int, float, str) and not key.startswith("_")
            ]
        self._values = [settings[key] for settings, key, _ in self._settings]

    def check(self) -> None:
        """Raises StepChanged if the model's step is not the recorded one any more."""
        present = list(chain.from_iterable(map(dict.values, self._tables)))
        if len(present) != len(self._found) or not all(map(is_, present, self._found)):
            present = [children.get(key) for children, key in self._children]
            for name, module, known in zip(self._child_names, present, self._found, strict=True):
                if module is not known:
                    raise _changed(f"the module {name!r} was replaced")
            raise _changed("the model has other modules now")
        if (modes := list(map(_training, self._only_modules))) != self._is_training:
            changed = next(i for i, mode in enumerate(modes) if mode != self._is_training[i])
            name, mode = self._modules[changed][0] or "the model", "train" if modes[changed] else "eval"
            raise _changed(f"{name} is in {mode} mode now")
        parameters = [table.get(key) for table, key in self._places]
        if not all(map(is_, parameters, self._only_parameters)):
            for parameter, (name, known) in zip(parameters, self._parameters, strict=True):
                if parameter is not known and (
                    parameter is None or not parameter.is_meta
                ):  # one without values is refused later
                    raise _changed(f"the parameter {name} was replaced")
        if (trained := list(map(_requires_grad, self._only_parameters))) != self._is_trained:
            changed = next(i for i, is_trained in enumerate(trained) if is_trained != self._is_trained[i])
            raise _changed(f"requires_grad of {self._parameters[changed][0]} is {trained[changed]} now")
        if (values := [settings.get(key) for settings, key, _ in self._settings]) != self._values:
            changed = next(i for i, value in enumerate(values) if value != self._values[i])
            raise _changed(f"{self._settings[changed][2]} is {values[changed]!r} now and was {self._values[changed]!r}")
        forwards = [attributes.get("forward") for attributes in self._attributes]
        if forwards != self._forwards:
            changed = next(i for i, forward in enumerate(forwards) if forward != self._forwards[i])
            raise _changed(f"forward of {self._modules[changed][0] or 'the model'} was replaced")
        if change := self._read.change():
            raise _changed(change)
        self._check_hooks()
        if self._present_updated() != self._updated:
            raise _changed("the optimizer has other parameters now")

    def _check_hooks(self) -> None:
        """Raises StepChanged if hooks were added or removed; PyTorch numbers them, and no number comes twice."""
        is_changed = (
            list(chain.from_iterable(self._only_hooks)) != self._hook_numbers
            if self._hook_numbers
            else any(self._only_hooks)
        )
        if is_changed:
            owner = next(
                name for (name, hooks), known in zip(self._hook_tables, self._hooks, strict=True) if tuple(hooks) != known
            )
            raise _changed(f"{owner} has other hooks now")
        if (present := self._present_tensor_hooks()) != self._tensor_hooks:
            changed = next(i for i, hooks in enumerate(present) if hooks != self._tensor_hooks[i])
            raise _changed(f"{self._parameters[changed][0]} has other hooks now")

    def _present_tensor_hooks(self) -> list[tuple[Any, ...]]:
        """Returns the numbers of the hooks on each parameter."""
        if not any(chain.from_iterable(map(_hooks_of, self._only_parameters))):
            return self._no_tensor_hooks
        return [(*(first or ()), *(second or ())) for first, second in map(_hooks_of, self._only_parameters)]

    def _present_updated(self) -> list[list[int]]:
        """Returns which parameters each group of the optimizer has."""
        groups = self._optimizer.param_groups if self._optimizer is not None else ()
        return [list(map(id, group["params"])) for group in groups]


def _changed(what: str) -> StepChanged:
    return StepChanged(f"{what}, and the captured step was another one: undo it, or capture and compile the step again")


def refuse_hooks(modules: StepModules, optimizer: Optimizer) -> None:
    """Refuses hooks that a recording would leave out: the optimizer's, and those that run when gradients are ready.

    An optimizer that must be given a closure calls the model itself, as often as it likes.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise CaptureError(f"{type(optimizer).__name__} needs a closure and calls the model itself, which can't be recorded")
    for kind, hooks in (
        ("step pre-hook", {**_global_optimizer_pre_hooks, **optimizer._optimizer_step_pre_hooks}),
        ("step post-hook", {**_global_optimizer_post_hooks, **optimizer._optimizer_step_post_hooks}),
    ):
        for hook in hooks.values():
            raise CaptureError(f"the optimizer has a {kind} ({_name(hook)}), which can't be recorded: remove it")
    for name, parameter in modules.named_parameters():
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            raise CaptureError(f"{name} has a post-accumulate-grad hook ({_name(hook)}), which can't be recorded: remove it")


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))
