"""A training loop over batches of any shape trains as eager PyTorch does."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import cpu_cluster
from eager_steps import bitwise
from torch import Tensor, nn

import placewise as pw
from placewise.core.errors import ExecutionError, InputError
from placewise.training.planned_steps import PlannedSteps

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]


class Words(nn.Module):
    """Classifies sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout, self.output = nn.Embedding(11, 6), nn.Dropout(0.3), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.dropout(torch.tanh(self.embedding(tokens)).mean(1)))  # type: ignore[no-any-return]


def batch_of(rows: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(11, (rows, length)), torch.randint(3, (rows,))


def steps_for(model: nn.Module, optimizer: Any, lines: list[str], **options: Any) -> PlannedSteps:
    settings: dict[str, Any] = {"cluster": cpu_cluster(2), "seconds": 0, "report": lines.append, **options}
    return pw.train_step(model, nn.functional.cross_entropy, optimizer, **settings)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.05)


SHAPES = [(6, 4), (6, 7), (6, 4), (2, 4), (6, 7), (6, 4)]  # lengths in buckets, and a smaller last batch


@pytest.mark.parametrize("make_optimizer", [adam, lambda m: torch.optim.RAdam(m.parameters(), 0.05)])
def test_batches_of_any_shape_are_trained_as_in_eager_code(make_optimizer: Callable[[nn.Module], Any]) -> None:
    """RAdam's sixth step is another one than its first five: it is captured again."""
    model, lines = Words(), list[str]()
    eager = copy.deepcopy(model)
    optimizer, eager_optimizer = make_optimizer(model), make_optimizer(eager)
    train_step = steps_for(model, optimizer, lines, clip_grad_norm=0.5)
    for number, shape in enumerate(SHAPES * 2):
        batch = batch_of(*shape)
        torch.manual_seed(number)
        eager_optimizer.zero_grad()
        loss = nn.functional.cross_entropy(eager(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        eager_optimizer.step()
        torch.manual_seed(number)
        assert bitwise(train_step(batch), loss.detach()), number
        assert bitwise(train_step.grad_norm, norm), number
        assert all(map(bitwise, model.parameters(), eager.parameters())), number
    assert len(train_step.plans) == 3
    planned = [line for line in lines if "ms a step predicted" in line]
    assert len(planned) == (3 if make_optimizer is adam else 6)
    assert planned[1].startswith("placewise: plan 2 for int64 of shape [6, 7] and int64 of shape [6]: ")
    train_step.close()


def test_structures_of_batches_have_plans_of_their_own() -> None:
    model, lines = nn.Linear(3, 2), list[str]()
    train_step = steps_for(model, adam(model), lines)
    x, y = torch.randn(4, 3), torch.randint(2, (4,))
    train_step((x, y))
    train_step([x.double().float(), y])  # what a DataLoader gives
    assert len(lines) == 1
    train_step(({"input": x}, y))
    assert len(lines) == 2
    train_step.close()


def test_later_plans_start_from_the_first_one() -> None:
    """With no time to search, a plan for another shape is the first one's placement."""
    model = Words()
    train_step = steps_for(model, adam(model), [])
    train_step(batch_of(6, 4))
    train_step(batch_of(6, 9))
    first, second = train_step.plans
    assert first.placement == second.placement
    train_step.close()


def test_there_is_a_limit_of_plans() -> None:
    model = Words()
    train_step = steps_for(model, adam(model), [], max_plans=2)
    train_step(batch_of(6, 4))
    train_step(batch_of(6, 5))
    with pytest.raises(ExecutionError, match=r"int64 of shape \[6, 6\].* would need plan 3: pad batches to fewer shapes"):
        train_step(batch_of(6, 6))
    assert torch.isfinite(train_step(batch_of(6, 5)))
    train_step.close()


def test_a_model_that_changes_is_captured_again() -> None:
    model, lines = Words(), list[str]()
    train_step = steps_for(model, adam(model), lines)
    train_step(batch_of(6, 4))
    model.embedding.weight.requires_grad_(False)
    before = model.embedding.weight.clone()
    train_step(batch_of(6, 4))
    assert torch.equal(model.embedding.weight, before)
    assert lines[1] == "placewise: requires_grad of embedding.weight is False now; capturing again"
    assert lines[2].startswith("placewise: plan 1 for")
    train_step.close()


def test_evaluation_between_steps() -> None:
    model, lines = Words(), list[str]()
    train_step = steps_for(model, adam(model), lines)
    for _ in range(2):
        train_step(batch_of(6, 4))
        model.eval()
        tokens = batch_of(5, 8)[0]
        with torch.no_grad():
            assert torch.equal(train_step.evaluate(tokens), model(tokens))
        model.train()
    assert len(lines) == 2
    train_step.close()


def test_outputs_beside_the_loss() -> None:
    model = Words()
    train_step = steps_for(model, adam(model), [], outputs=True)
    found = train_step(batch_of(6, 4))
    assert isinstance(found, pw.StepResult)
    assert found.output.shape == (6, 3)
    train_step.close()


def test_one_device_needs_no_search() -> None:
    model, lines = Words(), list[str]()
    train_step = steps_for(model, adam(model), lines, cluster=cpu_cluster(1))
    assert torch.isfinite(train_step(batch_of(6, 4)))
    assert set(train_step.plans[0].placement) == {"cpu:0"}
    train_step.close()


def test_a_machine_that_nobody_knows_is_refused() -> None:
    model = Words()
    with pytest.raises(pw.ClusterError, match="is neither a file nor a preset"):
        steps_for(model, adam(model), [], cluster="nowhere")


def test_a_second_call_meanwhile_is_refused() -> None:
    """Steps of two shapes would change the same parameters at once; a plan's line is reported while a step is under way."""
    refused = list[str]()

    def report(line: str) -> None:
        with pytest.raises(ExecutionError, match="already running") as caught:
            steps(batch_of(2, 3))
        refused.append(str(caught.value))

    model = Words()
    steps = pw.train_step(
        model, nn.functional.cross_entropy, adam(model), cluster=cpu_cluster(2), seconds=0, report=report
    )  # fmt: skip
    steps(batch_of(6, 4))
    assert len(refused) == len(steps.plans) == 1
    steps.close()


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ({"seconds": -1}, "seconds must be a number of at least 0, got -1"),
        ({"seconds": "10"}, "seconds must be a number of at least 0, got '10'"),
        ({"max_plans": 0}, "max_plans must be a whole number of at least 1, got 0"),
        ({"seed": 1.5}, "seed must be a whole number of at least 0, got 1.5"),
        ({"max_plans": float("inf")}, "max_plans must be a whole number of at least 1, got inf"),
        ({"max_plans": True}, "max_plans must be a whole number of at least 1, got True"),
        ({"seconds": float("nan")}, "seconds must be a number of at least 0, got nan"),
        ({"seconds": float("inf")}, "seconds must be a number of at least 0, got inf"),
    ],
)
def test_wrong_settings_are_refused(option: dict[str, Any], rule: str) -> None:
    model = Words()
    with pytest.raises(InputError, match=rule):
        steps_for(model, adam(model), [], **option)


def test_a_last_batch_that_can_not_be_split_evenly_has_fewer_micro_batches() -> None:
    """22 rows are two parts of 11, and 5 rows are one; the gradient is that of the mean over the rows."""
    model, lines = nn.Linear(4, 3), list[str]()
    eager = copy.deepcopy(model)
    train_step = steps_for(model, torch.optim.SGD(model.parameters(), 0.1), lines, micro_batches=4)
    optimizer = torch.optim.SGD(eager.parameters(), 0.1)
    for rows in (16, 22, 5):
        inputs, target = torch.randn(rows, 4), torch.randint(3, (rows,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(eager(inputs), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        torch.testing.assert_close(train_step((inputs, target)), loss.detach())
        torch.testing.assert_close(model.weight, eager.weight)
    assert [line.partition(" in ")[2].partition(":")[0] for line in lines[1:]] == [
        "2 instead of 4 micro-batches",
        "1 instead of 4 micro-batches",
    ]
    assert "instead" not in lines[0]
    with pytest.raises(InputError, match="can't be split into 4 micro-batches"):
        steps_for(eager, optimizer, lines, micro_batches=4)((torch.randn(5, 4), torch.randint(3, (5,))))
