"""Random ops that draw the same numbers twice: in the forward pass, and again where a checkpointed module is recomputed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from placewise.graph_capture.program import Call

STATE_BYTES = 5056  # of a CPU's generator, the largest


@dataclass(frozen=True)
class Draw:
    """A random op that is drawn again later."""

    function: Callable[..., Any]  # an ATen overload

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Returns the op's tensors, and the state that its device's generator had before."""
        state = _generator_state(_device_of(args, kwargs))
        made = self.function(*args, **kwargs)
        return (*(made if isinstance(made, (tuple, list)) else (made,)), state)


@dataclass(frozen=True)
class DrawAgain:
    """A random op that draws the numbers of an earlier Draw."""

    function: Callable[..., Any]  # an ATen overload

    def __call__(self, state: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns what the op returns with this state of the generator, whose own state stays as it is."""
        device = _device_of(args, kwargs)
        present = _generator_state(device)
        _set_generator_state(device, state)
        try:
            return self.function(*args, **kwargs)
        finally:
            _set_generator_state(device, present)


def without_state(call: Call) -> Call:
    """Returns the plain call of a random op that is drawn again, or draws again; any other call is returned as it is."""
    if isinstance(call.function, Draw):
        return call._replace(function=call.function.function, results=call.results[:-1])
    if isinstance(call.function, DrawAgain):
        return call._replace(function=call.function.function, args=call.args[1:])
    return call


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Returns the device of the first tensor that a call reads, or else the one that it makes tensors on."""
    found = next((arg.device for arg in args if isinstance(arg, Tensor) and not arg.is_meta), None)
    return torch.device(kwargs["device"]) if found is None else found


def _generator_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
