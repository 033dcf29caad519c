"""A step returns what the model returned, in the model's own structure."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from compiled_steps import compiled, small_training
from torch import Tensor, nn

import placewise as pw
from placewise.core.errors import CaptureError
from placewise.run.step.step_result import StepResult


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclass
class Answer:
    logits: Tensor
    extra: dict[str, Any]


class Odd:
    """A class that nobody has registered anywhere, as the caches of transformers are."""

    def __init__(self, layers: list[Tensor]) -> None:
        self.layers, self.length = layers, len(layers)


class Returning(nn.Module):
    """A layer whose result is returned in a structure."""

    def __init__(self, structure: Any) -> None:
        super().__init__()
        self.layer, self.structure = nn.Linear(4, 3), structure

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return self.structure(y, y.relu())


STRUCTURES = {
    "tensor": lambda y, z: y,
    "one-entry list": lambda y, z: [y],
    "tuple": lambda y, z: (y, (z, y), None, "text", 3),
    "named tuple": lambda y, z: Pair(y, [z]),
    "dict": lambda y, z: {"y": y, "z": {"z": z}},
    "dataclass": lambda y, z: Answer(y, {"z": z, "n": 2}),
    "object": lambda y, z: Odd([y, z]),
    "views": lambda y, z: (y, y[1:], y.t(), z[:, 0]),
}


def flat(value: Any) -> list[Any]:
    """Returns a structure as nested lists with the names of its classes, so that two can be compared."""
    if isinstance(value, Tensor):
        return ["Tensor", value.tolist()]
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *map(flat, value)]
    if isinstance(value, dict):
        return [type(value).__name__, *[[key, flat(entry)] for key, entry in value.items()]]
    return [type(value).__name__, flat(vars(value)) if hasattr(value, "__dict__") else value]


@pytest.mark.parametrize("name", STRUCTURES)
def test_inference_returns_the_models_own_structure(name: str) -> None:
    model, x = Returning(STRUCTURES[name]), torch.randn(6, 4)
    run = compiled(pw.capture_inference(model, x))
    for batch in (x, torch.randn(6, 4)):
        assert flat(run(batch)) == flat(model(batch))
    run.close()


def test_micro_batches_are_joined() -> None:
    """Rows are joined, a number is the mean over the micro-batches, and a parameter is itself."""

    class Whole(Returning):
        def forward(self, x: Tensor) -> Any:
            y = self.layer(x)
            return {"rows": y, "mean": y.mean(), "weight": self.layer.weight}

    whole, x = Whole(None), torch.randn(6, 4)
    run = compiled(pw.capture_inference(whole, x, micro_batches=3))
    found, wanted = run(x), whole(x)
    assert list(found) == list(wanted)
    torch.testing.assert_close(found, {key: value.detach() for key, value in wanted.items()})
    run.close()


def test_what_can_not_be_joined_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"a tensor of shape \[3, 2\] for a micro-batch of 2 rows.*use micro_batches=1"):
        pw.capture_inference(Returning(lambda y, z: (y, y.t())), torch.randn(6, 4), micro_batches=3)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_training_step_returns_the_output_beside_the_loss(micro_batches: int) -> None:
    model, optimizer, batch = small_training()
    expected = model(batch[0])
    loss = nn.MSELoss()(expected, batch[1])
    options: dict[str, Any] = {"micro_batches": micro_batches, "outputs": True, "clip_grad_norm": 0.1}
    train_step = compiled(pw.capture(model, nn.MSELoss(), optimizer, batch, **options))
    found = train_step(batch)
    assert isinstance(found, StepResult)
    torch.testing.assert_close(found.output, expected.detach())
    torch.testing.assert_close(found.loss, loss.detach())
    assert found.grad_norm is train_step.grad_norm
    train_step.close()


def test_the_output_is_not_kept_if_nobody_asks_for_it() -> None:
    model, optimizer, batch = small_training("meta")
    plain, with_output = (pw.capture(model, nn.MSELoss(), optimizer, batch, outputs=outputs) for outputs in (False, True))
    assert len(plain.graph.outputs) == 1
    assert len(with_output.graph.outputs) == 2


def test_outputs_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=8, n_layer=2, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(32, (2, 6))
    run = compiled(pw.capture_inference(model, {"input_ids": tokens, "labels": tokens}))
    with torch.no_grad():
        found, wanted = run({"input_ids": tokens, "labels": tokens}), model(input_ids=tokens, labels=tokens)
    assert type(found) is type(wanted)
    assert list(found) == list(wanted)
    torch.testing.assert_close(found.logits, wanted.logits)
    assert type(found.past_key_values) is type(wanted.past_key_values)
    torch.testing.assert_close(found.past_key_values.layers[1].keys, wanted.past_key_values.layers[1].keys)
    run.close()
