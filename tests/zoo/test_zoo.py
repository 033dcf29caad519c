"""The zoo: exact sizes, one-line errors, nothing allocated on meta, and every model really trains at a tiny size."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_zoo import TINY_ZOO, randomized
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placewise import zoo
from placewise.core.errors import ModelError
from placewise.graph_capture.training_step import TrainingStep


def loss_of(step: TrainingStep) -> torch.Tensor:
    inputs, target = step.batch
    assert step.loss_fn is not None
    return step.loss_fn(step.model(*inputs) if isinstance(inputs, tuple) else step.model(inputs), target)


def num_parameters(step: TrainingStep) -> int:
    return sum(p.numel() for p in step.model.parameters())


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("inception-v3", 27_161_264),
        ("inception-v3:aux=false", 23_834_568),
        ("resnet", 25_557_032),
        ("resnet:depth=101", 44_549_160),
        ("resnet:depth=152", 60_192_808),
        ("resnet:depth=200", 64_673_832),
        ("cifar-cnn", 1_068_298),
        ("gpt", 124_439_808),
        ("gpt:size=medium", 354_823_168),
        ("gpt:size=large", 774_030_080),
        ("gpt:size=xl", 1_557_611_200),
        ("bert", 110_106_428),
        ("bert:size=large", 336_226_108),
    ],
)
def test_published_parameter_counts(text: str, count: int) -> None:
    assert num_parameters(zoo.build_step(text)) == count


def test_rnnlm_parameter_count() -> None:
    """Vocabulary 3, width 2: table 3*2, each of 2 cells 4*2*(2+2) weights and 2*4*2 biases, projection 2*3 + 3."""
    assert num_parameters(zoo.build_step("rnnlm:layers=2,hidden=2,vocab=3")) == 6 + 2 * (32 + 16) + 9


def test_nmt_parameter_count() -> None:
    """Vocabulary 3, width 2: 2 tables of 3*2, 2 cells of 48, attention 4 + 4 + 2 + 8, projection 2*3 + 3."""
    assert num_parameters(zoo.build_step("nmt:layers=1,hidden=2,vocab=3")) == 12 + 2 * 48 + 18 + 9


def test_nmt_with_input_feeding_reads_the_attention_of_the_step_before() -> None:
    """The decoder's first cell has inputs of width 4, not 2: 4*2*2 more weights."""
    size = "layers=1,hidden=2,vocab=3,batch=1,length=2"
    plain, fed = zoo.build_step(f"nmt:{size}", "cpu"), zoo.build_step(f"nmt:{size},input_feeding=true", "cpu")
    assert num_parameters(fed) - num_parameters(plain) == 16
    for step, is_read in ((plain, False), (fed, True)):
        attended: list[torch.Tensor] = []
        model = step.model
        model.get_submodule("attention").register_forward_hook(
            lambda module, given, result, kept=attended: kept.append(result)
        )
        tokens = torch.zeros(1, 2, dtype=torch.long)
        logits = model(tokens, tokens)
        (gradient,) = torch.autograd.grad(logits[1].sum(), attended[0], allow_unused=True)
        assert (gradient is not None) == is_read


def test_nmt_layers_are_told_apart_by_path() -> None:
    names = dict(zoo.build_step("nmt:layers=4").model.named_modules())
    assert {"encoder.embedding", "encoder.layers.0", "decoder.layers.3", "attention", "projection"} <= names.keys()


def test_every_model_has_a_tiny_size() -> None:
    assert TINY_ZOO.keys() == zoo.MODELS.keys()


@pytest.mark.parametrize("name", zoo.MODELS)
def test_builds_on_meta(name: str) -> None:
    step = zoo.build_step(name)
    tensors = [*step.model.parameters(), *step.model.buffers(), *tree_leaves(step.batch)]
    assert all(tensor.is_meta for tensor in tensors)
    assert {tensor.shape[0] for tensor in tree_leaves(step.batch)} == {zoo.model_options(name)["batch"]}
    assert step.micro_batches == 1


@pytest.mark.parametrize("name", zoo.MODELS)
def test_trains_on_meta(name: str) -> None:
    """Forward, backward and update need no values: no .item(), no control flow that depends on data."""
    step = zoo.build_step(TINY_ZOO[name])
    loss = loss_of(step)
    torch.autograd.backward(loss)
    assert step.optimizer is not None
    step.optimizer.step()
    assert loss.is_meta
    assert loss.shape == ()


class OutsideMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the ops that give a tensor with memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_ops = 0
        self.allocating: list[str] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.num_ops += 1
        if any(isinstance(leaf, torch.Tensor) and not leaf.is_meta for leaf in tree_leaves(out)):
            self.allocating.append(str(func))
        return out


@pytest.mark.parametrize("name", zoo.MODELS)
def test_meta_build_allocates_nothing(name: str) -> None:
    with OutsideMeta() as recorded:
        zoo.build_step(name)
    assert recorded.num_ops > 0
    assert recorded.allocating == []


@pytest.mark.parametrize("name", zoo.MODELS)
def test_trains_for_real(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        step = zoo.build_step(TINY_ZOO[name], device="cpu")
        inputs, target = randomized(step.batch, torch.Generator().manual_seed(1))
        step = TrainingStep(step.model, step.loss_fn, step.optimizer, (inputs, target))
        before = {key: p.detach().clone() for key, p in step.model.named_parameters()}
        loss = loss_of(step)
        torch.autograd.backward(loss)
        assert step.optimizer is not None
        step.optimizer.step()
    assert loss.isfinite()
    after = dict(step.model.named_parameters())
    assert all(p.isfinite().all() for p in after.values())
    # A bias before a softmax over all positions (BERT's key.bias) has no gradient in exact arithmetic.
    unchanged = [key for key, p in after.items() if torch.equal(p, before[key]) and not key.endswith("key.bias")]
    assert unchanged == []


def test_inception_trains_its_auxiliary_head() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        step = zoo.build_step("inception-v3:batch=2,classes=4", device="cpu")
        logits, auxiliary = step.model(step.batch[0])
    assert step.loss_fn is not None
    expected = torch.nn.functional.cross_entropy(logits, step.batch[1])
    expected = expected + 0.4 * torch.nn.functional.cross_entropy(auxiliary, step.batch[1])
    torch.testing.assert_close(step.loss_fn((logits, auxiliary), step.batch[1]), expected)
    step.model.eval()
    assert step.model(step.batch[0]).shape == (2, 4)


@pytest.mark.parametrize(
    ("text", "smallest"),
    [
        ("inception-v3:aux=false,batch=2", 75),
        ("inception-v3:aux=false,batch=1", 107),
        ("inception-v3:aux=true,batch=2", 299),
        ("inception-v3:aux=true,batch=1", 347),
        ("resnet:batch=1", 33),
    ],
)
def test_smallest_image_is_the_smallest_that_runs(text: str, smallest: int) -> None:
    """The rule is tight: the smallest allowed image runs, and one pixel less fails in the network itself."""
    step = zoo.build_step(f"{text},image={smallest}")
    assert loss_of(step).shape == ()
    with pytest.raises(ModelError, match=f"'image' must be at least {smallest} .* got {smallest - 1}"):
        zoo.build_step(f"{text},image={smallest - 1}")
    images = torch.zeros(step.batch[0].shape[0], 3, smallest - 1, smallest - 1, device="meta")
    with pytest.raises((RuntimeError, ValueError)):
        step.model(images)


def test_gpt_does_not_look_ahead() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        step = zoo.build_step(TINY_ZOO["gpt"] + ",dropout=0", device="cpu")
    tokens = torch.zeros(1, 8, dtype=torch.long)
    changed = tokens.clone()
    changed[0, 5] = 1
    before, after = step.model(tokens)[0], step.model(changed)[0]  # [length, vocab]
    assert torch.equal(before[:5], after[:5])
    assert not torch.equal(before[5:], after[5:])


def test_bert_does_not_see_padding() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        step = zoo.build_step(TINY_ZOO["bert"] + ",dropout=0", device="cpu")
    tokens = torch.zeros(1, 8, dtype=torch.long)
    changed = tokens.clone()
    changed[0, 6:] = 1
    mask = torch.arange(8)[None] < 6
    before, after = (step.model(x, torch.zeros_like(tokens), mask)[0][0, :6] for x in (tokens, changed))
    torch.testing.assert_close(before, after)


def test_parse() -> None:
    assert zoo.parse_model("nmt") == ("nmt", {})
    assert zoo.parse_model("nmt:layers=4,batch=64") == ("nmt", {"layers": "4", "batch": "64"})


def test_options_have_the_papers_defaults() -> None:
    assert zoo.model_options("nmt") == {
        "layers": 2,
        "hidden": 1024,
        "length": 40,
        "batch": 64,
        "vocab": 32000,
        "input_feeding": False,
        "micro_batches": 1,
    }


def test_micro_batches() -> None:
    assert zoo.build_step("gpt:micro_batches=4").micro_batches == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "vgg",
            "unknown model 'vgg': expected one of inception-v3, resnet, cifar-cnn, rnnlm, nmt, gpt, bert",
        ),
        ("", "unknown model ''"),
        ("nmt:", "model 'nmt': each option must be name=value, got ''"),
        ("nmt:layers", "model 'nmt': each option must be name=value, got 'layers'"),
        ("nmt:layers=", "model 'nmt': each option must be name=value, got 'layers='"),
        ("nmt:layers=1,layers=2", "model 'nmt': option 'layers' must be given once, got 'nmt:layers=1,layers=2'"),
        (
            "nmt:steps=3",
            "model 'nmt': unknown option 'steps': expected one of layers, hidden, length, batch, vocab, input_feeding",
        ),
        ("resnet:depth=51", "model 'resnet': option 'depth' must be one of 50, 101, 152, 200, got 51"),
        ("gpt:size=tiny", "model 'gpt': option 'size' must be one of small, medium, large, xl, got tiny"),
        ("nmt:layers=two", "model 'nmt': option 'layers' must be a whole number, got two"),
        ("nmt:layers=1.5", "model 'nmt': option 'layers' must be a whole number, got 1.5"),
        ("nmt:layers=0", "model 'nmt': option 'layers' must be from 1 to 1000000, got 0"),
        ("nmt:batch=-4", "model 'nmt': option 'batch' must be from 1 to 1000000, got -4"),
        ("nmt:hidden=99999999", "model 'nmt': option 'hidden' must be from 1 to 1000000, got 99999999"),
        ("resnet:image=10001", "model 'resnet': option 'image' must be from 1 to 10000, got 10001"),
        ("gpt:dropout=1.5", "model 'gpt': option 'dropout' must be from 0 to 1, got 1.5"),
        ("gpt:dropout=nan", "model 'gpt': option 'dropout' must be from 0 to 1, got nan"),
        ("gpt:dropout=much", "model 'gpt': option 'dropout' must be a number, got much"),
        ("gpt:layers=-1", "model 'gpt': option 'layers' must be from 0 to 1000000, got -1"),
        ("gpt:hidden=100", "model 'gpt': option 'hidden' must be a multiple of the 12 heads, got 100"),
        ("bert:length=513", "model 'bert': option 'length' must be from 1 to 512, got 513"),
        ("inception-v3:aux=maybe", "model 'inception-v3': option 'aux' must be true or false, got maybe"),
        (
            "inception-v3:image=298",
            "model 'inception-v3': option 'image' must be at least 299 with the auxiliary head, got 298",
        ),
        ("nmt:micro_batches=3", "model 'nmt': option 'micro_batches' must divide the batch of 64, got 3"),
        ("nmt:micro_batches=0", "model 'nmt': option 'micro_batches' must be from 1 to 1000000, got 0"),
        (
            "resnet:image=32,batch=4,micro_batches=4",
            "model 'resnet': option 'image' must be at least 33 for a (micro-)batch of 1, got 32",
        ),
        ("nmt:layers=\n\t1\n2", "model 'nmt': option 'layers' must be a whole number, got '1\\n2'"),
    ],
)
def test_errors_are_one_line_that_names_the_rule(text: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        zoo.build_step(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_import_is_light() -> None:
    code = "import sys, placewise.zoo as zoo; zoo.parse_model('nmt:layers=4'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
