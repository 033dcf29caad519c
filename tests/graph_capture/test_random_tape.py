"""Checkpointed modules draw the same random numbers again when they are recomputed, and nothing else does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_steps import assert_runs_like_eager
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import placewise as pw
from placewise.core.errors import CaptureError
from placewise.graph_capture.random_draws import Draw, DrawAgain
from placewise.measure.ops import op_calls

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]


class Block(nn.Module):
    """Two layers with dropout between, recomputed in backward."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.layers, self.how = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), how

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, **self.how)  # type: ignore[no-any-return]

    def inner(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.layers[1](F.dropout(torch.relu(self.layers[0](x)), 0.3)), 0.5)


def blocks(**how: Any) -> nn.Module:
    return nn.Sequential(nn.Dropout(0.2), Block(**how), nn.Dropout(0.1), Block(**how), nn.Linear(4, 3))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_dropout_is_that_of_the_forward_pass(use_reentrant: bool, micro_batches: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(4, 4), *blocks(use_reentrant=use_reentrant).children())
        return model, torch.optim.Adam(model.parameters(), 0.01)

    batches = [(torch.randn(6, 4), torch.randn(6, 3)) for _ in range(3)]
    assert_runs_like_eager(build, nn.MSELoss(), batches, micro_batches, seed=micro_batches)


def step_of_blocks() -> tuple[Any, ...]:
    with torch.device("meta"):
        model = blocks(use_reentrant=False)
        return model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), (torch.randn(6, 4), torch.randn(6, 3))


def test_a_draw_and_its_repetition_share_a_group() -> None:
    """A generator belongs to a device. Only what is drawn again has its state kept."""
    step = pw.capture(*step_of_blocks())
    calls = {kind: [call for call in step.program.calls if isinstance(call.function, kind)] for kind in (Draw, DrawAgain)}
    assert len(calls[Draw]) == len(calls[DrawAgain]) == 4
    states = {call.results[-1]: call.op for call in calls[Draw]}
    for call in calls[DrawAgain]:
        assert step.graph.ops.groups[states[call.args[0]]] == step.graph.ops.groups[call.op]


def test_what_draws_again_can_be_timed_alone() -> None:
    step = pw.capture(*step_of_blocks())
    names = [call.function.name() for call in op_calls(step.program, len(step.graph.ops))]
    assert names.count("aten::bernoulli_.float") == 6 + 4


def test_the_users_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    pw.capture(*step_of_blocks())
    assert torch.equal(torch.get_rng_state(), before)


class Careless(nn.Module):
    """Draws something else when it is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.size = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)  # type: ignore[no-any-return]

    def inner(self, x: Tensor) -> Tensor:
        self.size += 1
        return self.layer(x) * torch.rand(self.size).sum()  # type: ignore[no-any-return]


def test_other_draws_in_a_recomputation_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Careless(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(CaptureError, match="draws other numbers than before"):
        pw.capture(model, nn.MSELoss(), optimizer, (torch.randn(6, 4), torch.randn(6, 3)))


class Seeding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return F.dropout(x)


def test_seeding_inside_a_step_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"calls torch.manual_seed, which can't be recorded"):
        pw.capture_inference(Seeding(), torch.randn(3))


class Restoring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = torch.get_rng_state()

    def forward(self, x: Tensor) -> Tensor:
        torch.set_rng_state(self.state)
        return F.dropout(x)


def test_a_state_of_another_time_is_refused() -> None:
    with pytest.raises(CaptureError, match="a state of another time"):
        pw.capture_inference(Restoring(), torch.randn(3))


class Drawing(nn.Module):
    """A layer and a function of its result that draws numbers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def drawn_twice(y: Tensor) -> Tensor:
    """Returns dropout whose mask the next one repeats, as in eager code after fork_rng."""
    with torch.random.fork_rng(devices=[]):
        y = F.dropout(y, 0.3)
    return F.dropout(y, 0.3)


def drawn_in_a_fork(y: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return F.dropout(y, 0.3)


def drawn_by_another_generator(y: Tensor) -> Tensor:
    return y + torch.rand(3, generator=torch.Generator().manual_seed(1))


def test_after_fork_rng_the_same_numbers_are_drawn_again() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Drawing(drawn_twice)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    assert_runs_like_eager(build, nn.MSELoss(), [(torch.randn(6, 4), torch.randn(6, 3)) for _ in range(3)])


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (drawn_in_a_fork, "the next step draws the same numbers again"),
        (drawn_by_another_generator, "aten.rand draws from a generator of its own"),
        (lambda y: y + nn.init.trunc_normal_(torch.empty(3)), r"calls torch.nn.init.trunc_normal_, which can't be recorded"),
    ],
)
def test_draws_that_a_step_would_not_repeat_are_refused(function: Callable[[Tensor], Tensor], match: str) -> None:
    model = Drawing(function)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(CaptureError, match=match):
        pw.capture(model, nn.MSELoss(), optimizer, (torch.randn(6, 4), torch.randn(6, 3)))
