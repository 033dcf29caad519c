"""A piece: calls of a program that run as one op, as data that prints, compares and can be run one call after the other.

Running the calls in turn is what a piece means: it gives the bits of the ops that it was made from. A kernel that a compiler
makes of it gives the same up to rounding.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from placewise.graph_capture.call_slots import slots_of
from placewise.graph_capture.program import HERE, Call, Slot, fill_slots

BATCH_NORM = torch.ops.aten._batch_norm_with_update.default


class Like(NamedTuple):
    """What is known of a tensor that a piece reads or makes."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def make(self, device: Any) -> Tensor:
        """Returns such a tensor, without values."""
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class LaidOut:
    """Gives a tensor inside a piece the strides that a view of it was recorded for."""

    strides: tuple[int, ...]

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns the tensor, or a copy if it has others in dimensions with more than one entry."""
        if all(size == 1 or a == b for size, a, b in zip(tensor.size(), tensor.stride(), self.strides, strict=True)):
            return tensor
        return torch.empty_strided(tensor.size(), self.strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@dataclass(frozen=True)
class Piece:
    """Calls that run as one op. Its slots are its own, numbered from 0; pieces of equal calls on equal tensors are equal."""

    name: str = field(compare=False)  # what it computes, in a few words: add_rsqrt_mul
    inputs: tuple[Slot, ...] = field(compare=False)
    likes: tuple[Like | None, ...] = field(compare=False)  # [inputs]; None for a number, or a tensor of one, of the host
    calls: tuple[Call, ...] = field(compare=False)
    results: tuple[Slot, ...] = field(compare=False)  # what it returns: tensors with memory of their own
    made: tuple[Like, ...] = field(compare=False)  # [results]
    written: tuple[int, ...] = field(compare=False)  # positions of the inputs that it changes in place
    digest: str

    @classmethod
    def of(
        cls,
        name: str,
        inputs: dict[Slot, Like | None],
        calls: list[Call],
        results: dict[Slot, Like],
        written: tuple[int, ...],
    ) -> "Piece":
        """Returns a piece of these calls; a digest of all but its name tells it from others."""
        rows = [(str(call.function), call.args, sorted(call.kwargs.items()), call.results) for call in calls]
        content = _text((list(inputs.items()), rows, list(results.items()), written))
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        likes, made = tuple(inputs.values()), tuple(results.values())
        return cls(name, tuple(inputs), likes, tuple(calls), tuple(results), made, written, digest)

    def __str__(self) -> str:
        return f"{self.name} {self.digest}"

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Runs the calls one after the other on the device of its first input."""
        return self.run(given[0].device, *given)

    def run(self, device: Any, *given: Tensor) -> tuple[Tensor, ...]:
        """Runs the calls one after the other, and returns the results."""
        return tuple(self.run_calls(self.calls, device, given))

    def run_calls(self, calls: Sequence[Call], device: Any, given: Sequence[Tensor]) -> list[Tensor]:
        """Runs these calls, its own or some that stand for them; a value is freed after the last call that reads it."""
        values: list[Any] = [None] * self._num_slots
        for slot, value in zip(self.inputs, given, strict=True):
            values[slot] = value
        for call, dying in zip(calls, self._dying, strict=True):
            kwargs = {key: device if value is HERE else fill_slots(value, values) for key, value in call.kwargs.items()}
            made = call.function(*[fill_slots(value, values) for value in call.args], **kwargs)
            found = [made] if isinstance(made, Tensor) else [value for value in made if isinstance(value, Tensor)]
            for slot, value in zip(call.results, found, strict=True):
                values[slot] = value
            for slot in dying:
                values[slot] = None
        return [values[slot] for slot in self.results]

    def on_meta(self) -> tuple[Tensor, ...]:
        """Returns what it would return, on the meta device."""
        return tuple([like.make("meta") for like in self.made])

    @property
    def only_updates_statistics(self) -> bool:
        """Whether all that it changes in place are running statistics, which only a batch norm touches."""
        changed = {self.inputs[number] for number in self.written}
        others = [slot for call in self.calls if call.function is not BATCH_NORM for slot in slots_of(call)]
        others += [slot for call in self.calls if call.function is BATCH_NORM for slot in call.args[:3]]
        return bool(changed) and changed.isdisjoint(others)

    def without_statistics(self) -> "Piece":
        """Returns the piece without the running statistics that it updates, to be run once more."""
        changed = {self.inputs[number] for number in self.written}
        calls = []
        for call in self.calls:
            if call.function is BATCH_NORM:
                args = (*call.args[:3], None, None, True, *call.args[5:])
                call = call._replace(function=torch.ops.aten.native_batch_norm.default, args=args, results=call.results[:3])
            calls.append(call)
        inputs = {slot: like for slot, like in zip(self.inputs, self.likes, strict=True) if slot not in changed}
        return Piece.of(self.name, inputs, calls, dict(zip(self.results, self.made, strict=True)), ())

    @cached_property
    def _num_slots(self) -> int:
        return 1 + max([*self.inputs, *(slot for call in self.calls for slot in call.results)])

    @cached_property
    def _dying(self) -> tuple[tuple[Slot, ...], ...]:
        """The slots that no later call reads and that are not returned, by the last call that has to do with them."""
        last: dict[Slot, int] = {}
        for number, call in enumerate(self.calls):
            last |= dict.fromkeys((*slots_of(call), *call.results), number)
        rows: list[list[Slot]] = [[] for _ in self.calls]
        for slot, number in last.items():
            if slot not in self.results:
                rows[number].append(slot)
        return tuple(map(tuple, rows))


def _text(value: Any) -> str:
    """Returns what tells an argument from others; of a tensor, of which only the shape counts, that and no value."""
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({','.join(map(_text, value))})"
    if isinstance(value, Tensor):
        return _text(Like(value.dtype, tuple(value.size()), value.stride()))
    return repr(value)
