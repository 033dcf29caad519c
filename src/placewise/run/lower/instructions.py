"""What the host launches in one step, as data: it prints as text, and the text parses back.

placewise-instructions 1
devices "cpu:0" "cpu:1"
run 0 "cpu:0"
copy 2 "cpu:0" "cpu:1"
run 1 "cpu:1"
free 2 "cpu:1"
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from placewise.core.errors import PlanError

HEAD = "placewise-instructions 1"

TOKEN = re.compile(r'\s*(?:(\d+)|("(?:[^"\\]|\\.)*"))')

RULE = "must be 'run OP DEVICE', 'copy TENSOR FROM TO' or 'free TENSOR DEVICE'"


@dataclass(frozen=True, slots=True)
class Run:
    """An op starts on a device when its inputs are there."""

    op: int
    device: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor is copied to another device."""

    tensor: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Free:
    """A device's memory of a storage that the step made, or of a copy, is given back."""

    tensor: int
    device: int


Instruction = Run | Copy | Free


@dataclass(frozen=True)
class Instructions:
    """One step in the host's launch order; each device's list is a part of it."""

    device_names: tuple[str, ...]
    steps: tuple[Instruction, ...]

    def of_device(self, device: int) -> tuple[Instruction, ...]:
        """Returns what a device has to do; a copy is in the list of both of its ends."""
        return tuple(step for step in self.steps if device in _devices(step))

    def __str__(self) -> str:
        names = [json.dumps(name) for name in self.device_names]
        lines = [HEAD, " ".join(["devices", *names])]
        for step in self.steps:
            match step:
                case Run(op, device):
                    lines.append(f"run {op} {names[device]}")
                case Copy(tensor, source, target):
                    lines.append(f"copy {tensor} {names[source]} {names[target]}")
                case Free(tensor, device):
                    lines.append(f"free {tensor} {names[device]}")
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str, source: str = "instructions") -> "Instructions":
        """Returns the instructions of a text; a PlanError names the line and the rule that does not hold."""
        lines = text.splitlines()
        if not lines or lines[0] != HEAD:
            raise PlanError(f"{source}: line 1: must be {HEAD!r}")
        head = "" if len(lines) < 2 else lines[1]
        names = _tokens(head.removeprefix("devices")) if head.startswith("devices ") else None
        if not names or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
            raise PlanError(f"{source}: line 2: must be 'devices' and their names in quotes, each once, it is {head!r}")
        numbers = {name: number for number, name in enumerate(names)}
        steps = [_parse_line(line, numbers, f"{source}: line {i}") for i, line in enumerate(lines[2:], 3)]
        return cls(tuple(map(str, names)), tuple(steps))


KINDS: dict[str, tuple[Callable[..., Instruction], int]] = {"run": (Run, 1), "copy": (Copy, 2), "free": (Free, 1)}


def _devices(step: Instruction) -> tuple[int, ...]:
    return (step.source, step.target) if isinstance(step, Copy) else (step.device,)


def _parse_line(line: str, numbers: dict[str | int, int], place: str) -> Instruction:
    word, _, rest = line.partition(" ")
    make, num_devices = KINDS.get(word, (None, 0))
    tokens = _tokens(rest)
    if make is None or tokens is None or [type(token) for token in tokens] != [int, *[str] * num_devices]:
        raise PlanError(f"{place}: {RULE}, it is {line!r}")
    for name in tokens[1:]:
        if name not in numbers:
            raise PlanError(f"{place}: there is no device {name!r}; the devices are {', '.join(map(str, numbers))}")
    return make(tokens[0], *(numbers[name] for name in tokens[1:]))


def _tokens(text: str) -> list[str | int] | None:
    """Returns the numbers and the quoted names of a line, or None where it has anything else."""
    found: list[str | int] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = TOKEN.match(text, position)
        if match is None:
            return None
        try:
            found.append(int(match[1]) if match[1] else json.loads(match[2]))
        except ValueError:  # a number of too many digits, or a name with a broken escape
            return None
        position = match.end()
    return found
