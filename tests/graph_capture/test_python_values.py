"""What code reads in globals, closures and objects besides the model: a change of it is refused at the next step."""

import dataclasses
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_steps import compiled
from torch import Tensor, nn

import placewise as pw
from placewise.core.errors import CaptureError, StepChanged
from placewise.graph_capture.python_values import PythonValues

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")

WEIGHT = 1.0
COUNT = 0
step = 0  # as training scripts have it
OPTIONS = Namespace(weight=1.0, name="kl")
HISTORY: list[float] = []


@dataclasses.dataclass(slots=True)
class Options:
    weight: float = 1.0


SLOTS = Options()


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    global WEIGHT, COUNT, step
    yield
    WEIGHT, COUNT, step, OPTIONS.weight, SLOTS.weight, Reversed.weight, Layer.weight = 1.0, 0, 0, 1.0, 1.0, 1.0, 1.0
    HISTORY.clear()


class Layer(nn.Module):
    """A layer, with values of many kinds that its result is multiplied by."""

    weight = 1.0

    def __init__(self, times: "Callable[[Any], Any]" = lambda module: 1.0) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(3, 2), times
        self.config, self.weights, self.by_name = SimpleNamespace(scale=1.0), [1.0, (2.0,)], {"scale": 1.0}
        self.tensor, self.inner, self.spelt = torch.ones(2), 1.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) * self.times(self)
        return result


class Reversed(torch.autograd.Function):
    """Domain adaptation's reversed gradients."""

    weight = 1.0

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return -Reversed.weight * gradient


class Loss:
    """A loss that is an object, as of a trainer."""

    def __init__(self) -> None:
        self.scale, self.global_step = 1.0, 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * F.mse_loss(output, target)

    def warmed_up(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * min(1.0, (self.global_step + 1) / 10)


def by_global(output: Tensor, target: Tensor) -> Tensor:
    return WEIGHT * F.mse_loss(output, target)


def by_options(output: Tensor, target: Tensor) -> Tensor:
    weighted: Tensor = OPTIONS.weight * F.mse_loss(output, target)
    return weighted


def by_slots(output: Tensor, target: Tensor) -> Tensor:
    return SLOTS.weight * F.mse_loss(output, target)


def weighted(output: Tensor, target: Tensor, scale: float) -> Tensor:
    return scale * F.mse_loss(output, target)


def with_closure() -> Any:
    scale = [1.0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return scale[0] * F.mse_loss(output, target)

    loss.change = lambda: scale.append(scale.pop() / 2)  # type: ignore[attr-defined]
    return loss


def with_cell() -> Any:
    scale = 1.0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return scale * F.mse_loss(output, target)

    def change() -> None:
        nonlocal scale
        scale = 0.5

    loss.change = change  # type: ignore[attr-defined]
    return loss


def change_global(model: Any, loss_fn: Any) -> None:
    global WEIGHT
    WEIGHT = 0.5


def set_in(container: Any, key: Any, value: Any) -> None:
    container[key] = value


CHANGES: dict[str, tuple[Callable[[], Any], Any, Callable[[Any, Any], Any], str]] = {
    "global": (Layer, by_global, change_global, "WEIGHT is 0.5 now and was 1.0"),
    "parsed arguments": (Layer, by_options, lambda m, f: setattr(OPTIONS, "weight", 0.5), "OPTIONS.weight is 0.5 now"),
    "slots": (Layer, by_slots, lambda m, f: setattr(SLOTS, "weight", 0.5), "SLOTS.weight is 0.5 now and was 1.0"),
    "closure": (Layer, with_closure(), lambda m, f: f.change(), r"scale is \[0.5\] now and was \[1.0\]"),
    "cell": (Layer, with_cell(), lambda m, f: f.change(), "scale is 0.5 now and was 1.0"),
    "loss": (Layer, Loss(), lambda m, f: setattr(f, "scale", 0.5), "Loss.scale is 0.5 now and was 1.0"),
    "method": (Layer, Loss().warmed_up, lambda m, f: setattr(f.__self__, "global_step", 1), "Loss.global_step is 1 now"),
    "partial": (Layer, partial(weighted, scale=1.0), lambda m, f: set_in(f.keywords, "scale", 0.5), "scale of the loss is"),
    "config": (
        lambda: Layer(lambda m: m.config.scale), F.mse_loss, lambda m, f: setattr(m.config, "scale", 0.5),
        "config.scale is 0.5 now and was 1.0",
    ),
    "another config": (
        lambda: Layer(lambda m: m.config.scale), F.mse_loss, lambda m, f: setattr(m, "config", SimpleNamespace(scale=1.0)),
        "config is another SimpleNamespace now",
    ),
    "list": (
        lambda: Layer(lambda m: m.weights[0]), F.mse_loss, lambda m, f: set_in(m.weights, 0, 0.5),
        r"weights is \[0.5, \(2.0,\)\] now",
    ),
    "dict": (
        lambda: Layer(lambda m: m.by_name["scale"]), F.mse_loss, lambda m, f: set_in(m.by_name, "scale", 0.5),
        "by_name is {'scale': 0.5} now",
    ),
    "class": (
        lambda: Layer(lambda m: m.weight), F.mse_loss, lambda m, f: setattr(Layer, "weight", 0.5),
        "Layer.weight is 0.5 now and was 1.0",
    ),
    "helper": (
        lambda: Layer(lambda m: m.inner), F.mse_loss, lambda m, f: setattr(m, "inner", 0.5), "inner is 0.5 now and was 1.0"
    ),
    "comprehension": (
        lambda: Layer(lambda m: sum([m.inner for _ in range(2)])), F.mse_loss, lambda m, f: setattr(m, "inner", 0.5),
        "inner is 0.5 now",
    ),
    "getattr": (
        lambda: Layer(lambda m: getattr(m, "spelt", 2.0)), F.mse_loss, lambda m, f: setattr(m, "spelt", 0.5),
        "spelt is 0.5 now",
    ),
    "function": (
        lambda: Layer(lambda m: 1.0), F.mse_loss, lambda m, f: setattr(m, "times", lambda m: 0.5),
        "times is another function now",
    ),
    "tensor": (
        lambda: Layer(lambda m: m.tensor), F.mse_loss, lambda m, f: setattr(m, "tensor", torch.zeros(2)),
        "tensor is another Tensor now",
    ),
    "autograd function": (
        lambda: Layer(lambda m: Reversed.apply(m.layer.weight).sum()), F.mse_loss,  # type: ignore[no-untyped-call]
        lambda m, f: setattr(Reversed, "weight", 0.5), "Reversed.weight is 0.5 now",
    ),
}  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3), torch.randn(4, 2)


def captured(model: nn.Module, loss_fn: Any) -> Any:
    return pw.capture(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), batch())


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_code_reads_must_stay(name: str) -> None:
    """A weight of the loss that a training loop anneals, say: the recorded step has the old one."""
    build, loss_fn, change, message = CHANGES[name]
    model = build()
    train_step = compiled(captured(model, loss_fn))
    train_step(batch())
    change(model, loss_fn)
    before = model.layer.weight.detach().clone()
    with pytest.raises(StepChanged, match=f"^{message}.*, and the captured step was another one: undo it, or capture"):
        train_step(batch())
    assert torch.equal(before, model.layer.weight), "nothing was updated"
    train_step.close()


def test_hooks_read_values_too() -> None:
    scales = [1.0, 1.0]
    model = Layer()
    model.layer.register_forward_hook(lambda module, given, output: output * scales[0])
    model.layer.weight.register_hook(lambda gradient: gradient * scales[1])  # type: ignore[no-untyped-call]
    train_step = compiled(captured(model, F.mse_loss))
    train_step(batch())
    for number in range(2):
        scales[number] = 0.5
        with pytest.raises(StepChanged, match=r"^scales is"):
            train_step(batch())
        scales[number] = 1.0
    train_step(batch())
    train_step.close()


def test_what_no_code_of_the_step_reads_may_change() -> None:
    """The loop's own counter is a global named like an attribute that the model reads."""
    global step

    model = Layer(lambda m: m.step)
    model.step = 1.0  # type: ignore[assignment]
    train_step = compiled(captured(model, by_options))
    train_step(batch())
    step, OPTIONS.name, model.config.unread = step + 1, "mse", 3
    train_step(batch())
    train_step.close()


def test_a_frozen_teacher_of_the_loss_is_followed() -> None:
    """Its weights are read in every step; its mode is checked."""
    student, teacher = Layer(), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).requires_grad_(False).eval()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, teacher(target))

    train_step = compiled(captured(student, loss))
    for _ in range(2):
        given, target = batch()
        expected = float(loss(student(given), target).detach())
        assert float(train_step((given, target))) == pytest.approx(expected)
        teacher[0].get_parameter("weight").mul_(0.5)
    teacher.train()
    with pytest.raises(StepChanged, match=r"^teacher is in train mode now"):
        train_step(batch())
    train_step.close()


def test_constants_are_read_in_every_step() -> None:
    """A tensor that is a plain attribute, or one in a list, may be changed in place."""
    model = Layer(lambda m: m.tensor)
    train_step = compiled(captured(model, F.mse_loss))
    for _ in range(3):
        given, target = batch()
        expected = float(F.mse_loss(model(given), target).detach())
        assert float(train_step((given, target))) == pytest.approx(expected)
        model.tensor.mul_(0.5)
    train_step.close()


def counting(output: Tensor, target: Tensor) -> Tensor:
    global COUNT

    COUNT += 1
    return F.mse_loss(output, target) / COUNT


def test_a_global_that_counts_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"^the step changes COUNT each time that it runs"):
        captured(Layer(), counting)


def test_a_global_that_is_made_once_is_fine() -> None:
    made: dict[int, Tensor] = {}

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if len(output) not in made:
            made[len(output)] = torch.ones(())
        return F.mse_loss(output, target) * made[len(output)]

    train_step = compiled(captured(Layer(), loss))
    for _ in range(2):
        assert torch.isfinite(train_step(batch()))
    train_step.close()


def test_settings_of_an_optimizer_must_stay() -> None:
    model = Layer()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.scale = 1.0  # type: ignore[attr-defined]
    train_step = compiled(pw.capture(model, F.mse_loss, optimizer, batch()))
    optimizer.scale = 2.0  # type: ignore[attr-defined]
    with pytest.raises(StepChanged, match=r"^the optimizer's scale is 2.0 now and was 1.0"):
        train_step(batch())
    train_step.close()


def test_a_change_of_a_library_is_not_looked_for() -> None:
    values = PythonValues(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), F.cross_entropy)
    assert not values.change()
    assert not values.modules
