"""Estimates what a recorded op costs: flops and their type, bytes moved, and the kinds of device that can run it.

The flops of matrix products, convolutions and attention come from torch's flop counter. For all other ops they are
`FLOPS_PER_ELEMENT` (1 by default, 0 for ops that only move data) times the number of elements of the largest tensor that the
op reads or writes; these ops are bound by memory anyway, and count as float32. The bytes are the fewest that an op must
move: every element of its inputs once, every element of its outputs once. A lookup (`LOOKUPS`) reads as much of its first
input as it writes, a scatter (`SCATTERS`) writes as much as it reads, and an op that only overwrites (`OVERWRITES`) does not
read what it overwrites.
"""

from typing import Any

import torch
from torch._ops import OpOverload

from placewise.core.graph import COMPUTE_TYPES
from placewise.graph_capture.own_ops import OwnOp
from placewise.graph_capture.views import View

FLOPS_PER_ELEMENT = {
    "_softmax": 5, "_log_softmax": 5, "_softmax_backward_data": 4, "_log_softmax_backward_data": 4,
    "native_batch_norm": 6, "native_batch_norm_backward": 9, "_batch_norm_with_update": 6, "batch_norm_backward": 9,
    "native_layer_norm": 6, "native_layer_norm_backward": 11, "native_group_norm": 6, "native_group_norm_backward": 11,
    "sigmoid": 4, "sigmoid_": 4, "tanh": 6, "tanh_": 6, "gelu": 10, "gelu_backward": 15, "silu": 5, "silu_backward": 8,
    "sigmoid_backward": 3, "tanh_backward": 3, "addcmul": 3, "addcmul_": 3, "addcdiv": 3, "addcdiv_": 3,
    "_fused_adam_": 15, "_fused_adamw_": 15, "_fused_sgd_": 6, "_fused_adagrad_": 8,
    "lerp": 3, "lerp_": 3, "mv": 2, "addmv": 2, "dot": 2, "addr": 2,
}  # fmt: skip

MOVES_ONLY = frozenset({
    "clone", "copy", "copy_", "_to_copy", "cat", "stack", "repeat", "flip", "roll", "tril", "triu", "constant_pad_nd",
    "zeros", "zero", "zero_", "ones", "full", "fill", "fill_", "zeros_like", "ones_like", "full_like", "new_zeros",
    "new_ones", "new_full", "arange", "eye", "scalar_tensor", "embedding", "index", "index_select", "gather",
    "slice_backward", "select_backward", "slice_scatter", "select_scatter",
})  # fmt: skip

ALLOCATES_ONLY = frozenset({
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
})  # fmt: skip

SHAPE_ONLY = frozenset({  # ops that read the shape of their first argument, not its data
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_empty_strided",
})  # fmt: skip

LOOKUPS = frozenset({"embedding", "index", "index_select", "gather"})

SCATTERS = frozenset({"index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_"})

OVERWRITES = frozenset({"copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "random_", "exponential_"})

BATCH_NORM = {  # positions of the running statistics and of `training`, which the schema does not mark as written
    "native_batch_norm": ((3, 4), 5),  # writes them in training
    "native_batch_norm_backward": ((3, 4), 7),  # ignores them in training
    "batch_norm_backward": ((3, 4), 7),  # so does the one that chooses its kernel where it runs
}

CPU_ONLY_PREFIXES = ("mkldnn_", "_mkldnn_", "_scaled_dot_product_flash_attention_for_cpu")

GPU_ONLY_PREFIXES = (
    "cudnn_", "_cudnn_", "miopen_", "_fused_", "_thnn_fused_", "_efficient_attention", "_flash_attention",
    "_scaled_dot_product_efficient", "_scaled_dot_product_cudnn", "_scaled_dot_product_flash_attention",
)  # fmt: skip

FUSED_UPDATES = ("_fused_adam", "_fused_sgd", "_fused_adagrad")  # on all devices, unlike other names that begin like that

INTEGER_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmv", "dot"})


TYPE_OF_DTYPE = {  # of the inputs of a product; all others count as float32
    torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64", torch.complex128: "float64",
    torch.float8_e4m3fn: "float8", torch.float8_e5m2: "float8", torch.int8: "int8",
}  # fmt: skip


def _grouped_mm_flops(a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    """Returns the flops of a product of groups of rows with a matrix each: each row, or column, is in one group."""
    return 2 * int(a.numel()) * int(b.size(-1))


class OpFacts:
    """The facts about an ATen overload that recording needs, looked up once."""

    __slots__ = (
        "allocates", "batch_norm", "changes_shape", "flops_formula", "flops_per_element", "is_view", "kind", "lookup",
        "mutated", "name", "overwrites", "random", "recorded", "scatter", "shape_only", "takes_device",
    )  # fmt: skip

    def __init__(self, function: OpOverload) -> None:
        from torch.utils.flop_counter import flop_registry

        packet = function._overloadpacket
        self.name: str = packet.__name__
        self.kind = f"{function.namespace}.{self.name}"
        self.recorded = function.namespace != "profiler"
        self.flops_formula = _grouped_mm_flops if self.name == "_grouped_mm" else flop_registry.get(packet)
        self.shape_only = self.name in SHAPE_ONLY
        self.takes_device = any(argument.name == "device" for argument in function._schema.arguments)
        self.random = torch.Tag.nondeterministic_seeded in function.tags
        self.allocates = self.name in ALLOCATES_ONLY
        self.changes_shape = torch.Tag.inplace_view in function.tags  # squeeze_, t_, resize_
        self.lookup = self.name in LOOKUPS
        self.scatter = self.name in SCATTERS
        self.overwrites = self.name in OVERWRITES
        moves = self.name in MOVES_ONLY or self.allocates
        self.flops_per_element = 0 if moves else FLOPS_PER_ELEMENT.get(self.name, 1)
        self.is_view = function.is_view or self.name in ("_unsafe_view", "unsafe_split", "unsafe_chunk")
        self.batch_norm = BATCH_NORM.get(self.name)
        self.mutated = frozenset(BATCH_NORM[self.name][0] if self.name == "native_batch_norm" else ()) | frozenset(
            argument.name if argument.kwarg_only else position
            for position, argument in enumerate(function._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )


class OwnFacts(OpFacts):
    """The same facts about an op of ours."""

    __slots__ = ()

    def __init__(self, function: OwnOp) -> None:
        self.name, self.kind, self.flops_formula = function.name, f"aten.{function.name}", function.flops
        self.mutated, self.batch_norm = function.mutated, None
        self.flops_per_element = FLOPS_PER_ELEMENT.get(self.name, 0)
        self.shape_only = self.takes_device = self.random = self.allocates = self.changes_shape = False
        self.lookup = self.scatter = self.overwrites = self.is_view = False


def estimated_flops(facts: OpFacts, inputs: list[View], outputs: list[View]) -> float:
    """Returns the flops of an op that torch's flop counter does not know."""
    if not facts.flops_per_element:
        return 0.0
    return float(facts.flops_per_element * max([view.elements for view in (*inputs, *outputs)], default=0))


def compute_type(facts: OpFacts, dtype: torch.dtype | None) -> int:
    """Returns the type that an op computes in if its first input has this dtype, as an index into COMPUTE_TYPES.

    Products in float32 use TF32 if PyTorch's settings allow that on a GPU: by default for convolutions only.
    """
    name = "float32"
    if facts.flops_formula is not None and dtype is not None:
        name = TYPE_OF_DTYPE.get(dtype, name)
        if dtype == torch.float32 and _uses_tf32(is_convolution="conv" in facts.name):
            name = "tf32"
    return COMPUTE_TYPES.index(name)


def _uses_tf32(is_convolution: bool) -> bool:
    """Returns PyTorch's setting; the older allow_tf32 sets the same, and can't be read where the newer one is in use."""
    precision: Any = torch.backends.cudnn.conv if is_convolution else torch.backends.cuda.matmul  # type: ignore[attr-defined]
    return bool(precision.fp32_precision == "tf32")


def bytes_moved(facts: OpFacts, inputs: list[View], outputs: list[View], written: list[View]) -> float:
    """Returns the bytes that an op must move; `written` are the outputs that it changes in place."""
    if facts.allocates:
        return 0.0
    made = sum([view.nbytes for view in outputs])
    if facts.lookup:
        return float(2 * made + sum([view.nbytes for view in inputs[1:]]))
    if facts.scatter:
        return float(sum([view.nbytes for view in inputs[1:]]) + max([view.nbytes for view in inputs[1:]], default=0))
    read = dict.fromkeys(inputs)
    if facts.overwrites:
        for view in written:
            read.pop(view, None)
    return float(made + sum([view.nbytes for view in read]))


def device_kinds(name: str, dtype: torch.dtype | None) -> tuple[str, ...] | None:
    """Returns the kinds of device that can run an op whose first input has this dtype, None: all.

    A CPU build of torch does not know which ops have GPU kernels, so the few exceptions are listed above by name.
    """
    if name.startswith(CPU_ONLY_PREFIXES):
        return ("cpu",)
    if name.startswith(GPU_ONLY_PREFIXES) and not name.startswith(FUSED_UPDATES):
        return ("gpu",)
    if name in INTEGER_PRODUCTS and dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        return ("cpu",)
    return None


def without_statistics(facts: OpFacts, args: Any) -> Any:
    """Returns the arguments of a batch norm; its backward in training ignores the running statistics and gets None."""
    assert facts.batch_norm is not None
    statistics, training = facts.batch_norm
    if facts.mutated or not args[training]:
        return args
    return tuple([None if position in statistics else value for position, value in enumerate(args)])
