"""Compiles a piece with PyTorch's compiler, Inductor: C++ for a CPU, Triton for a GPU.

Of Inductor only the part from a graph of ATen calls to a kernel is used, without Dynamo's guards and autograd's wrappers:
a call of a kernel takes the host a few microseconds. Inductor keeps what it has compiled in its own cache on disk
(TORCHINDUCTOR_CACHE_DIR), so that the next process finds it there.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from placewise.rewrite.piece import Piece

Kernel = Callable[..., Any]  # takes a piece's inputs, returns its results

RELEASE = (  # a C++ kernel as Python calls it, so that other threads run meanwhile: Inductor's own holds Python's lock
    "auto given = std::make_tuple({}); "
    "{{ struct Unlocked {{ PyThreadState* state = PyEval_SaveThread(); ~Unlocked() {{ PyEval_RestoreThread(state); }} }} "
    "unlocked; std::apply(kernel, given); }} Py_RETURN_NONE;"
)


def compile_piece(piece: Piece, device: torch.device, threads: int) -> Kernel:
    """Returns the kernel of a piece on a device; on a CPU for this number of threads."""
    with warnings.catch_warnings(action="ignore"):  # a compiler's warnings are none of the user's
        from torch._inductor.compile_fx import compile_fx_inner
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with warnings.catch_warnings(action="ignore"), torch.no_grad(), _compiling(threads):
        graph, fakes = _trace(piece, device, mode)
        with tracing(TracingContext(mode)):
            compiled: Any = compile_fx_inner(graph, fakes, is_inference=True)
    call = getattr(compiled, "current_callable", None) or compiled

    def kernel(*given: Tensor) -> Any:
        return call(list(given))

    return kernel


@contextmanager
def _compiling(threads: int) -> Iterator[None]:
    """Sets what kernels are compiled with."""
    from torch._inductor import codecache, config

    binding: Any = getattr(codecache, "CppPythonBindingsCodeCache", None)
    settings = {"cpp.threads": threads} if threads else {}
    with ExitStack() as stack:
        stack.enter_context(config.patch(settings))
        if getattr(binding, "call_entry_function", "") == "kernel({}); Py_RETURN_NONE;":
            stack.enter_context(patch.object(binding, "call_entry_function", RELEASE))
        yield


def _trace(piece: Piece, device: torch.device, mode: FakeTensorMode) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """Returns the calls of a piece as a graph without views and writes in place, but for copies to inputs at its end."""
    from torch._inductor.decomposition import select_decomp_table

    shapes: list[Tensor] = []  # tensors of which only the shape counts

    def fake(value: Any) -> Any:
        if isinstance(value, Tensor):
            shapes.append(torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device))
            return _Shape(len(shapes) - 1)
        return type(value)([fake(entry) for entry in value]) if type(value) in (list, tuple) else value

    with mode:
        fakes = [like.make(device) for like in piece.likes]
        calls = [call._replace(args=fake(call.args)) for call in piece.calls]

    def run(*given: Tensor) -> list[Tensor]:
        with FunctionalTensorMode():
            wrapped = [FunctionalTensor.to_functional(tensor) for tensor in given]
            made = piece.run_calls(_with_shapes(calls, wrapped[len(fakes) :]), device, wrapped[: len(fakes)])
            made = [_unwrap(tensor) for tensor in made]
            written = {number: _unwrap(wrapped[number]) for number in piece.written}
        for number, value in written.items():
            given[number].copy_(value)
        return made

    with mode:
        traced = make_fx(run, decomposition_table=select_decomp_table(), tracing_mode="real")(*fakes, *shapes)
    for node in [node for node in traced.graph.nodes if node.op == "placeholder"][len(fakes) :]:
        traced.graph.erase_node(node)  # fails if the value counts after all
    traced.recompile()
    return traced, fakes


class _Shape(int):
    """The number of a tensor of which only the shape counts."""


def _with_shapes(calls: list[Any], shapes: list[Any]) -> list[Any]:
    def put(value: Any) -> Any:
        if type(value) is _Shape:
            return shapes[value]
        return type(value)([put(entry) for entry in value]) if type(value) in (list, tuple) else value

    return [call._replace(args=put(call.args)) for call in calls]


def _unwrap(tensor: Any) -> Tensor:
    torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
    found: Tensor = torch._from_functional_tensor(tensor.elem)
    return found
