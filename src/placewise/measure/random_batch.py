"""Random values for a step that is run to be measured: weights for its model, and a batch."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from placewise import zoo
from placewise.core.errors import ModelError
from placewise.core.quantities import format_bytes
from placewise.graph_capture.call_slots import slots_of
from placewise.graph_capture.capture import CapturedStep, capture_step
from placewise.graph_capture.resolved_program import ResolvedProgram
from placewise.machines.detect import host_memory_bytes
from placewise.measure.ops import NUM_INDEXED, op_calls
from placewise.models import FUSED, is_zoo_model, load_step
from placewise.run.backends.cpu_memory import keep_freed_memory
from placewise.run.deferred_weights import DeferredWeights
from placewise.run.step.batches import batch_tensors

MIN_CHOICES = 2  # every model has at least this many classes or words


def load_with_weights(model: str, seed: int = 0) -> CapturedStep:
    """Returns the captured step of MODEL with real weights, drawn with this seed."""
    if is_zoo_model(model):  # which a file may name, too
        _check_memory(model)
    keep_freed_memory()  # now, because drawing weights starts PyTorch's threads
    torch.manual_seed(seed)
    return load_step(model, device="cpu")


def _check_memory(model: str) -> None:
    """Refuses a model of the zoo whose weights and batch this machine can't hold."""
    step = zoo.build_step(model.removeprefix(FUSED))
    named = (*step.modules.named_parameters(), *step.modules.named_buffers(), *batch_tensors(step.batch, step.batch))
    needed = sum(tensor.nbytes for _, tensor in named)
    if needed > (limit := host_memory_bytes()):
        raise ModelError(
            f"model {model!r}: its weights and batch take {format_bytes(needed)}, this machine has {format_bytes(limit)}"
        )


def load_with_deferred_weights(model: str, seed: int = 0) -> tuple[CapturedStep, DeferredWeights | None]:
    """Returns the same step with weights that a rank makes for its own part; a user's function makes all weights at once."""
    if not is_zoo_model(model) or model.startswith(FUSED):
        return load_with_weights(model, seed), None
    keep_freed_memory()
    torch.manual_seed(seed)
    with DeferredWeights() as weights:
        step = zoo.build_step(model, "cpu")
    batch = tree_map(
        lambda entry: weights.make([entry])[0] if isinstance(entry, Tensor) and weights.has(entry) else entry, step.batch
    )
    return capture_step(replace(step, batch=batch), model), weights


def random_batch(step: CapturedStep, seed: int = 0) -> Any:
    """Returns a random batch like the step's own, on the CPU.

    Integers stay below the number of entries that the model looks up with them; masks and negative labels stay as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    num_choices, batch = _num_choices(step), step.step.batch
    drawn: dict[int, Tensor] = {}
    for path, tensor in batch_tensors(batch, batch):
        drawn.setdefault(id(tensor), _draw_like(tensor, num_choices.get(path, MIN_CHOICES), generator))
    return tree_map(lambda value: drawn.get(id(value), value), batch)


def _draw_like(like: Tensor, num_choices: int, generator: torch.Generator) -> Tensor:
    if like.is_floating_point():
        return torch.randn(like.shape, dtype=like.dtype, generator=generator)
    given = torch.zeros(like.shape, dtype=like.dtype) if like.is_meta else like.detach().cpu()
    if like.dtype == torch.bool:
        return given
    return torch.where(given < 0, given, torch.randint(num_choices, like.shape, dtype=like.dtype, generator=generator))


def _num_choices(step: CapturedStep) -> dict[str, int]:
    """Returns how many entries the integers of an input choose from, by its path in the batch; none if no op looks up."""
    step = step if step.captured is None else step.captured  # where no lookup is part of a fused op
    values = ResolvedProgram.of(step)
    names = {resident.tensor: resident.name for resident in step.program.residents if resident.kind == "input"}
    found: dict[str, int] = {}
    calls = op_calls(step.program, len(step.graph.ops))
    for op, call in enumerate(values.op_calls):
        num_indexed = NUM_INDEXED.get(step.graph.ops.kinds[op].rpartition(".")[2])
        for slot in slots_of(call) if num_indexed is not None else ():
            name = names.get(values.storages[slot])
            if name is not None and num_indexed is not None:
                found[name] = min(num_indexed(calls[op].args), found.get(name, 2**31))
    return found
