"""What a recorded step can't follow is refused with one line: at capture, or at the next step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import compiled
from torch import nn

import placewise as pw
from placewise.core.errors import CaptureError, ExecutionError, StepChanged

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")

BATCH = (torch.ones(4, 3), torch.zeros(4, dtype=torch.long))


def new_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 2))


def captured(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return pw.capture(model, nn.functional.cross_entropy, optimizer, BATCH)


def freeze(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(False)


def replace_a_module(model: nn.Sequential) -> None:
    model[2] = nn.Linear(5, 2)


def replace_a_parameter(model: nn.Sequential) -> None:
    model[2].bias = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nn.Module.eval, "the model is in eval mode now"),
        (lambda model: model[1].eval(), "1 is in eval mode now"),
        (freeze, "requires_grad of 0.weight is False now"),
        (replace_a_module, "the module '2' was replaced"),
        (lambda model: model.append(nn.ReLU()), "the model has other modules now"),
        (lambda model: setattr(model[1], "p", 0.25), "1.p is 0.25 now and was 0.5"),
        (replace_a_parameter, "the parameter 2.bias was replaced"),
        (lambda model: setattr(model[2], "forward", model[2].forward), "forward of 2 was replaced"),
        (lambda model: model[2].register_forward_hook(lambda *_: None), "2 has other hooks now"),
        (lambda model: model[0].register_forward_pre_hook(lambda *_: None), "0 has other hooks now"),
        (lambda model: model.register_full_backward_hook(lambda *_: None), "the model has other hooks now"),
        (lambda model: model[0].weight.register_hook(lambda gradient: 2 * gradient), "0.weight has other hooks now"),
        (lambda model: model[0].bias.register_post_accumulate_grad_hook(lambda _: None), "0.bias has other hooks now"),
    ],
    ids=[
        "eval",
        "one module in eval",
        "frozen",
        "replaced",
        "added",
        "another dropout",
        "replaced parameter",
        "replaced forward",
        "forward hook",
        "forward pre-hook",
        "backward hook",
        "hook on a gradient",
        "hook on a sum",
    ],
)
def test_a_model_that_changed_is_refused_at_the_next_step(change: Callable[[Any], Any], message: str) -> None:
    model = new_model()
    train_step = compiled(captured(model, torch.optim.SGD(model.parameters(), 0.1)))
    train_step(BATCH)
    before = [parameter.clone() for parameter in model[0].parameters()]
    change(model)
    with pytest.raises(ExecutionError, match=f"^{message}, and the captured step was another one: undo it, or capture"):
        train_step(BATCH)
    assert all(torch.equal(a, b) for a, b in zip(before, model[0].parameters(), strict=True)), "nothing was updated"


def test_an_attribute_that_no_module_reads_may_change() -> None:
    model = new_model()
    model.epoch_of_training = 0  # type: ignore[assignment]
    train_step = compiled(captured(model, torch.optim.SGD(model.parameters(), 0.1)))
    model.epoch_of_training = 1  # type: ignore[assignment]
    train_step(BATCH)
    train_step.close()


def test_a_model_that_is_changed_back_goes_on() -> None:
    model = new_model()
    train_step = compiled(captured(model, torch.optim.SGD(model.parameters(), 0.1)))
    model.eval()
    model.train()
    assert torch.isfinite(train_step(BATCH))


def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)


def test_hooks_that_would_vanish_are_refused_by_name() -> None:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = optimizer.register_step_pre_hook(clip)
    with pytest.raises(CaptureError, match=r"^the optimizer has a step pre-hook \(clip\), which can't be recorded"):
        captured(model, optimizer)
    handle.remove()
    handle = optimizer.register_step_post_hook(clip)
    with pytest.raises(CaptureError, match=r"^the optimizer has a step post-hook \(clip\)"):
        captured(model, optimizer)
    handle.remove()
    next(model[2].parameters()).register_post_accumulate_grad_hook(clip)  # type: ignore[no-untyped-call]
    with pytest.raises(CaptureError, match=r"^2\.weight has a post-accumulate-grad hook \(clip\)"):
        captured(model, optimizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda optimizer: optimizer.register_step_pre_hook(clip), "the optimizer has other hooks now"),
        (lambda optimizer: optimizer.register_step_post_hook(clip), "the optimizer has other hooks now"),
        (
            lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
            "the optimizer has other parameters now",
        ),
        (lambda optimizer: optimizer.param_groups[0]["params"].pop(), "the optimizer has other parameters now"),
    ],
)
def test_an_optimizer_that_changed_is_refused_at_the_next_step(change: Callable[[Any], Any], message: str) -> None:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train_step = compiled(captured(model, optimizer))
    train_step(BATCH)
    change(optimizer)
    with pytest.raises(StepChanged, match=f"^{message}, and the captured step was another one: undo it, or capture"):
        train_step(BATCH)


def test_a_hook_that_is_removed_again_and_loaded_state_go_on() -> None:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train_step = compiled(captured(model, optimizer))
    train_step(BATCH)
    model[0].register_forward_hook(lambda *_: None).remove()
    optimizer.load_state_dict(optimizer.state_dict())
    model.load_state_dict(model.state_dict())
    assert torch.isfinite(train_step(BATCH))


def test_autocast_around_a_step_is_refused() -> None:
    """Eager code would compute in bfloat16 there; the captured step has no casts."""
    model = new_model()
    train_step = compiled(captured(model, torch.optim.SGD(model.parameters(), 0.1)))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ExecutionError, match=r"^autocast is on around the step"):
        train_step(BATCH)
    assert torch.isfinite(train_step(BATCH))


def test_a_hook_on_a_gradient_is_recorded(same_kernels: None) -> None:
    ours, theirs = new_model().eval(), new_model().eval()
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        next(model[0].parameters()).register_hook(lambda gradient: gradient.clamp(-0.01, 0.01) * 3)  # type: ignore[no-untyped-call]
    optimizers = [torch.optim.SGD(model.parameters(), 0.5) for model in (ours, theirs)]
    train_step = compiled(captured(ours, optimizers[0]))
    for _ in range(3):
        optimizers[1].zero_grad()
        loss = nn.functional.cross_entropy(theirs(BATCH[0]), BATCH[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers[1].step()
        assert torch.equal(train_step(BATCH), loss.detach())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
