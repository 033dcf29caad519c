"""A random batch for a step that is run to be measured: whole numbers within what the model looks up with them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from placewise.graph_capture.capture import CapturedStep
from placewise.measure.op_inputs import NUM_INDEXED
from placewise.measure.signatures import op_calls
from placewise.models import load_step
from placewise.run.backends.cpu_memory import keep_freed_memory
from placewise.run.lower.slots import Slots, slots_of
from placewise.run.step.batches import batch_tensors

EVERY_MODEL_HAS = 2  # classes, and words


def real_step(model: str, seed: int = 0) -> CapturedStep:
    """Returns the captured step of MODEL with real weights, drawn with this seed."""
    keep_freed_memory()  # here, for drawing weights starts PyTorch's threads
    torch.manual_seed(seed)
    return load_step(model, device="cpu")


def random_batch(step: CapturedStep, seed: int = 0) -> Any:
    """Returns a batch like the step's own, on the CPU: random floats and whole numbers; masks and negative labels stay."""
    generator = torch.Generator().manual_seed(seed)
    limits, batch = _limits(step), step.step.batch
    drawn: dict[int, Tensor] = {}
    for path, tensor in batch_tensors(batch, batch):
        drawn.setdefault(id(tensor), _draw(tensor, limits.get(path, EVERY_MODEL_HAS), generator))
    return tree_map(lambda value: drawn.get(id(value), value), batch)


def _draw(like: Tensor, limit: int, generator: torch.Generator) -> Tensor:
    if like.is_floating_point():
        return torch.randn(like.shape, dtype=like.dtype, generator=generator)
    given = torch.zeros(like.shape, dtype=like.dtype) if like.is_meta else like.detach().cpu()
    if like.dtype == torch.bool:
        return given
    return torch.where(given < 0, given, torch.randint(limit, like.shape, dtype=like.dtype, generator=generator))


def _limits(step: CapturedStep) -> dict[str, int]:
    """Returns for entries of the batch how many things their numbers choose from, where an op says it."""
    values = Slots.of(step)
    names = {resident.tensor: resident.name for resident in step.program.residents if resident.kind == "input"}
    limits: dict[str, int] = {}
    calls = op_calls(step.program, len(step.graph.ops))
    for op, call in enumerate(values.op_calls):
        most = NUM_INDEXED.get(step.graph.ops.kinds[op].rpartition(".")[2])
        for slot in slots_of(call) if most is not None else ():
            name = names.get(values.storages[slot])
            if name is not None and most is not None:
                limits[name] = min(most(calls[op].args), limits.get(name, 2**31))
    return limits
