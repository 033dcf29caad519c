"""Recurrent layers as one op forward and one backward."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_steps import assert_runs_like_eager, capture_with_mse, compiled
from torch import Tensor, nn

from placewise.core.errors import CaptureError, ExecutionError
from placewise.graph_capture.capture import CapturedStep
from placewise.graph_capture.resolved_program import ResolvedProgram, is_random
from placewise.measure.ops import RunnableOp, op_calls

BATCH, STEPS, WIDTH = 2, 3, 4


pytestmark = pytest.mark.usefixtures("one_thread")


class Reader(nn.Module):
    """A recurrent layer, of which the result and perhaps the last state are used."""

    def __init__(self, layer: nn.RNNBase, uses_state: bool = False) -> None:
        super().__init__()
        self.layer, self.uses_state = layer, uses_state
        self.out = nn.Linear(WIDTH * (2 if layer.bidirectional else 1), WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, steps, width]."""
        found, state = self.layer(x)
        state = state[-1] if isinstance(state, tuple) else state
        made: Tensor = self.out(found)
        return made + state.sum() if self.uses_state else made


LAYERS: dict[str, Any] = {
    "lstm": lambda: Reader(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)),
    "lstm, both ways, with dropout": lambda: Reader(
        nn.LSTM(WIDTH, WIDTH, 2, bidirectional=True, dropout=0.3, batch_first=True), uses_state=True
    ),
    "lstm, projected": lambda: Reader(nn.LSTM(WIDTH, 2 * WIDTH, proj_size=WIDTH, batch_first=True), uses_state=True),
    "gru": lambda: Reader(nn.GRU(WIDTH, WIDTH), uses_state=True),
    "rnn": lambda: Reader(nn.RNN(WIDTH, WIDTH, nonlinearity="relu", bias=False)),
}


def training(name: str) -> tuple[Reader, Any]:
    torch.manual_seed(0)
    model: Reader = LAYERS[name]()
    return model, torch.optim.SGD(model.parameters(), 0.1)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [tuple(torch.randn(2, BATCH, STEPS, WIDTH)) for _ in range(count)]


def captured(name: str) -> CapturedStep:
    return capture_with_mse(*training(name), batches(1)[0], whole_layers=True)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", LAYERS)
def test_steps_have_eagers_bits(name: str) -> None:
    """A CPU runs what eager code runs there."""
    assert_runs_like_eager(partial(training, name), nn.MSELoss(), batches(2), whole_layers=True)


def test_they_are_one_op_each_way_in_one_group() -> None:
    """Two layers with weights of 16 x 4 twice, for 2 x 3 rows, 2 flops each: 3,072; backward twice that."""
    step = captured("lstm")
    ops = step.graph.ops
    forward, backward = ops.kinds.index("aten.lstm"), ops.kinds.index("aten.lstm_backward")
    assert [ops.kinds.count(kind) for kind in ("aten.lstm", "aten.lstm_backward", "aten.sigmoid")] == [1, 1, 0]
    assert ops.groups[forward] == ops.groups[backward]
    assert (ops.flops[forward], ops.flops[backward]) == (3072, 6144)
    assert not any(map(is_random, ResolvedProgram.of(step).op_calls))


def test_layers_that_drop_are_a_random_op() -> None:
    step = captured("lstm, both ways, with dropout")
    calls = zip(step.graph.ops.kinds, ResolvedProgram.of(step).op_calls, strict=True)
    assert [kind for kind, call in calls if is_random(call)] == ["aten.lstm"]


class Forked(Reader):
    """Draws twice from one state of the generator."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, steps, width]."""
        with torch.random.fork_rng(devices=[]):
            found, _ = self.layer(x)
        return F.dropout(self.out(found), 0.3)


def test_numbers_that_layers_have_drawn_are_not_drawn_again() -> None:
    """After fork_rng the dropout would begin with the numbers of the layers, which only their kernel draws."""
    model = Forked(nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True))
    with pytest.raises(CaptureError, match="draws other numbers than before"):
        capture_with_mse(model, torch.optim.SGD(model.parameters()), batches(1)[0], whole_layers=True)


def test_both_ops_can_be_timed_alone() -> None:
    step = captured("gru")
    calls = op_calls(step.program, len(step.graph.ops))
    for kind in ("aten.gru", "aten.gru_backward"):
        op = RunnableOp(calls[step.graph.ops.kinds.index(kind)], "cpu")
        op.run()
        op.run()
        assert not op.changes_inputs


class Steepness(Reader):
    """A reader that also uses the gradient of what its layer makes."""

    keeps_graph = False

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, steps, width]."""
        x = x.clone().requires_grad_()
        found, _ = self.layer(x)
        (slope,) = torch.autograd.grad(found.sum(), x, retain_graph=True, create_graph=self.keeps_graph)
        return self.out(found) + slope  # type: ignore[no-any-return]


def test_gradients_may_be_asked_for_twice() -> None:
    """By the model (retain_graph), and then by the loss."""

    def build() -> Any:
        torch.manual_seed(0)
        model = Steepness(nn.GRU(WIDTH, WIDTH))
        return model, torch.optim.SGD(model.parameters(), 0.1)

    for seed in range(3):
        assert_runs_like_eager(build, nn.MSELoss(), batches(2), seed=seed, whole_layers=True)


def test_gradients_of_gradients_are_refused() -> None:
    """Recorded as one op they would be constants, and a part of the step's gradients would be missing."""
    model = Steepness(nn.GRU(WIDTH, WIDTH))
    model.keeps_graph = True
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert "aten.sigmoid_" in capture_with_mse(model, optimizer, batches(1)[0]).graph.ops.kinds
    with pytest.raises(CaptureError, match=r"differentiates the gradients of recurrent layers .*: capture without whole_"):
        capture_with_mse(model, optimizer, batches(1)[0], whole_layers=True)


def test_a_plan_that_recomputes_is_refused() -> None:
    with pytest.raises(ExecutionError, match="--no-recompute"):
        compiled(captured("lstm"), options=True)


def test_without_asking_cells_are_recorded() -> None:
    kinds = capture_with_mse(*training("lstm"), batches(1)[0]).graph.ops.kinds
    assert "aten.lstm" not in kinds
    assert "aten.sigmoid_" in kinds
