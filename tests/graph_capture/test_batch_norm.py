"""Batch norm is recorded as the op that takes cuDNN on a GPU where eager code does; on a CPU it has eager's bits."""

from typing import Any

import pytest
import torch
from compiled_steps import assert_runs_like_eager, capture_with_mse
from torch import Tensor, nn

import placewise as pw
from placewise.graph_capture.meta_overrides import OVERRIDES

aten = torch.ops.aten

PORTABLE, PLAIN = "aten._batch_norm_with_update", "aten.native_batch_norm"

WAYS: dict[str, tuple[dict[str, Any], str]] = {  # how the layer is built -> the op that it becomes in training
    "affine": ({}, PORTABLE),
    "bfloat16": ({"dtype": torch.bfloat16}, PORTABLE),
    "not affine": ({"affine": False}, PLAIN),
    "without statistics": ({"track_running_stats": False}, PLAIN),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def convolutions(dtype: torch.dtype = torch.float32, **how: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, **how), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(dtype)


def batches(
    memory_format: torch.memory_format = torch.contiguous_format, dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    images = [torch.randn(4, 3, 9, 9).to(dtype, memory_format=memory_format) for _ in range(3)]
    return [(image, torch.randn(4, 4, 5, 5, dtype=dtype)) for image in images]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("way", WAYS)
def test_steps_have_eagers_bits(way: str, memory_format: torch.memory_format) -> None:
    how, kind = WAYS[way]

    def build() -> Any:
        model = convolutions(**how).to(memory_format=memory_format)  # type: ignore[call-overload]
        return model, torch.optim.SGD(model.parameters(), 0.1)

    given = batches(memory_format, how.get("dtype", torch.float32))
    model, optimizer = build()
    kinds = capture_with_mse(model, optimizer, given[0]).graph.ops.kinds
    assert [name for name in kinds if name in (PORTABLE, PLAIN)] == [kind]
    for micro_batches in (1, 2):
        assert_runs_like_eager(build, nn.MSELoss(), given, micro_batches)


def test_frozen_statistics_and_no_rows_are_as_they_were() -> None:
    """In evaluation, and for no numbers at all, PyTorch has no such op."""

    def build() -> Any:
        model = convolutions().eval()
        return model, torch.optim.SGD(model.parameters(), 0.1)

    assert_runs_like_eager(build, nn.MSELoss(), batches())
    assert PLAIN in pw.capture_inference(convolutions().eval(), torch.randn(4, 3, 9, 9)).graph.ops.kinds


def test_statistics_of_another_length_are_refused() -> None:
    model = convolutions()
    model[1].running_mean = torch.zeros(3)
    with pytest.raises(pw.CaptureError, match="running_mean should contain 8 elements not 3"):
        capture_with_mse(model, torch.optim.SGD(model.parameters(), 0.1), batches()[0])


def test_recording_changes_nothing_outside() -> None:
    x, mean, variance = (torch.ones(size, device="meta") for size in ((4, 3), 3, 3))
    calls: list[str] = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    model = convolutions()
    capture_with_mse(model, torch.optim.SGD(model.parameters(), 0.1), batches()[0])
    with Names():  # type: ignore[no-untyped-call]
        nn.functional.batch_norm(x, mean, variance, training=True)
    assert "aten.native_batch_norm.default" in calls


@pytest.mark.parametrize("names", [("native_batch_norm", "native_batch_norm_backward"), (PORTABLE, "batch_norm_backward")])
def test_results_for_a_transposed_input_are_contiguous(names: tuple[str, str]) -> None:
    """Rows and columns are swapped in memory; PyTorch's meta kernel would keep that, the CPU's does not."""
    results = []
    for device in ("cpu", "meta"):
        x = torch.ones(4, 6, device=device).t()
        weight, bias, mean, variance = (torch.ones(4, device=device) for _ in range(4))
        ops = [getattr(aten, name.removeprefix("aten.")).default for name in names]
        forward, backward = [OVERRIDES[op] for op in ops] if device == "meta" else ops
        training = [True] if names[0] != PORTABLE else []
        out, saved_mean, saved_rstd, *reserve = forward(x, weight, bias, mean, variance, *training, 0.1, 1e-5)
        gradient = torch.ones(6, 4, device=device)
        saved = (mean, variance, saved_mean, saved_rstd)
        made = backward(gradient, x, weight, *saved, True, 1e-5, [True, True, True], *reserve)
        results.append([tensor.stride() for tensor in (out, *made)])
    assert results[0] == results[1]
    assert results[0][0] == (4, 1)
