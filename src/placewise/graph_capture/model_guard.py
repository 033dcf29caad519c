"""What a recorded step assumes about the model besides its tensors; every step checks that it still holds."""

import inspect
from collections.abc import Collection
from itertools import chain
from operator import is_
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from placewise.core.errors import CaptureError, StepChanged
from placewise.graph_capture.module_attributes import HOOKS, INTERNAL, read_names
from placewise.graph_capture.python_values import PythonValues
from placewise.graph_capture.training_step import StepModules

GLOBAL_HOOKS = tuple(getattr(torch_modules, f"_global{name}") for name in HOOKS)

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
        self._children = [(module._modules, key) for _, module in self._modules for key in module._modules]
        self._child_names = [f"{name}.{key}" if name else key for name, module in self._modules for key in module._modules]
        self._found = [children[key] for children, key in self._children]
        self._num_children = [len(module._modules) for _, module in self._modules]
        self._is_training = [module.training for _, module in self._modules]
        self._forwards = [vars(module).get("forward") for _, module in self._modules]
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
        self._is_trained = [parameter.requires_grad for _, parameter in self._parameters]
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
        self._hook_numbers = list(chain.from_iterable(self._hooks))
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
        present = [children.get(key) for children, key in self._children]
        if not all(map(is_, present, self._found)):
            changed = next(i for i, module in enumerate(present) if module is not self._found[i])
            raise _changed(f"the module {self._child_names[changed]!r} was replaced")
        if [len(module._modules) for _, module in self._modules] != self._num_children:
            raise _changed("the model has other modules now")
        if (modes := [module.training for _, module in self._modules]) != self._is_training:
            changed = next(i for i, mode in enumerate(modes) if mode != self._is_training[i])
            name, mode = self._modules[changed][0] or "the model", "train" if modes[changed] else "eval"
            raise _changed(f"{name} is in {mode} mode now")
        parameters = [table.get(key) for table, key in self._places]
        for parameter, (name, known) in zip(parameters, self._parameters, strict=True):
            if parameter is not known and (
                parameter is None or not parameter.is_meta
            ):  # one without values is refused later
                raise _changed(f"the parameter {name} was replaced")
        if (trained := [parameter.requires_grad for _, parameter in self._parameters]) != self._is_trained:
            changed = next(i for i, is_trained in enumerate(trained) if is_trained != self._is_trained[i])
            raise _changed(f"requires_grad of {self._parameters[changed][0]} is {trained[changed]} now")
        if (values := [settings.get(key) for settings, key, _ in self._settings]) != self._values:
            changed = next(i for i, value in enumerate(values) if value != self._values[i])
            raise _changed(f"{self._settings[changed][2]} is {values[changed]!r} now and was {self._values[changed]!r}")
        forwards = [vars(module).get("forward") for _, module in self._modules]
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
        if list(chain.from_iterable([hooks for _, hooks in self._hook_tables])) != self._hook_numbers:
            owner = next(
                name for (name, hooks), known in zip(self._hook_tables, self._hooks, strict=True) if tuple(hooks) != known
            )
            raise _changed(f"{owner} has other hooks now")
        if (present := self._present_tensor_hooks()) != self._tensor_hooks:
            changed = next(i for i, hooks in enumerate(present) if hooks != self._tensor_hooks[i])
            raise _changed(f"{self._parameters[changed][0]} has other hooks now")

    def _present_tensor_hooks(self) -> list[tuple[Any, ...]]:
        """Returns the numbers of the hooks on each parameter."""
        return [
            (*(parameter._backward_hooks or ()), *(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()))
            for _, parameter in self._parameters
        ]

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
