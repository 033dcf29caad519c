"""Slices of a GPU: streams whose kernels run on multiprocessors of their own (CUDA green contexts).

This calls the driver by ctypes, because PyTorch makes green contexts one by one, and they may share multiprocessors.
Contexts and streams stay until the process ends: PyTorch's allocator remembers streams, and a stream must outlast what it
has used.
"""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_ubyte, c_uint, c_void_p
from functools import cache
from itertools import accumulate
from math import gcd
from threading import Lock
from typing import TYPE_CHECKING, Any

from placewise.core.errors import ExecutionError
from placewise.machines.slices import Cut

if TYPE_CHECKING:
    import torch

LIBRARY = "libcuda.so.1"

SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM

DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, a flag that a green context must have

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, a flag that its streams must have

_CUTTING = Lock()  # two threads must not cut a GPU twice


class Resource(ctypes.Structure):
    """CUdevResource: 144 bytes in CUDA 12.4 and later; in CUDA 13 the last 8 bytes of the union became a pointer."""

    _fields_ = (
        ("type", c_int),
        ("internal", c_ubyte * 92),
        ("num_multiprocessors", c_uint),  # the first field of the union's CUdevSmResource
        ("others", c_ubyte * 44),
    )


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetDevResource": (c_int, POINTER(Resource), c_int),
    "cuDevSmResourceSplitByCount": (
        POINTER(Resource),
        POINTER(c_uint),
        POINTER(Resource),
        POINTER(Resource),
        c_uint,
        c_uint,
    ),
    "cuDevResourceGenerateDesc": (POINTER(c_void_p), POINTER(Resource), c_uint),
    "cuGreenCtxCreate": (POINTER(c_void_p), c_void_p, c_int, c_uint),
    "cuGreenCtxStreamCreate": (POINTER(c_void_p), c_void_p, c_uint, c_int),
}


def slice_streams(torch_device: str, cut: Cut) -> "list[torch.cuda.Stream]":
    """Returns a stream for each slice of a GPU; the same ones in every call.

    Equal slices have as many multiprocessors as the driver can give to all of them (on an H200, 4 slices have 32 of 132
    each). An ExecutionError says why a GPU can't be cut like this.
    """
    with _CUTTING:
        return _cut(torch_device, cut)


@cache
def _cut(torch_device: str, cut: Cut) -> "list[torch.cuda.Stream]":
    import torch

    device = torch.device(torch_device)
    torch.zeros(1, device=device)  # creates the primary context, which green contexts share
    driver = _Driver()
    number, whole = c_int(), Resource()
    driver("cuInit", 0)
    driver("cuDeviceGet", byref(number), device.index or 0)  # numbers follow CUDA_VISIBLE_DEVICES, as PyTorch's do
    driver("cuDeviceGetDevResource", number, byref(whole), SM_RESOURCE)
    with torch.cuda.device(device):
        return [
            torch.cuda.ExternalStream(_green_stream(driver, number, parts), device=device)  # type: ignore[no-untyped-call]
            for parts in _slices(driver, whole, cut, torch_device)
        ]


def _slices(driver: "_Driver", whole: Resource, cut: Cut, name: str) -> list[list[Resource]]:
    """Returns the parts of a GPU that each slice has: one of equal slices, several equal ones of others."""
    if isinstance(cut, int):
        return [[part] for part in _split(driver, whole, cut, name)]
    size = gcd(*cut)
    parts, found = (Resource * (sum(cut) // size))(), c_uint(sum(cut) // size)
    if sum(cut) <= whole.num_multiprocessors:
        driver("cuDevSmResourceSplitByCount", parts, byref(found), byref(whole), byref(Resource()), 0, size)
    if sum(cut) > whole.num_multiprocessors or found.value < len(parts) or parts[0].num_multiprocessors != size:
        raise ExecutionError(
            f"virtual devices: {name} has {whole.num_multiprocessors} multiprocessors, which can't be cut into slices of "
            f"{' and '.join(map(str, cut))}: sizes must be multiples of a number that the GPU supports, such as 8 or 32"
        )
    ends = list(accumulate(part // size for part in cut))
    return [list(parts)[end - part // size : end] for part, end in zip(cut, ends, strict=True)]


def _split(driver: "_Driver", whole: Resource, count: int, name: str) -> list[Resource]:
    """Returns equal parts of a GPU's multiprocessors, as large as the driver can make them."""
    trouble = ""
    for size in range(whole.num_multiprocessors // count, 0, -1):  # the driver rounds up to a size that the GPU supports
        parts, found, rest = (Resource * count)(), c_uint(count), Resource()
        try:
            driver("cuDevSmResourceSplitByCount", parts, byref(found), byref(whole), byref(rest), 0, size)
        except ExecutionError as problem:  # the GPU does not support this size
            trouble = f" ({problem})"
            continue
        if found.value == count:
            return list(parts)
    multiprocessors = whole.num_multiprocessors
    raise ExecutionError(
        f"virtual devices: {name} has {multiprocessors} multiprocessors, which can't be cut into {count} slices{trouble}"
    )


def _green_stream(driver: "_Driver", number: c_int, parts: list[Resource]) -> int:
    """Returns the driver's handle of a new stream in a new green context on the multiprocessors of these parts."""
    description, context, stream = c_void_p(), c_void_p(), c_void_p()
    driver("cuDevResourceGenerateDesc", byref(description), (Resource * len(parts))(*parts), len(parts))
    driver("cuGreenCtxCreate", byref(context), description, number, DEFAULT_STREAM)
    driver("cuGreenCtxStreamCreate", byref(stream), context, NON_BLOCKING, 0)
    assert stream.value
    return stream.value


class _Driver:
    """Calls functions of the CUDA driver; raises an ExecutionError if one fails or is missing."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as problem:
            raise ExecutionError(f"virtual devices: there is no CUDA driver: {problem}") from None

    def __call__(self, name: str, *args: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise ExecutionError(
                f"virtual devices: the CUDA driver has no {name}: green contexts need CUDA 12.4 or later"
            ) from None
        function.argtypes, function.restype = _ARGUMENTS[name], c_int
        if code := function(*args):
            raise ExecutionError(f"virtual devices: green contexts failed: {name} returned {self._error_name(code)}")

    def _error_name(self, code: int) -> str:
        text = c_char_p()
        self._library.cuGetErrorName(c_int(code), byref(text))
        return text.value.decode() if text.value else f"error {code}"
