"""Which ops can be part of a piece: those that compute each element by itself, reduce, or move data.

Products, convolutions, attention and scatters have kernels of their own. Random ops stay alone, because a compiled kernel
would draw other numbers. So do ops whose result has a size that depends on data.
"""

import torch
from torch import Tag
from torch._ops import OpOverload

from placewise.graph_capture.program import Call

REDUCTIONS = frozenset({
    "sum", "mean", "amax", "amin", "var", "var_mean", "std", "logsumexp", "linalg_vector_norm", "all", "any",
    "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward",
    "_softmax", "_safe_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
    "native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
    "_fused_rms_norm", "_fused_rms_norm_backward",
    "_batch_norm_with_update", "batch_norm_backward", "native_batch_norm", "native_batch_norm_backward",
})  # fmt: skip

MOVES = frozenset({
    "clone", "_to_copy", "copy", "copy_", "cat", "stack", "constant_pad_nd", "slice_backward", "select_backward",
    "slice_scatter", "select_scatter", "tril", "triu", "repeat", "flip", "where", "masked_fill",
})  # fmt: skip

CONSTANTS = frozenset({
    "zeros", "ones", "full", "arange", "scalar_tensor", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
    "new_full", "zero_", "fill_", "fill",
})  # fmt: skip

POINTWISE = frozenset({  # those that PyTorch doesn't tag as such
    "native_dropout_backward", "mse_loss", "mse_loss_backward", "glu", "glu_backward", "smooth_l1_loss", "huber_loss",
    "smooth_l1_loss_backward", "binary_cross_entropy", "binary_cross_entropy_backward",
})  # fmt: skip

NAMED = REDUCTIONS | MOVES | CONSTANTS | POINTWISE

NEVER = (Tag.nondeterministic_seeded, Tag.dynamic_output_shape, Tag.data_dependent_output, Tag.inplace_view)

DTYPES = frozenset({  # that Inductor's kernels compute with on CPUs and GPUs
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64,
})  # fmt: skip

DTYPE_NAMES = frozenset(str(dtype).removeprefix("torch.") for dtype in DTYPES)


def is_fusable(call: Call) -> bool:
    """Whether a call can be part of a piece, as far as its function says."""
    function = call.function
    if not isinstance(function, OpOverload) or function.namespace != "aten":
        return False
    if any(tag in function.tags for tag in NEVER):
        return False
    return Tag.pointwise in function.tags or function._overloadpacket.__name__ in NAMED
