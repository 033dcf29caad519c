"""The instructions of one step, in launch order, as data: they print as text, and the text parses back.

The text is what people and tests read and write; a step runs without it.

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
class RunOp:
    """Runs an op on a device, when its inputs are there."""

    op: int
    device: int


@dataclass(frozen=True, slots=True)
class CopyTensor:
    """Copies a tensor to another device."""

    tensor: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class FreeTensor:
    """Frees the memory that a storage which the step made, or a copy, has on a device."""

    tensor: int
    device: int


Instruction = RunOp | CopyTensor | FreeTensor


@dataclass(frozen=True)
class Instructions:
    """One step in launch order, for all devices."""

    device_names: tuple[str, ...]
    sequence: tuple[Instruction, ...]

    def __str__(self) -> str:
        names = [json.dumps(name) for name in self.device_names]
        lines = [HEAD, " ".join(["devices", *names])]
        for instruction in self.sequence:
            match instruction:
                case RunOp(op, device):
                    lines.append(f"run {op} {names[device]}")
                case CopyTensor(tensor, source, target):
                    lines.append(f"copy {tensor} {names[source]} {names[target]}")
                case FreeTensor(tensor, device):
                    lines.append(f"free {tensor} {names[device]}")
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str, source: str = "instructions") -> "Instructions":
        """Returns the instructions of a text; a PlanError names the line and the rule that it breaks."""
        lines = text.splitlines()
        if not lines or lines[0] != HEAD:
            raise PlanError(f"{source}: line 1: must be {HEAD!r}")
        head = "" if len(lines) < 2 else lines[1]
        names = _tokens(head.removeprefix("devices")) if head.startswith("devices ") else None
        if not names or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
            raise PlanError(f"{source}: line 2: must be 'devices' and their names in quotes, each once, got {head!r}")
        numbers = {name: number for number, name in enumerate(names)}
        sequence = [_parse_line(line, numbers, f"{source}: line {i}") for i, line in enumerate(lines[2:], 3)]
        return cls(tuple(map(str, names)), tuple(sequence))


KINDS: dict[str, tuple[Callable[..., Instruction], int]] = {  # word -> class, number of devices
    "run": (RunOp, 1), "copy": (CopyTensor, 2), "free": (FreeTensor, 1)
}  # fmt: skip


def _parse_line(line: str, numbers: dict[str | int, int], place: str) -> Instruction:
    word, _, rest = line.partition(" ")
    make, num_devices = KINDS.get(word, (None, 0))
    tokens = _tokens(rest)
    if make is None or tokens is None or [type(token) for token in tokens] != [int, *[str] * num_devices]:
        raise PlanError(f"{place}: {RULE}, got {line!r}")
    for name in tokens[1:]:
        if name not in numbers:
            raise PlanError(f"{place}: there is no device {name!r}; the devices are {', '.join(map(str, numbers))}")
    return make(tokens[0], *(numbers[name] for name in tokens[1:]))


def _tokens(text: str) -> list[str | int] | None:
    """Returns the numbers and the quoted names of a line; None if there is anything else in it."""
    found: list[str | int] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = TOKEN.match(text, position)
        if match is None:
            return None
        try:
            found.append(int(match[1]) if match[1] else json.loads(match[2]))
        except ValueError:  # a number with too many digits, or a name with a broken escape
            return None
        position = match.end()
    return found
