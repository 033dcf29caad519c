"""A random batch for a step that is run to be measured: whole numbers within what the model looks up with them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_with_path

from placewise.capture.models import load_step
from placewise.capture.training import CapturedStep
from placewise.execute.profile_values import NUM_INDEXED
from placewise.execute.signatures import op_calls
from placewise.execute.values import Values, slots_of

EVERY_MODEL_HAS = 2  # classes, and words


def real_step(model: str, seed: int = 0) -> CapturedStep:
    """Returns the captured step of MODEL with real weights, drawn with this seed."""
    torch.manual_seed(seed)
    return load_step(model, device="cpu")


def random_batch(step: CapturedStep, seed: int = 0) -> Any:
    """Returns a batch like the step's own, on the CPU: random floats and whole numbers; masks and negative labels stay."""
    generator = torch.Generator().manual_seed(seed)
    limits = _limits(step)

    def draw(path: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        given = torch.zeros(value.shape, dtype=value.dtype) if value.is_meta else value.detach().cpu()
        if value.is_floating_point():
            return torch.randn(value.shape, dtype=value.dtype, generator=generator)
        if value.dtype == torch.bool:
            return given
        name = "batch" + "".join(_step_of(key) for key in path)
        drawn = torch.randint(limits.get(name, EVERY_MODEL_HAS), value.shape, dtype=value.dtype, generator=generator)
        return torch.where(given < 0, given, drawn)

    return tree_map_with_path(draw, step.step.batch)


def _step_of(key: Any) -> str:
    return f"[{key.key!r}]" if hasattr(key, "key") else f"[{key.idx}]"


def _limits(step: CapturedStep) -> dict[str, int]:
    """Returns for entries of the batch how many things their numbers choose from, where an op says it."""
    values = Values.of(step)
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
