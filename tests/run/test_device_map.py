"""Plans as device maps of Hugging Face Accelerate."""

import re
from dataclasses import replace

import pytest
import torch
from compiled_steps import capture_with_mse, plan_by_op, small_training

import placewise as pw
from placewise.core.errors import ExecutionError, PlacewiseError, PlanError
from placewise.core.plan import Plan
from placewise.models import load_step

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]
MODEL = "rnnlm:layers=1,hidden=8,steps=3,batch=4,vocab=11"


def test_plans_have_device_maps_unless_they_split_a_module() -> None:
    step = capture_with_mse(*small_training())
    by_layer = plan_by_op(step, lambda name: "gpu:1" if name.startswith("2") else "cpu:0")
    assert by_layer.device_map(step) == {"0": torch.device("cpu"), "1": torch.device("cpu"), "2": 1}
    whole = plan_by_op(step, lambda name: "gpu:0")
    assert whole.device_map(step.graph) == {"": 0}
    split = plan_by_op(step, lambda name: "gpu:0" if name.startswith("2.") and "backward" in name else "cpu:0")
    with pytest.raises(ExecutionError, match=r"it splits 2 \((cpu:0, gpu:0|gpu:0, cpu:0)\)"):
        split.device_map(step)
    odd = plan_by_op(step, lambda name: "left")
    with pytest.raises(ExecutionError, match="device 'left': Accelerate knows only gpu:0"):
        odd.device_map(step)
    with pytest.raises(PlanError, match="placement has 1 entries"):
        Plan(("gpu:0",)).device_map(step)
    with pytest.raises(PlanError, match="plan: is for another graph"):
        replace(whole, graph_digest="0123456789abcdef").device_map(step)
    with pytest.raises(PlacewiseError, match=re.escape("a captured step (placewise.capture) or a Graph, got a Sequential")):
        whole.device_map(step.step.model)


@pytest.mark.parametrize(
    ("strategy", "grouping"), [("balanced", "colocated"), ("expert", "colocated"), ("random", "module")]
)
@pytest.mark.parametrize("model", ["gpt:layers=2,hidden=16,heads=2,length=8,batch=4,vocab=13", MODEL])
def test_plans_by_module_have_device_maps_that_cover_the_model(model: str, strategy: str, grouping: str) -> None:
    step = load_step(model)
    plan = pw.place(step, pw.Cluster.load("2xK80"), strategy=strategy, grouping=grouping, evaluations=5)
    names = plan.device_map(step)
    for tensor in step.step.model.state_dict():
        assert [name for name in names if not name or tensor == name or tensor.startswith(f"{name}.")], tensor


def test_accelerate_takes_a_device_map() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, optimizer, batch = small_training()
    step = capture_with_mse(model, optimizer, batch)
    names = plan_by_op(step, lambda name: "cpu").device_map(step)
    expected = model(batch[0])
    assert torch.equal(accelerate.dispatch_model(model, names)(batch[0]), expected)
