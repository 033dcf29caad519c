"""Autocast while a step is recorded: on the meta device, the casts that PyTorch makes on a GPU or a CPU.

The meta device has no autocast, and `torch.autocast("cuda")` switches itself off where there is no GPU. So while a step is
recorded, `torch.autocast` is replaced. Ours uses an autocast dispatch key that no device here has (Graphcore's), with
kernels that cast as PyTorch's own do. The dispatcher calls them where it would call PyTorch's: above autograd, also for ops
inside composite ones. So casts are differentiated, recorded and cached as in eager code.

The installed PyTorch says which ops are cast: those with a kernel under AutocastCUDA or AutocastCPU. The lists below are
those of its `ATen/autocast_mode.h`; an op that is in none of them computes in float32.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from placewise.core.errors import CaptureError

_KEY = torch._C.DispatchKey.AutocastIPU  # type: ignore[attr-defined]
_KEY_DEVICE = "ipu"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER_PRECISION = _names("""
    _convolution _convolution.deprecated conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc
    conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose
    prelu addmm _addmm_activation addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul
    linalg_multi_dot mkldnn_rnn_layer _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention _native_multi_head_attention
""")
SETS_DTYPE = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")  # on a GPU: the result is float32 unless the caller chose a type
WITH_DTYPE = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}  # on a GPU: other overloads
PROMOTED = {  # all tensors take the widest type among them
    "cuda": _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"),
    "cpu": _names("stack cat index_copy"),
}
DISPATCH_KEYS = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}


@dataclass
class _State:
    """What the innermost autocast context says."""

    device: str = ""  # "cuda" or "cpu": whose casts are made; "" while no context was enabled yet
    dtype: torch.dtype = torch.bfloat16
    caches: bool = True
    weights: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict)  # a parameter and its cast


_state = _State()  # recording is not thread-safe: torch.autocast is patched for the whole process


@contextmanager
def recorded_autocast() -> Iterator[None]:
    """Replaces torch.autocast by one that works on the meta device."""
    global _state
    kind = torch.amp.autocast_mode.autocast
    originals = kind.__init__, kind.__enter__, kind.__exit__
    cast_inputs = torch.amp.autocast_mode._cast  # of torch.amp.custom_fwd
    _state = _State()
    kind.__init__, kind.__enter__, kind.__exit__ = _init, _enter, _exit  # type: ignore[method-assign]
    torch.amp.autocast_mode._cast = _cast_inputs
    try:
        yield
    finally:
        kind.__init__, kind.__enter__, kind.__exit__ = originals  # type: ignore[method-assign]
        torch.amp.autocast_mode._cast = cast_inputs
        _state = _State()


def _init(
    self: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None
) -> None:
    device = "" if device_type == "meta" else device_type  # a model that asks a tensor for its device: the context's own
    if device not in ("", *DISPATCH_KEYS):
        raise CaptureError(f"autocast for {device_type!r} can't be recorded, only for 'cuda' and 'cpu'")
    self.device, self._enabled = device, enabled
    self.fast_dtype = dtype
    self._cache_enabled = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
    if enabled and dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
        raise CaptureError(f"autocast to {dtype} can't be recorded, only to bfloat16 and float16")


def _enter(self: Any) -> Any:
    self._before = (_state.device, _state.dtype, _state.caches, torch.is_autocast_enabled(_KEY_DEVICE))
    device = self.device or _state.device or "cuda"
    if self._enabled and _state.device and device != _state.device:
        raise CaptureError(f"the step has autocast for {_state.device!r} and for {device!r}: use one of them")
    if not _state.device or device == _state.device:  # a context for another device has no effect on this one's ops
        if self._enabled:
            _state.device = device
        _state.dtype = self.fast_dtype or torch.get_autocast_dtype(device)
        _state.caches = self._cache_enabled
        _switch(device, self._enabled and _state.dtype != torch.float32)
    return self


def _exit(self: Any, *_: Any) -> None:
    device, _state.dtype, _state.caches, was_enabled = self._before
    _switch(_state.device or "cuda", was_enabled)
    _state.device = device or _state.device  # it stays known, so that contexts for two devices are noticed


def _cast_inputs(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Casts the inputs of a function with `custom_fwd(cast_inputs=...)`; PyTorch's own leaves tensors on the meta device."""
    if isinstance(value, Tensor):
        return value.to(dtype) if _is_cast(value) else value
    if isinstance(value, dict):
        return {key: _cast_inputs(entry, device_type, dtype) for key, entry in value.items()}
    return type(value)([_cast_inputs(e, device_type, dtype) for e in value]) if isinstance(value, (list, tuple)) else value


def _switch(device: str, enabled: bool) -> None:
    if enabled:
        _register()
    torch.set_autocast_enabled(_KEY_DEVICE, enabled)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, enabled)
    torch.set_autocast_enabled(device, enabled)  # for code that asks; it has no effect on the meta device
    torch.set_autocast_dtype(device, _state.dtype)


def attention_type() -> torch.dtype | None:
    """Returns the type that autocast casts the inputs of attention to; None if it does not."""
    is_cast = torch.is_autocast_enabled(_KEY_DEVICE) and "scaled_dot_product_attention" in cast_ops(_state.device)
    return _state.dtype if is_cast else None


# --- the kernels ---


@cache
def _register() -> tuple["torch.library.Library", ...]:
    """Registers the kernels, once for the process; other ops pass through."""
    anything, aten = (torch.library.Library(space, "IMPL") for space in ("_", "aten"))  # type: ignore[no-untyped-call]
    anything.fallback(torch.library.fallthrough_kernel, "AutocastIPU")  # type: ignore[no-untyped-call]
    for name in sorted(set().union(*map(cast_ops, DISPATCH_KEYS))):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        aten.impl(op, _kernel(name, op), "AutocastIPU")  # type: ignore[no-untyped-call]
    return anything, aten


@cache
def cast_ops(device: str) -> frozenset[str]:
    """Returns the names of the ops that autocast casts on a kind of device, as the installed PyTorch has them."""
    has_kernel, key = torch._C._dispatch_has_kernel_for_dispatch_key, DISPATCH_KEYS[device]
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return frozenset(name.removeprefix("aten::") for name in names if has_kernel(name, key))


def _kernel(name: str, op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if name not in cast_ops(_state.device) and op._can_decompose():
            return op.decompose(*args, **kwargs)  # on this device only the ops inside are cast
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, True)
        try:
            return _call(name, op, args, kwargs)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, False)

    return kernel


def _call(name: str, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = _state.device
    if name not in cast_ops(device):
        return op(*args, **kwargs)
    if name in LOWER_PRECISION:
        return _cast_call(op, args, kwargs, _state.dtype)
    if name in PROMOTED[device]:
        return _cast_call(op, args, kwargs, _widest(args, _state.dtype))
    if device == "cuda":
        if name == "binary_cross_entropy":
            raise CaptureError(
                "binary_cross_entropy is unsafe under autocast, and PyTorch refuses it: use binary_cross_entropy_with_logits"
            )
        if name in SETS_DTYPE:
            return _call_with_dtype(op, args, kwargs) if _is_cast(args[0]) else op(*args, **kwargs)
        if name in WITH_DTYPE:
            dtype = torch.float32 if _is_cast(args[0]) else args[0].dtype
            return getattr(torch.ops.aten.norm, WITH_DTYPE[name])(*args, **kwargs, dtype=dtype)
    return _cast_call(op, args, kwargs, torch.float32)


def _call_with_dtype(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an op with the dtype float32, unless the caller chose one; C++ passes it, and None, by position."""
    position = [argument.name for argument in op._schema.arguments].index("dtype")
    if len(args) > position:
        return op(*args[:position], args[position] or torch.float32, *args[position + 1 :], **kwargs)
    return op(*args, **{**kwargs, "dtype": kwargs.get("dtype") or torch.float32})


def _cast_call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    return op(*_cast(args, dtype), **{key: _cast(value, dtype) for key, value in kwargs.items()})


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Returns an argument with its floating-point tensors cast; a parameter is cast once in a step.

    PyTorch forgets its casts when the outermost context ends, so it casts once for each micro-batch, with the same result.
    """
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(entry, dtype) for entry in value])
    if not isinstance(value, Tensor) or not _is_cast(value) or value.dtype == dtype:
        return value
    lowers = dtype == _state.dtype and value.dtype == torch.float32
    if not (lowers and value.requires_grad and value.is_leaf and not value._is_view() and _state.caches):
        return value.to(dtype)
    if (id(value), dtype) not in _state.weights:
        _state.weights[id(value), dtype] = (value, value.to(dtype))
    return _state.weights[id(value), dtype][1]


def _is_cast(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _widest(args: Any, dtype: torch.dtype) -> torch.dtype:
    """Returns float32 if a tensor among the arguments has it, otherwise the type of autocast."""
    entries = [e for arg in args for e in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return torch.float32 if any(_is_cast(entry) and entry.dtype == torch.float32 for entry in entries) else dtype
