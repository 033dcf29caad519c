"""Batch norm of a transposed input: the recorded layouts are those of the CPU's kernels."""

import torch

from placewise.graph_capture.meta_overrides import OVERRIDES

aten = torch.ops.aten


def test_results_for_a_transposed_input_are_contiguous() -> None:
    """Rows and columns are swapped in memory; PyTorch's meta kernel would keep that, the CPU's does not."""
    results = []
    for device in ("cpu", "meta"):
        x = torch.ones(4, 6, device=device).t()
        weight, bias, mean, variance = (torch.ones(4, device=device) for _ in range(4))
        ops = [aten.native_batch_norm.default, aten.native_batch_norm_backward.default]
        forward, backward = [OVERRIDES[op] for op in ops] if device == "meta" else ops
        out, saved_mean, saved_rstd = forward(x, weight, bias, mean, variance, True, 0.1, 1e-5)
        gradient = torch.ones(6, 4, device=device)
        saved = (mean, variance, saved_mean, saved_rstd)
        made = backward(gradient, x, weight, *saved, True, 1e-5, [True, True, True])
        results.append([tensor.stride() for tensor in (out, *made)])
    assert results[0] == results[1]
    assert results[0][0] == (4, 1)
