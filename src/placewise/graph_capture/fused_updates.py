"""The update of a parameter as one op, by PyTorch's fused kernel, where the optimizer was made with `fused=True`.

Eager code calls such a kernel once for all parameters. Recorded like this, the call would tie them all to one device. So
each parameter has an op of its own; neighbours on a device are launched together again (run/codegen/launches_together.py),
by the same kernel. The step counter is a tensor on the parameter's device, as in eager code, and the op advances it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.optim import SGD, Adagrad, Adam, Optimizer, adagrad, adam, sgd

from placewise.graph_capture.host_scalars import HostScalar

if TYPE_CHECKING:
    from placewise.graph_capture.recorder import Recorder

GRADIENT = 1  # the position of the gradients among a kernel's lists: it reads them, and writes all others


@dataclass(frozen=True)
class FusedUpdate:
    """The update of one parameter by a fused kernel, which takes lists of tensors."""

    kernel: OpOverload
    has_list: tuple[bool, ...]  # for each of the kernel's lists, whether the optimizer uses it

    flops = None  # PyTorch counts none

    def __str__(self) -> str:
        return f"aten.{self.name}"

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return self.kernel._schema.name.partition("::")[2]

    @property
    def mutated(self) -> frozenset[int]:
        """The positions of the tensors that are written in place."""
        return frozenset(range(sum(self.has_list))) - {GRADIENT}

    def __call__(self, *tensors: Tensor, **numbers: Any) -> tuple[()]:
        """Updates a parameter, given with its gradient and its state."""
        return self.together(*[[tensor] for tensor in tensors], **numbers)

    def together(self, *lists: list[Tensor], **numbers: Any) -> tuple[()]:
        """Updates several parameters: a list of them, one of their gradients, and one for each entry of their state."""
        given = iter(lists)
        lists = tuple([next(given) if is_given else [] for is_given in self.has_list])
        if self.kernel._schema.arguments[len(lists) - 1].name == "state_steps":
            torch._foreach_add_(lists[-1], 1)
        self.kernel._op(*lists, **numbers)
        return ()

    def on_meta(self, *tensors: Tensor, **numbers: Any) -> tuple[()]:
        """Returns what the call would return."""
        return ()

    def runnable(self, *tensors: Tensor, **numbers: Any) -> Callable[[], Any]:
        """Returns the call with real tensors, to be timed."""
        return partial(self, *tensors, **numbers)


_fused_update = cache(FusedUpdate)


def is_fused(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Returns whether an optimizer updates a parameter group by a fused kernel of PyTorch."""
    return bool(group.get("fused")) and isinstance(optimizer, Adam | SGD | Adagrad)


def prepare_fused(optimizer: Optimizer, original: Optimizer) -> None:
    """Makes the copy on the meta device fused where the original is, with its step counters beside the parameters."""
    for group, given in zip(optimizer.param_groups, original.param_groups, strict=True):
        if not is_fused(original, given):
            continue
        group["fused"] = True
        optimizer._need_device_dtype_check_for_fused = False  # type: ignore[attr-defined]  # meta is not supported
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):
                state["step"] = torch.empty((), dtype=torch.float32, device="meta")


@contextmanager
def recorded_fused_updates(recorder: "Recorder") -> Iterator[None]:
    """Records what optimizers would pass to fused kernels as one op for each parameter."""
    with ExitStack() as patches:
        for module, name, update in (
            (adam, "_fused_adam", _adam), (sgd, "_fused_sgd", _sgd), (adagrad, "_fused_adagrad", _adagrad)
        ):  # fmt: skip
            patches.enter_context(patch.object(module, name, partial(update, recorder)))
        yield


def _adam(recorder: "Recorder", *lists: list[Tensor], decoupled_weight_decay: bool, **options: Any) -> None:
    aten = torch.ops.aten
    _record(recorder, aten._fused_adamw_ if decoupled_weight_decay else aten._fused_adam_, lists, options)


def _adagrad(recorder: "Recorder", *lists: list[Tensor], **options: Any) -> None:
    _record(recorder, torch.ops.aten._fused_adagrad_, lists, options)


def _sgd(recorder: "Recorder", parameters: Any, gradients: Any, momenta: Any, **options: Any) -> None:
    given = momenta if options["momentum"] != 0 else []
    _record(recorder, torch.ops.aten._fused_sgd_, (parameters, gradients, given), {**options, "is_first_step": False})


def _record(recorder: "Recorder", kernel: Any, lists: Sequence[list[Tensor]], options: dict[str, Any]) -> None:
    """Records an update for each parameter; `options` may have more than the kernel takes."""
    arguments = kernel.default._schema.arguments
    names = [argument.name for argument in arguments if argument.kwarg_only]
    lists = lists[: len(arguments) - len(names)]  # without the scale and the overflow of a GradScaler, which are ops
    numbers = {name: _number(recorder, options[name]) for name in names if name not in ("grad_scale", "found_inf")}
    function = _fused_update(kernel.default, tuple(map(bool, lists)))
    for tensors in zip(*filter(None, lists), strict=True):
        recorder.record_own(function, tensors, numbers)


def _number(recorder: "Recorder", value: Any) -> Any:
    """Returns a hyper-parameter as an argument of a call: a slot, if every step reads it again."""
    if isinstance(value, Tensor):
        value = value.item()  # which becomes a HostScalar
    return recorder.program.use(value.slot) if type(value) is HostScalar else value
