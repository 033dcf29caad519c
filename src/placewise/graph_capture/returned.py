"""What a step returns, as positions among the program's outputs."""

from dataclasses import dataclass

from placewise.graph_capture.structures import Structure

Positions = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ReturnedOutput:
    """What the model returned: its structure, and where its tensors are; micro-batches have one entry each."""

    structure: Structure
    positions: tuple[Positions, ...]  # [leaves of the structure, micro-batches]


@dataclass(frozen=True, eq=False)
class SetAttribute:
    """A tensor or a number of the step, or a value with some in it, that the step leaves in an attribute of a module."""

    module: str  # its path, as `modules_by_path` has it
    name: str
    structure: Structure
    positions: Positions  # of the structure's leaves


@dataclass(frozen=True, eq=False)
class Returned:
    """What a step returns, as positions among the program's outputs."""

    losses: Positions = ()  # of the micro-batches; empty for inference
    output: ReturnedOutput | None = None  # None: the step returns the loss alone
    grad_norm: int | None = None  # of all gradients, before they are clipped
    found_inf: int | None = None  # above 0 if a gradient is not finite, and the update is skipped
    attributes: tuple[SetAttribute, ...] = ()
