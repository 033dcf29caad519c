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
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from placewise.graph_capture.call_slots import slots_of
from placewise.graph_capture.program import Call, Slot
from placewise.rewrite.piece import Piece

NO_COMPILER = "No working C++ compiler"  # in Inductor's error where there is none

RELEASE = (  # a C++ kernel as Python calls it, so that other threads run meanwhile: Inductor's own holds Python's lock
    "auto given = std::make_tuple({}); "
    "{{ struct Unlocked {{ PyThreadState* state = PyEval_SaveThread(); ~Unlocked() {{ PyEval_RestoreThread(state); }} }} "
    "unlocked; std::apply(kernel, given); }} Py_RETURN_NONE;"
)


def compile_piece(piece: Piece, device: torch.device, threads: int) -> Callable[..., Any]:
    """Returns a function from a piece's inputs to its results, on a device; on a CPU for this number of threads."""
    with warnings.catch_warnings(action="ignore"):  # a compiler's warnings are none of the user's
        from torch._inductor.compile_fx import compile_fx_inner
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with warnings.catch_warnings(action="ignore"), torch.no_grad(), _compiling(threads):
        graph, fakes = _trace(piece, device, mode)
        with tracing(TracingContext(mode)):
            compiled: Any = compile_fx_inner(graph, fakes, is_inference=True)
    call = getattr(compiled, "current_callable", None) or compiled

    def kernel(*given: Any) -> Any:
        return call(list(given))

    def kernel_with_numbers(*given: Any) -> Any:
        return call([_as_tensor(value) if like is None else value for value, like in zip(given, piece.likes, strict=True)])

    run = kernel_with_numbers if None in piece.likes else kernel
    return _with_sizes(run, piece) if any(1 in like.sizes for like in piece.made) else run


def _with_sizes(run: Callable[..., Any], piece: Piece) -> Callable[..., Any]:
    """Returns a kernel whose results have the sizes that the piece says.

    Inductor of PyTorch 2.11 on GPUs returns (1536) for a large sum that keeps its dimensions, (1, 1, 1536).
    """
    sizes = [torch.Size(like.sizes) for like in piece.made]

    def fitted(*given: Any) -> Any:
        found = run(*given)
        return [tensor if tensor.size() == size else tensor.view(size) for tensor, size in zip(found, sizes, strict=True)]

    return fitted


def _as_tensor(number: Any) -> Tensor:
    """Returns a number of the host as a tensor, which is how a kernel takes it: another number needs no other kernel."""
    return number.double() if isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float64)


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

    numbers = frozenset(slot for slot, like in zip(piece.inputs, piece.likes, strict=True) if like is None)
    shapes: list[Tensor] = []  # tensors of which only the shape counts

    def fake(value: Any) -> Any:
        if isinstance(value, Tensor):
            shapes.append(torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device))
            return _Shape(len(shapes) - 1)
        return type(value)([fake(entry) for entry in value]) if type(value) in (list, tuple) else value

    with mode:
        fakes = [torch.empty((), dtype=torch.float64) if like is None else like.make(device) for like in piece.likes]
        calls = [_with_tensors(call, numbers)._replace(args=fake(call.args)) for call in piece.calls]

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
        table = {**select_decomp_table(), **DECOMPOSITIONS}
        traced = make_fx(run, decomposition_table=table, tracing_mode="real")(*fakes, *shapes)
    for node in [node for node in traced.graph.nodes if node.op == "placeholder"][len(fakes) :]:
        traced.graph.erase_node(node)  # fails if the value counts after all
    traced.recompile()
    output = next(iter(traced.graph.find_nodes(op="output")))  # without these, Inductor may pad the results' rows
    output.meta["user_visible_output_idxs"] = list(range(len(piece.made)))
    output.meta["original_output_strides"] = [like.strides for like in piece.made]
    return traced, fakes


def _nll_loss_backward(
    gradient: Tensor, scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int, total: Tensor
) -> Tensor:
    """Returns the gradient of a loss by comparing; PyTorch's own scatters into a matrix of zeros, which fills memory."""
    dim = 0 if scores.dim() < 2 else 1
    if reduction == MEAN:
        gradient = gradient / total
    if gradient.dim():
        gradient = gradient.unsqueeze(dim)
    shape = [-1 if i == dim else 1 for i in range(scores.dim())]
    if weight is not None:
        gradient = gradient * weight.view(shape)
    classes = torch.arange(scores.size(dim), device=scores.device).view(shape)
    target = target.reshape(target.shape if scores.dim() > 1 else ()).unsqueeze(dim)
    return torch.where((classes == target) & (target != ignored), -gradient, 0).to(scores.dtype)


MEAN = 1  # a reduction

aten = torch.ops.aten

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {  # instead of Inductor's
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.nll_loss2d_backward.default: _nll_loss_backward,
}

FORMS: dict[str, Callable[..., Tensor]] = {  # ops that read numbers of the host, with tensors in their place
    "add": lambda x, y, alpha=1: x + y * alpha,
    "sub": lambda x, y, alpha=1: x - y * alpha,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "pow": lambda x, y: x**y,
    "lerp": lambda x, end, weight: torch.where(weight < 0.5, x + weight * (end - x), end - (end - x) * (1 - weight)),
    "addcmul": lambda x, a, b, value=1: x + a * b * value,
    "addcdiv": lambda x, a, b, value=1: x + a / b * value,
}


def _with_tensors(call: Call, numbers: frozenset[Slot]) -> Call:
    """Returns a call that computes the same with tensors in the place of these numbers."""
    if numbers.isdisjoint(slots_of(call)):
        return call
    assert isinstance(call.function, OpOverload)
    name = call.function._overloadpacket.__name__
    form = FORMS.get(name.removesuffix("_"))
    if form is None:
        raise NotImplementedError(f"{name} reads a number of the host")

    def compute(first: Any, *args: Any, **kwargs: Any) -> Any:
        found = form(first, *args, **kwargs)
        return first.copy_(found) if name.endswith("_") else found

    return call._replace(function=compute)


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
