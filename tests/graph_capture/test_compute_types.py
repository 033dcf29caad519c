"""The types that captured ops compute in: products in that of their inputs, or in TF32 as PyTorch's settings say."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placewise as pw
from placewise.core.cluster import Cluster
from placewise.core.costs import predict_op_seconds
from placewise.core.graph import COMPUTE_TYPES, Graph
from placewise.formats.cluster_file import parse_cluster
from placewise.graph_capture.op_costs import OpFacts, compute_type

PRODUCTS = {"aten.addmm", "aten.mm", "aten.convolution", "aten.convolution_backward"}


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


def squared(output: Tensor) -> Tensor:
    return output.float().pow(2).mean()


def captured(dtype: torch.dtype = torch.float32, **options: Any) -> Graph:
    model = cnn().to(dtype)
    batch = torch.zeros(2, 3, 6, 6, dtype=dtype)
    return pw.capture(model, squared, torch.optim.SGD(model.parameters(), 0.1), batch, **options).graph


def types_by_kind(graph: Graph) -> dict[str, str]:
    """Returns the type that each kind of op computes in; all ops of a kind must agree."""
    found: dict[str, set[str]] = {}
    for kind, number in zip(graph.ops.kinds, graph.ops.compute.tolist(), strict=True):
        found.setdefault(kind, set()).add(COMPUTE_TYPES[number])
    assert all(len(types) == 1 for types in found.values()), found
    return {kind: types.pop() for kind, types in found.items()}


@pytest.fixture(autouse=True)
def _restored_settings() -> Iterator[None]:
    """Sets back what a test changes; matrix products start in float32, convolutions in TF32, as PyTorch does."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)


def set_allow_tf32(value: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = value


def set_cudnn_allow_tf32(value: bool) -> None:
    torch.backends.cudnn.allow_tf32 = value


def set_precisions(matmul: str, convolution: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = matmul
    torch.backends.cudnn.conv.fp32_precision = convolution  # type: ignore[attr-defined]


SETTINGS: dict[str, tuple[Callable[[], None], str, str]] = {  # what is set -> the type of matrix products, of convolutions
    "defaults": (lambda: None, "float32", "tf32"),
    "high": (lambda: torch.set_float32_matmul_precision("high"), "tf32", "tf32"),
    "medium": (lambda: torch.set_float32_matmul_precision("medium"), "tf32", "tf32"),
    "highest": (lambda: torch.set_float32_matmul_precision("highest"), "float32", "tf32"),
    "allow_tf32": (lambda: set_allow_tf32(True), "tf32", "tf32"),
    "no allow_tf32": (lambda: set_allow_tf32(False), "float32", "tf32"),
    "no cudnn.allow_tf32": (lambda: set_cudnn_allow_tf32(False), "float32", "float32"),
    "fp32_precision": (lambda: set_precisions("tf32", "ieee"), "tf32", "float32"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_products_in_float32_use_tf32_where_the_settings_allow_it(name: str) -> None:
    change, product, convolution = SETTINGS[name]
    change()
    types = types_by_kind(captured())
    assert set(types) >= PRODUCTS
    assert {types[kind] for kind in ("aten.addmm", "aten.mm")} == {product}
    assert {types[kind] for kind in ("aten.convolution", "aten.convolution_backward")} == {convolution}
    assert {types[kind] for kind in set(types) - PRODUCTS} == {"float32"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_products_compute_in_the_type_of_their_inputs(dtype: torch.dtype) -> None:
    types = types_by_kind(captured(dtype))
    assert {types[kind] for kind in PRODUCTS} == {str(dtype).removeprefix("torch.")}
    assert {types[kind] for kind in set(types) - PRODUCTS} == {"float32"}


def test_autocast_computes_products_in_its_type_and_the_rest_in_float32() -> None:
    torch.set_float32_matmul_precision("high")  # is about products in float32
    types = types_by_kind(captured(autocast=torch.bfloat16))
    assert {types[kind] for kind in PRODUCTS} == {"bfloat16"}
    assert {types[kind] for kind in set(types) - PRODUCTS} == {"float32"}


def captured_encoder() -> Graph:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())
    return pw.capture(model, squared, optimizer, torch.zeros(2, 5, 8), autocast=torch.float16).graph


def test_attention_as_one_op_computes_in_the_type_of_its_inputs() -> None:
    types = types_by_kind(captured_encoder())
    name = "aten.scaled_dot_product_attention"
    assert (types[name], types[f"{name}_backward"]) == ("float16", "float16")


@pytest.mark.parametrize(("is_allowed", "inside"), [(False, "float32"), (True, "float16")])
def test_attention_multiplies_in_float32_unless_the_lower_type_is_allowed(is_allowed: bool, inside: str) -> None:
    """The math kernel of scaled_dot_product_attention casts its inputs; `aten.bmm` is only inside of it here."""
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(is_allowed)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        types = types_by_kind(captured_encoder())
    assert (types["aten.mm"], types["aten.addmm"], types["aten.bmm"]) == ("float16", "float16", inside)


@pytest.mark.parametrize(
    ("function", "dtype", "expected"),
    [
        (torch.ops.aten.mm.default, torch.bfloat16, "bfloat16"),
        (torch.ops.aten._scaled_mm.default, torch.float8_e4m3fn, "float8"),
        (torch.ops.aten.mm.default, torch.complex64, "float32"),
        (torch.ops.aten.mm.default, torch.int64, "float32"),
        (torch.ops.aten._grouped_mm.default, torch.bfloat16, "bfloat16"),
        (torch.ops.aten._scaled_dot_product_flash_attention.default, torch.float16, "float16"),
        (torch.ops.aten._scaled_dot_product_efficient_attention_backward.default, torch.float32, "float32"),
        (torch.ops.aten.add.Tensor, torch.bfloat16, "float32"),  # bound by memory, and added up in float32
        (torch.ops.aten.add.Tensor, None, "float32"),
    ],
)
def test_the_type_of_an_op_by_hand(function: Any, dtype: torch.dtype | None, expected: str) -> None:
    assert COMPUTE_TYPES[compute_type(OpFacts(function), dtype)] == expected


def machine(**flops: float) -> Cluster:
    device = {"name": "gpu:0", "kind": "gpu", "memory": "1GiB", "flops": flops, "bytes_per_second": 1e30}
    return parse_cluster({"name": "one", "devices": [device]})


def test_a_device_without_the_type_counts_it_as_float32() -> None:
    """The forward convolution makes 2 x 4 x 16 numbers of 27 multiply-adds each: 6,912 flops; 1 s at that speed."""
    graph = captured()
    n = graph.ops.kinds.index("aten.convolution")
    assert graph.ops.flops[n] == 6912
    assert predict_op_seconds(graph, machine(float32=6912.0))[n, 0] == 1
    assert predict_op_seconds(graph, machine(float32=1.0, tf32=3456.0))[n, 0] == 2
