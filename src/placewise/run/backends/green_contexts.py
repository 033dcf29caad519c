"""One GPU cut into virtual devices: streams whose kernels run on their own multiprocessors (CUDA green contexts).

Driver API through ctypes, for PyTorch's own green contexts are made one by one and may share multiprocessors. Contexts and
streams live as long as the process: PyTorch's allocator remembers streams, and a stream must outlast what it has used.
"""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_ubyte, c_uint, c_void_p
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from placewise.core.errors import ExecutionError
from placewise.run.devices import RealDevice

if TYPE_CHECKING:
    import torch

LIBRARY = "libcuda.so.1"

SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM

DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, which a green context must have

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, which its streams must be

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
        *(POINTER(Resource), POINTER(c_uint), POINTER(Resource)),
        *(POINTER(Resource), c_uint, c_uint),
    ),
    "cuDevResourceGenerateDesc": (POINTER(c_void_p), POINTER(Resource), c_uint),
    "cuGreenCtxCreate": (POINTER(c_void_p), c_void_p, c_int, c_uint),
    "cuGreenCtxStreamCreate": (POINTER(c_void_p), c_void_p, c_uint, c_int),
}


def slice_streams(torch_device: str, count: int) -> "list[torch.cuda.Stream]":
    """Returns a stream for each of `count` equal slices of a GPU; the same ones in every call.

    A slice has as many multiprocessors as the driver can give each (on an H200, 4 slices have 32 of 132). An
    ExecutionError says why a GPU can't be cut so.
    """
    with _CUTTING:
        return _cut(torch_device, count)


@cache
def _cut(torch_device: str, count: int) -> "list[torch.cuda.Stream]":
    import torch

    device = torch.device(torch_device)
    torch.zeros(1, device=device)  # makes the primary context, which green contexts share
    driver = _Driver()
    number, whole = c_int(), Resource()
    driver("cuInit", 0)
    driver("cuDeviceGet", byref(number), device.index or 0)  # CUDA_VISIBLE_DEVICES counts here as it does for PyTorch
    driver("cuDeviceGetDevResource", number, byref(whole), SM_RESOURCE)
    with torch.cuda.device(device):
        return [
            torch.cuda.ExternalStream(_green_stream(driver, number, piece), device=device)  # type: ignore[no-untyped-call]
            for piece in _split(driver, whole, count, torch_device)
        ]


def stream_of(device: RealDevice) -> "torch.cuda.Stream":
    """Returns the stream that the ops of a GPU, or of a slice of one, are launched on; the same one in every call."""
    if device.slice is None:
        with _CUTTING:
            return _whole(device.torch_device)
    index, count = device.slice
    return slice_streams(device.torch_device, count)[index]


@cache
def _whole(torch_device: str) -> "torch.cuda.Stream":
    import torch

    return torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]


def _split(driver: "_Driver", whole: Resource, count: int, name: str) -> list[Resource]:
    """Returns equal parts of a GPU's multiprocessors, as large as the driver can make them."""
    trouble = ""
    for size in range(whole.num_multiprocessors // count, 0, -1):  # the driver rounds up to what the GPU can do
        parts, found, rest = (Resource * count)(), c_uint(count), Resource()
        try:
            driver("cuDevSmResourceSplitByCount", parts, byref(found), byref(whole), byref(rest), 0, size)
        except ExecutionError as problem:  # this size is none that it can make
            trouble = f" ({problem})"
            continue
        if found.value == count:
            return list(parts)
    multiprocessors = whole.num_multiprocessors
    raise ExecutionError(
        f"virtual devices: {name} has {multiprocessors} multiprocessors, which can't be cut into {count} slices{trouble}"
    )


def _green_stream(driver: "_Driver", number: c_int, part: Resource) -> int:
    """Returns a new stream of a new green context on these multiprocessors, as the driver's handle."""
    description, context, stream = c_void_p(), c_void_p(), c_void_p()
    driver("cuDevResourceGenerateDesc", byref(description), byref(part), 1)
    driver("cuGreenCtxCreate", byref(context), description, number, DEFAULT_STREAM)
    driver("cuGreenCtxStreamCreate", byref(stream), context, NON_BLOCKING, 0)
    assert stream.value
    return stream.value


class _Driver:
    """Calls functions of the CUDA driver; one that fails, or is missing, is an ExecutionError."""

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
                f"virtual devices: the CUDA driver has no {name}: green contexts need 12.4 or later"
            ) from None
        function.argtypes, function.restype = _ARGUMENTS[name], c_int
        if code := function(*args):
            raise ExecutionError(f"virtual devices: green contexts failed: {name} says {self._error(code)}")

    def _error(self, code: int) -> str:
        text = c_char_p()
        self._library.cuGetErrorName(c_int(code), byref(text))
        return text.value.decode() if text.value else f"error {code}"
