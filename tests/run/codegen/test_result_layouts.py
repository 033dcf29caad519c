"""Results of ops have the strides that they had when the step was recorded, whatever the kernels of a device do."""

from typing import Any

import pytest
import torch
from compiled_steps import assert_runs_like_eager, compiled
from torch import Tensor, nn

import placewise as pw
from placewise.graph_capture.meta_overrides import OVERRIDES
from placewise.graph_capture.program import Layout
from placewise.run.codegen.result_layouts import ResultLayouts

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]


def test_a_result_with_other_strides_is_copied() -> None:
    layouts = ResultLayouts()
    given = torch.arange(6.0).reshape(3, 2).t()  # [2, 3] by [1, 2]
    fitted = layouts.fitter(7, Layout((2, 3), (3, 1)))(given)
    assert fitted is not None
    assert fitted.stride() == (3, 1)
    assert torch.equal(fitted, given)
    assert layouts.differing == {7}


def test_strides_of_single_entries_do_not_matter() -> None:
    layouts = ResultLayouts()
    given = torch.zeros(1, 3)
    fitted = layouts.fitter(7, Layout((1, 3), (99, 1)))(given)
    assert fitted is not None
    assert fitted.data_ptr() == given.data_ptr()
    assert fitted.stride() == (99, 1)
    assert layouts.differing == set()
    assert layouts.fitter(7, Layout((1, 3), (3, 1)))(given) is given
    assert layouts.fitter(7, Layout((1, 4), (4, 1)))(given) is given, "the sizes depend on data"


class ChannelsLast(nn.Module):
    """Convolutions in channels_last with dropout, whose mask is drawn in the order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.Dropout(0.5), nn.Conv2d(8, 8, 3, padding=1), nn.GLU(1), nn.Hardswish(), nn.Dropout2d(0.2)
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.output = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.layers(x).mean((2, 3)))  # type: ignore[no-any-return]


def test_dropout_after_convolutions_in_channels_last() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = ChannelsLast()
        return model, torch.optim.SGD(model.parameters(), 0.1)

    for memory_format in (torch.contiguous_format, torch.channels_last):
        batches: list[Any] = [
            (torch.randn(4, 3, 6, 6).contiguous(memory_format=memory_format), torch.randn(4, 2)) for _ in range(3)
        ]
        assert_runs_like_eager(build, nn.MSELoss(), batches)


class Normalized(nn.Module):
    """Group norm after an attention's transposed output, which is channels_last; a CPU keeps that, other devices do not."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.output = nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        return self.output(nn.functional.dropout(self.norm(mixed), 0.5)).mean((2, 3))  # type: ignore[no-any-return]


@pytest.mark.parametrize("rows", [4, 1])
def test_dropout_after_group_norm_draws_what_eager_code_draws(rows: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Normalized()
        return model, torch.optim.SGD(model.parameters(), 0.1)

    batches: list[Any] = [(torch.randn(rows, 8, 6, 6), torch.randn(rows, 2)) for _ in range(3)]
    assert_runs_like_eager(build, nn.MSELoss(), batches)


def test_the_first_step_finds_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later steps look at these ops alone. Here: a kernel whose layout PyTorch's meta kernel gets wrong."""
    monkeypatch.delitem(OVERRIDES, torch.ops.aten.glu_backward.default)
    model = ChannelsLast()
    batch = (torch.randn(4, 3, 6, 6), torch.randn(4, 2))
    step = pw.capture(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), batch)
    train_step = compiled(step)
    first = train_step._lanes
    train_step(batch)
    assert {step.graph.ops.kinds[op] for op in train_step._layouts.differing} == {"aten.glu_backward"}
    assert train_step._lanes is not first
    second = train_step._lanes
    train_step(batch)
    assert train_step._lanes is second
    train_step.close()
