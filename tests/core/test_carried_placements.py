"""A placement is carried over to a similar graph by the names of ops and modules."""

import pytest
import torch
from torch import nn

import placewise as pw
from placewise.core.carried_placements import carry_over


def graph_of(layers: int, rows: int) -> pw.Graph:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(layers)])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return pw.capture(model, nn.MSELoss(), optimizer, (torch.randn(rows, 4), torch.randn(rows, 4))).graph


def by_op(graph: pw.Graph, placement: tuple[str, ...]) -> dict[str, str]:
    return {name: placement[group] for name, group in zip(graph.ops.names, graph.ops.groups.tolist(), strict=True)}


def test_another_batch_size_keeps_every_group() -> None:
    small, large = graph_of(3, 2), graph_of(3, 64)
    placement = tuple("ab"[group % 2] for group in range(small.num_groups))
    assert carry_over(small, placement, large) == placement


def test_a_new_layer_goes_where_the_op_before_it_goes() -> None:
    """Layers 0 and 1 are on a and b; the new layer 2 follows layer 1, and all known ops stay."""
    two, three = graph_of(2, 4), graph_of(3, 4)
    placement = ["a"] * two.num_groups
    for op, name in enumerate(two.ops.names):
        if name.startswith("1."):
            placement[two.ops.groups[op]] = "b"
    old, new = by_op(two, tuple(placement)), by_op(three, carry_over(two, placement, three))
    assert {name: new[name] for name in old if name in new and name.startswith(("0.", "1."))} == {
        name: device for name, device in old.items() if name.startswith(("0.", "1."))
    }
    assert new["2.0.addmm"] == "b"


@pytest.mark.parametrize("count", [0, 1])
def test_the_forward_pass_alone(count: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        training = pw.capture(
            model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), (torch.randn(8, 4), torch.randn(8, 4))
        ).graph
        inference = pw.capture_inference(model, torch.randn(8, 4)).graph
    placement = ["a"] * training.num_groups
    chosen = training.ops.names.index(["0.addmm", "2.addmm"][count])
    placement[training.ops.groups[chosen]] = "b"
    carried = by_op(inference, carry_over(training, placement, inference))
    assert [name for name, device in carried.items() if device == "b"] == [["0.addmm", "2.addmm"][count]]
