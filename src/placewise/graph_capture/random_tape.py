"""The random generator while a step is recorded: a tape of draws.

Code that saves the generator's state and restores it later, as checkpointing does, draws the same numbers again. On the meta
device nothing is drawn, so a state is a position on the tape; after it was restored, each random op must be the one that
stands there.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor

from placewise.core.errors import CaptureError

SEED = "seed before training"

IDLE_ON_META = ("trunc_normal_", "orthogonal_", "sparse_", "dirac_")  # of torch.nn.init


@dataclass
class TapedDraw:
    """A random op that was recorded."""

    signature: Any
    op: int  # of the graph
    call: int  # of the program
    state: Tensor | None = None  # on the meta device: the generator's state before it, if it is drawn again


class RandomTape:
    """The random ops recorded so far, and the one that is drawn again next."""

    def __init__(self) -> None:
        self.draws: list[TapedDraw] = []
        self._position: int | None = None  # None: the next random op is a new one
        self._states: dict[int, tuple[Tensor, int]] = {}  # id of a saved state -> itself, its position

    def next_repeated(self, signature: Any, where: str) -> TapedDraw | None:
        """Returns the earlier draw that the present random op repeats; None if it is a new one."""
        if self._position is None or self._position == len(self.draws):
            self._position = None
            return None
        draw = self.draws[self._position]
        if draw.signature != signature:
            raise CaptureError(
                "the step sets the random generator back, and then draws other numbers than before (when it runs a "
                f"checkpointed module again, or after fork_rng){where}"
            )
        self._position += 1
        return draw

    @property
    def is_back(self) -> bool:
        """Whether the next random op draws the numbers of an earlier one."""
        return self._position not in (None, len(self.draws))

    def add_unrepeatable(self, name: str, op: int, call: int) -> None:
        """Notes a draw that is not drawn again: a kernel's own."""
        self.draws.append(TapedDraw((name,), op, call))

    def get_state(self) -> Tensor:
        """Returns the generator's state: what stands for the present position."""
        state = torch.default_generator.get_state()
        self._states[id(state)] = (state, len(self.draws) if self._position is None else self._position)
        return state

    def set_state(self, state: Tensor) -> None:
        """Continues at the position of a saved state; at the end of the tape new numbers are drawn."""
        if id(state) not in self._states:
            raise CaptureError("the step sets the random generator to a state of another time, which can't be recorded")
        self._position = self._states[id(state)][1]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Makes PyTorch's functions for the generator use the tape."""

        def refuse(name: str, advice: str) -> Callable[..., None]:
            def call(*_: Any, **__: Any) -> None:
                raise CaptureError(f"the step calls torch.{name}, which can't be recorded: {advice}")

            return call

        @contextmanager
        def fork_rng(*args: Any, enabled: bool = True, **kwargs: Any) -> Iterator[None]:
            position = len(self.draws) if self._position is None else self._position
            try:
                yield
            finally:
                if enabled:
                    self._position = position

        functions: dict[str, Callable[..., Any]] = {
            "get_rng_state": self.get_state, "set_rng_state": self.set_state, "fork_rng": fork_rng,
            "manual_seed": refuse("manual_seed", SEED), "seed": refuse("seed", SEED),
        }  # fmt: skip
        with ExitStack() as patches:
            for module in (torch, torch.random):
                for name in filter(partial(hasattr, module), functions):
                    patches.enter_context(patch.object(module, name, functions[name]))
            for name in filter(partial(hasattr, torch.nn.init), IDLE_ON_META):
                draw = refuse(f"nn.init.{name}", "it does nothing on the meta device, fill the tensor with other ops")
                patches.enter_context(patch.object(torch.nn.init, name, draw))
            # Checkpointing asks for autocast by the device of its arguments, and ours is a GPU's.
            patches.enter_context(patch.object(torch.utils.checkpoint, "_infer_device_type", lambda *args: "cuda"))
            yield
        if self.is_back:
            raise CaptureError(
                "the step leaves the random generator in an earlier state (fork_rng, set_rng_state), so that the next step "
                "draws the same numbers again, which can't be recorded"
            )


class HostGenerators:
    """The generators of Python and numpy, whose numbers a recorded step would repeat."""

    def __init__(self) -> None:
        self._states, self._numpy = self._present(), np.random.get_state()  # noqa: NPY002

    def changed(self) -> str:
        """Returns the name of the one that has drawn numbers since, or been seeded; "" if none has."""
        return next((name for name, state in self._present().items() if state != self._states[name]), "")

    def restore(self) -> None:
        """Gives the generators the states that they had."""
        random.setstate(self._states["Python's random module"])
        np.random.set_state(self._numpy)  # noqa: NPY002

    def _present(self) -> dict[str, Any]:
        numpy_state: Any = np.random.get_state()  # noqa: NPY002
        return {"Python's random module": random.getstate(), "numpy.random": tuple(map(str, numpy_state))}
