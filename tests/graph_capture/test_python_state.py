"""What a step decides by, reads and keeps in Python: followed, checked in every step, or refused."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compiled_steps import assert_runs_like_eager, compiled
from torch import Tensor, nn
from torch.nn.utils import prune

import placewise as pw
from placewise.core.errors import CaptureError, ExecutionError
from placewise.graph_capture.capture import CapturedStep

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]


class Model(nn.Module):
    """A layer, and a function of its result that may use the module itself."""

    def __init__(self, function: Callable[["Model", Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function, self.calls = nn.Linear(4, 4), function, 0
        self.mean: Any = None
        self.row: Any = None

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.layer(x))


def captured(function: Callable[[Model, Tensor], Any], **options: Any) -> tuple[Model, CapturedStep]:
    model = Model(function)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, pw.capture(model, nn.MSELoss(), optimizer, (torch.randn(6, 4), torch.randn(6, 4)), **options)


# --- conditions ---


def clamped(module: Model, y: Tensor) -> Tensor:
    """Returns the tensor as DETR of transformers does: clamped if something is not finite."""
    if not torch.isfinite(y).all():
        y = torch.clamp(y, -1, 1)
    return y


def asserted(module: Model, y: Tensor) -> Tensor:
    assert not torch.isnan(y).any() and not (y.isinf().any() | torch.isnan(y).any())  # noqa: PT018
    return y


GUARDS = {
    "clamped": clamped,
    "asserted": asserted,
    "loss": lambda module, y: y if torch.isfinite(y.sum()) else y * 0,
    "item": lambda module, y: y * 0 if torch.isnan(y).any().item() else y,
    "combined": lambda module, y: y if torch.logical_not(torch.logical_or(y.isnan().any(), y.isinf().any())) else -y,
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_for_numbers_that_are_not_finite_is_checked_in_every_step(name: str) -> None:
    """The captured step is that of finite numbers; a batch with others is refused before anything is updated."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Model(GUARDS[name])
        return model, torch.optim.SGD(model.parameters(), 0.1)

    batches = [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(2)]
    assert_runs_like_eager(build, nn.MSELoss(), batches, 2)
    model, step = captured(GUARDS[name])
    train_step = compiled(step)
    before = model.layer.weight.detach().clone()
    with pytest.raises(ExecutionError, match="a number is not finite where the captured step found only finite ones"):
        train_step((torch.full((6, 4), torch.inf), torch.randn(6, 4)))
    assert torch.equal(model.layer.weight, before)
    train_step((torch.randn(6, 4), torch.randn(6, 4)))
    train_step.close()


def dropped(probability: float) -> Callable[[Model, Tensor], Tensor]:
    """Returns layerdrop as models of transformers have it."""
    return lambda module, y: y if torch.rand([]) < probability else F.dropout(y.relu(), 0.5)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_layerdrop_that_is_off_is_recorded(probability: float) -> None:
    """The draw stays, so that later ones draw the numbers of eager code."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Model(dropped(probability))
        return model, torch.optim.SGD(model.parameters(), 0.1)

    assert_runs_like_eager(build, nn.MSELoss(), [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(3)])


def test_layerdrop_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"depends on a random number: a condition \(bool\).*probability of 0"):
        captured(dropped(0.1))


@pytest.mark.parametrize("compare", [lambda u: u > 1.0, lambda u: u >= 1, lambda u: u < 0, lambda u: u <= -0.5])
def test_comparisons_of_random_numbers_that_are_never_true(compare: Callable[[Tensor], Tensor]) -> None:
    captured(lambda module, y: y.nonzero() if compare(torch.rand(1)) else y)
    captured(lambda module, y: y if not compare(torch.rand(())) else y.nonzero())


# --- numbers that are read ---


def test_a_number_that_a_module_keeps_is_kept_by_every_step() -> None:
    def log(module: Model, y: Tensor) -> Tensor:
        module.mean, module.row = y.mean().item(), {"row": y[0]}
        return y

    model, step = captured(log)
    assert model.mean is None
    train_step = compiled(step)
    for _ in range(2):
        batch = (torch.randn(6, 4), torch.randn(6, 4))
        expected = model.layer(batch[0]).detach()
        train_step(batch)
        assert model.mean == pytest.approx(expected.mean().item())
        torch.testing.assert_close(model.row, {"row": expected[0]})
    train_step.close()


def test_a_number_that_only_python_uses_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"reads 1 number with item\(\).*not when it runs"):
        captured(lambda module, y: y if f"{y.sum().item():.2f}" else -y)


@pytest.mark.parametrize(
    "use", [lambda n, y: y * n, lambda n, y: y if n > 0 else -y, lambda n, y: y + (n - 1), lambda n, y: y * float(n)]
)
def test_computing_with_a_number_that_was_read_is_refused(use: Callable[[float, Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"computing with what item\(\) returned needs the value of a tensor"):
        captured(lambda module, y: use(y.sum().item(), y))


# --- what a module counts, and the generators of Python and numpy ---


def counting(module: Model, y: Tensor) -> Tensor:
    module.calls += 1
    return y * module.calls


def appending(module: Model, y: Tensor) -> Tensor:
    module.__dict__.setdefault("history", []).append("step")
    return y


@pytest.mark.parametrize(("function", "name"), [(counting, "calls"), (appending, "history")])
def test_an_attribute_that_changes_in_every_step_is_refused(function: Any, name: str) -> None:
    with pytest.raises(CaptureError, match=f"changes its attribute '{name}' in every step"):
        captured(function)


def test_a_cache_is_no_change() -> None:
    def cached(module: Model, y: Tensor) -> Tensor:
        module.calls = len(y)
        module.__dict__.setdefault("sizes", {})[len(y)] = "seen"
        return y * module.calls

    model, _ = captured(cached)
    assert model.calls == 0


@pytest.mark.parametrize(
    ("draw", "name"),
    [(random.random, "Python's random module"), (np.random.rand, "numpy.random")],
)
def test_numbers_of_other_generators_are_refused(draw: Callable[[], float], name: str) -> None:
    before = random.getstate()
    with pytest.raises(CaptureError, match=f"draws numbers from {name}"):
        captured(lambda module, y: y * draw())
    assert random.getstate() == before


def test_a_generator_that_the_step_seeds_itself_is_fine() -> None:
    def seeded(module: Model, y: Tensor) -> Tensor:
        random.seed(1)
        return y * random.random()

    captured(seeded)


# --- what an earlier step has left ---


def carrying(module: Model, y: Tensor) -> Any:
    """Returns a recurrent state that the module carries from step to step."""
    module.mean = (y if module.mean is None else y + module.mean).detach()
    return y + module.mean


def remembering(module: Model, y: Tensor) -> Any:
    module.__dict__.setdefault("history", []).append(y.detach().mean())
    return y + module.__dict__["history"][0]


def normalised(module: Model, y: Tensor) -> Any:
    """Returns values less the mean of the first batch."""
    if module.mean is None:
        module.mean = y.detach().mean()
    return y - module.mean


@pytest.mark.parametrize(("function", "name"), [(carrying, "mean"), (remembering, "history"), (normalised, "mean")])
def test_what_an_earlier_step_has_left_in_an_attribute_is_refused(function: Any, name: str) -> None:
    with pytest.raises(CaptureError, match=f"reads its attribute '{name}', which an earlier step has set"):
        captured(function)


def test_what_an_earlier_step_has_left_is_refused_also_if_it_is_there_already() -> None:
    model = Model(carrying)
    model.mean = torch.zeros(6, 4)
    with pytest.raises(CaptureError, match="reads its attribute 'mean', which an earlier step has set"):
        pw.capture(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), (torch.randn(6, 4), torch.randn(6, 4)))


def test_a_cache_of_tensors_that_are_the_same_in_every_step_is_fine() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        def cached(module: Model, y: Tensor) -> Any:
            if module.row is None:
                module.row = torch.arange(4.0) / 7
            return y + module.row.cos()

        model = Model(cached)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    assert_runs_like_eager(build, nn.MSELoss(), [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(3)])


# --- conditions that only raise errors ---


def raising(module: Model, y: Tensor) -> Tensor:
    """Returns the tensor if the checks of distributions and of the model itself pass."""
    if torch.any(y > 90):
        raise ValueError("too large")
    if module.calls == 0 and not (y.abs() < 90).all():
        raise ValueError("too large")
    assert (y > -90).all(), "too small"
    assert module.calls == 0 and bool((y > -90).all())  # noqa: PT018
    torch._check_tensor_all(y < 90)  # type: ignore[no-untyped-call]
    return torch.distributions.Normal(y, 1.0).mean


def test_conditions_that_only_raise_errors_are_checked_in_every_step() -> None:
    model, step = captured(raising)
    train_step = compiled(step)
    inputs, target = torch.randn(6, 4), torch.randn(6, 4)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ExecutionError, match=r"the model's own check fails: .*\((test_python_state|__init__).py:\d+\)"):
        train_step((inputs + 1e4, target))
    assert all(map(torch.equal, model.parameters(), before))
    train_step((inputs, target))
    assert not any(map(torch.equal, model.parameters(), before))


def test_each_condition_is_the_one_that_its_statement_decides_by() -> None:
    """Of two parts, `or` needs both, `and` raises by the second only, because the first is not a tensor's."""

    def function(module: Model, y: Tensor) -> Tensor:
        if y.max() > 90 or y.min() < -90:
            raise ValueError
        if not (module.layer.weight.shape[0] != 4 or y.isnan().logical_not().all()):
            raise ValueError
        return y

    _, step = captured(function)
    assert [check.outcome for check in step.program.checks] == [False, False, True]
    assert [check.text.partition(": ")[2][:9] for check in step.program.checks[:2]] == ["if y.max("] * 2


@pytest.mark.parametrize(
    "function",
    [
        lambda module, y: y if (y > 0).all() else -y,
        lambda module, y: leaving(y),
        lambda module, y: both(y),
        lambda module, y: silent(y),
    ],
)
def test_conditions_that_decide_more_are_refused(function: Any) -> None:
    with pytest.raises(CaptureError, match=r"a condition \(bool\) needs the value of a tensor"):
        captured(function)


def leaving(y: Tensor) -> Tensor:
    if (y > 0).all():
        if y.shape[0] == 6:
            return y * 2
        raise ValueError
    return y


def both(y: Tensor) -> Tensor:
    """Raises by two tensors together: which of them does not is not known."""
    if (y > 0).all() and (y < 1).all():
        raise ValueError
    return y


def silent(y: Tensor) -> Tensor:
    if (y > 0).all():
        y = y + 1
    return y


# --- sizes ---


def test_rows_repeated_as_often_as_constants_say() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        def function(module: Model, y: Tensor) -> Any:
            counts = torch.tensor([1, 2, 0, 3, 0, 0])
            mask = torch.tensor([True, False, True, True, True, True])
            twice = y.repeat_interleave(torch.tensor([2])).view(6, 4, 2).sum(2)  # of the flat tensor: there is no dim
            return y.repeat_interleave(counts, 0) + y.masked_select(mask[:, None]).view(5, 4).sum(0) + twice

        model = Model(function)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    assert_runs_like_eager(build, nn.MSELoss(), [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(2)])


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("wrap", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
def test_weights_that_hooks_compute(wrap: Any) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Model(lambda module, y: y)
        model.layer = wrap(model.layer)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    assert_runs_like_eager(build, nn.MSELoss(), [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(2)])


def test_a_pruned_layer() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Model(lambda module, y: y)
        prune.l1_unstructured(model.layer, "weight", 0.5)  # type: ignore[no-untyped-call]
        return model, torch.optim.SGD(model.parameters(), 0.1)

    assert_runs_like_eager(build, nn.MSELoss(), [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(2)])


def test_computed_weights_that_are_not_computed_again_are_refused() -> None:
    model: Any = Model(lambda module, y: y * vars(module)["scale"])
    model.scale = model.layer.weight.sum()
    with pytest.raises(CaptureError, match="reads its attribute 'scale', which an earlier step has set"):
        pw.capture(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), (torch.randn(6, 4), torch.randn(6, 4)))


# --- what is not recorded has its name ---


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def packed(module: Model, y: Tensor) -> Any:
    return torch.nn.utils.rnn.pack_padded_sequence(y[:, :, None], torch.tensor([4] * 6), batch_first=True)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (packed, "packed sequences can't be recorded"),
        (lambda module, y: torch.nested.nested_tensor([y[0], y[1]]), "nested tensors can't be recorded"),
        (lambda module, y: torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)), "call a function of yours"),
    ],
)
def test_what_can_not_be_recorded_has_its_name(function: Any, match: str) -> None:
    with pytest.raises(CaptureError, match=match):
        captured(function)


@pytest.mark.filterwarnings("ignore")
def test_modules_of_torch_jit_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(Scripted()))
    with pytest.raises(CaptureError, match=r"^1 is a module of torch\.jit"):
        pw.capture(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), (torch.randn(6, 4), torch.randn(6, 4)))


# --- what other objects keep ---


class Kept:
    """An object that is no module and keeps something of a step, as a part of a model or as its loss."""

    def __init__(self) -> None:
        self.count = 0
        self.last: Any = None

    def weigh(self, y: Tensor) -> Tensor:
        self.count += 1
        return y * min(1.0, self.count / 3)

    def follow(self, y: Tensor) -> Any:
        before, self.last = self.last, y.detach()
        return y if before is None else y + before

    def size(self, y: Tensor) -> Any:
        self.count = len(y)
        return y * self.count


def captured_with(kept: Kept, method: str) -> CapturedStep:
    """Returns the step of a model that has an object and calls a method of it."""
    model = Model(lambda module, y: getattr(module.mean, method)(y))
    model.mean = kept
    return pw.capture(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), (torch.randn(6, 4), torch.randn(6, 4)))


def test_objects_that_change_in_every_step_are_refused() -> None:
    kept = Kept()
    with pytest.raises(CaptureError, match="changes its attribute 'mean' in every step"):
        captured_with(kept, "weigh")
    with pytest.raises(CaptureError, match="reads its attribute 'mean', which an earlier step has set"):
        captured_with(kept, "follow")
    captured_with(kept, "size")
    assert (kept.count, kept.last) == (0, None), "a copy was captured"


class KeptLoss(Kept):
    def __call__(self, y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.weigh(y), target)


class FollowedLoss(Kept):
    def compute(self, y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.follow(y), target)


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (KeptLoss(), "changes its attribute 'loss.count' in every step"),
        (FollowedLoss().compute, "reads its attribute 'loss.last', which an earlier step has set"),
    ],
)
def test_losses_that_count_or_remember_are_refused(loss: Any, match: str) -> None:
    model = Model(lambda module, y: y)
    with pytest.raises(CaptureError, match=match):
        pw.capture(model, loss, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(6, 4), torch.randn(6, 4)))


class Descent(torch.optim.Optimizer):
    """Gradient descent whose rate is a function of the optimizer."""

    def __init__(self, parameters: Any, rate: Callable[[Any], Any]) -> None:
        self.rate, self.count = rate, 0
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rate = self.rate(self)
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-rate)


def by_attribute(optimizer: Any) -> float:
    optimizer.count += 1
    return 1 / float(optimizer.count)


def by_state(optimizer: Any) -> float:
    optimizer.state["count"] = optimizer.state.get("count", 0) + 1
    return 1 / float(optimizer.state["count"])


def by_turns(optimizer: Any) -> float:
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state["is even"] = not state.get("is even", False)
    return 0.1 if state["is even"] else 0.2


@pytest.mark.parametrize(
    ("rate", "match"),
    [
        (by_attribute, "the optimizer changes its attribute 'count' in every step"),
        (by_state, "the optimizer changes its state 'count' in every step"),
        (by_turns, "the optimizer changes its state 'is even' in every step"),
        (lambda optimizer: random.random(), "the optimizer draws numbers from Python's random module"),
    ],
)
def test_optimizers_that_count_in_python_are_refused(rate: Any, match: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match=match):
        pw.capture(model, nn.MSELoss(), Descent(model.parameters(), rate), (torch.randn(6, 4), torch.randn(6, 4)))
