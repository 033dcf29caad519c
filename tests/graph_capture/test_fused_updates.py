"""Optimizers with fused=True: one op for each parameter, by PyTorch's own kernel."""

import copy
from typing import Any

import pytest
import torch
from compiled_steps import capture_with_mse, compiled, small_training
from eager_steps import OPTIMIZERS
from torch import nn

from placewise.graph_capture.fused_updates import FusedUpdate
from placewise.graph_capture.graph_builder import BACKWARD, UPDATE
from placewise.measure.ops import RunnableOp, op_calls

KERNELS = {
    "adam-fused": "_fused_adam_", "adamw-fused": "_fused_adamw_", "momentum-fused": "_fused_sgd_",
    "adagrad-fused": "_fused_adagrad_",
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_each_parameter_has_one_op_that_any_device_can_run(name: str) -> None:
    """It reads the gradient, and writes the parameter and all of its state, which is at home with it."""
    model, _, batch = small_training()
    graph = capture_with_mse(model, OPTIMIZERS[name](model.parameters()), batch).graph
    updates = [op for op, phase in enumerate(graph.ops.phases) if phase == UPDATE]
    assert [graph.ops.kinds[op] for op in updates] == [f"aten.{KERNELS[name]}"] * 4
    assert len({int(graph.ops.groups[op]) for op in updates}) == 4
    assert [graph.ops.devices[op] for op in updates] == [None] * 4
    for op in updates:
        reads, writes = set(graph.ops.reads[op].tolist()), set(graph.ops.writes[op].tolist())
        written = {int(graph.tensors.alias_of[tensor]) for tensor in writes}
        (gradient,) = reads - written
        assert graph.ops.phases[graph.producer[gradient]] == BACKWARD
        assert {int(graph.tensors.home[tensor]) for tensor in written} == {int(graph.ops.groups[op])}


def test_the_counter_counts_on_and_eager_code_goes_on_with_it() -> None:
    model, _, batch = small_training()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    train_step = compiled(capture_with_mse(model, optimizer, batch), devices=1)
    for _ in range(3):
        train_step(batch)
    train_step.close()
    assert [float(state["step"]) for state in optimizer.state.values()] == [3] * 4
    other = copy.deepcopy(model)
    again = torch.optim.AdamW(other.parameters(), 0.01, fused=True)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    nn.MSELoss()(other(batch[0]), batch[1]).backward()
    again.step()
    train_step = compiled(capture_with_mse(model, optimizer, batch), devices=1)
    train_step(batch)
    train_step.close()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_an_update_can_be_timed_alone_and_be_undone() -> None:
    model, _, batch = small_training()
    step = capture_with_mse(model, OPTIMIZERS["adamw-fused"](model.parameters()), batch)
    call = next(call for call in op_calls(step.program, len(step.graph.ops)) if isinstance(call.function, FusedUpdate))
    assert call.signature.startswith("aten._fused_adamw_(float32[8, 4], float32[8, 4], float32[8, 4]")
    op = RunnableOp(call, "cpu")
    assert op.changes_inputs
    op.run()
    op.restore()


class Failing(nn.Module):
    """Looks up a word, so that a step can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Returns [batch, 3]."""
        found: torch.Tensor = self.out(self.words(words))
        return found


def test_what_a_failed_step_has_updated_is_known() -> None:
    """PyTorch does not count what fused kernels write, so the lanes do."""
    model = Failing()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)
    batch = (torch.randint(5, (6,)), torch.randn(6, 3))
    train_step = compiled(capture_with_mse(model, optimizer, batch), devices=1)
    train_step(batch)
    before: Any = [parameter._version for parameter in model.parameters()]
    train_step(batch)
    train_step.close()
    assert [parameter._version - old for parameter, old in zip(model.parameters(), before, strict=True)] == [1, 1, 1]
