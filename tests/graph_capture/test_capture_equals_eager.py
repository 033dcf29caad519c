"""The captured program, run op by op, gives bit for bit what eager PyTorch gives: losses, parameters, buffers and state.

A step is captured after one eager step has made the optimizer's state; three more are then run both ways from the same
start, with the same seeds, and with the learning rate changed in between.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import interpreter
import pytest
import torch
import torch.nn.functional as F
from eager_steps import OPTIMIZERS, Mixture, adam_by_hand, bitwise, close, cut, eager_step, snapshot, token_batches
from tiny_zoo import TINY_ZOO, randomized
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import placewise as pw
from placewise import zoo
from placewise.core.errors import CaptureError
from placewise.graph_capture.capture import CapturedStep, capture_step
from placewise.graph_capture.training_step import TrainingStep

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")


@pytest.fixture(autouse=True)
def same_kernels() -> Iterator[None]:
    """Plain ATen kernels, on both sides: oneDNN and the fused attention of the CPU round differently.

    One thread, because a second one only makes such small ops wait on a busy machine.
    """
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.backends.mkldnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH):
        yield
    torch.set_num_threads(num_threads)


def assert_equal_steps(
    model: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    optimizer: torch.optim.Optimizer,
    batches: list[Any],
    micro_batches: int = 1,
    same: Callable[[Any, Any], bool] = bitwise,
) -> CapturedStep:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> TrainingStep:
        return TrainingStep(model, loss_fn, optimizer, batch, micro_batches)

    eager_step(step(model, optimizer, batches[0]))
    captured = capture_step(step(model, optimizer, batches[0]))
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    for number, batch in enumerate(batches[1:]):
        for group in (*optimizer.param_groups, *twin_optimizer.param_groups):
            group["lr"] = group["lr"] * (0.5 + number)
        torch.manual_seed(number)
        expected = eager_step(step(model, optimizer, batch))
        torch.manual_seed(number)
        parts = [cut(batch, i, micro_batches) for i in range(micro_batches)]
        found = interpreter.run(captured.program, twin, twin_optimizer, parts, loss_fn)
        assert all(same(f, e) for f, e in zip(found, expected, strict=True)), f"losses of step {number}"
        after, wanted = snapshot(twin, twin_optimizer), snapshot(model, optimizer)
        assert after.keys() == wanted.keys()
        assert [key for key in wanted if not same(after[key], wanted[key])] == []
    return captured


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, micro_batches: int) -> None:
    model = Mixture()
    if name == "rprop":  # writes sign[sign > 0], which torch reads as a condition where there is one element
        model.temperature.requires_grad_(False)
    optimizer = OPTIMIZERS[name](model.parameters())
    assert_equal_steps(model, nn.CrossEntropyLoss(), optimizer, token_batches(), micro_batches)


def test_two_parameter_groups_with_their_own_rates() -> None:
    model = Mixture()
    rest = [p for name, p in model.named_parameters() if not name.startswith("cells")]
    groups = [{"params": model.cells.parameters(), "lr": 0.3}, {"params": rest, "lr": 0.01, "weight_decay": 0.1}]
    assert_equal_steps(model, nn.CrossEntropyLoss(), torch.optim.SGD(groups, momentum=0.5), token_batches())


def test_a_program_without_state_at_capture_runs_from_the_first_step_on() -> None:
    """State that the optimizer had not made yet is the same state: captured before, run after one eager step."""
    model = Mixture()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    batches = token_batches()
    captured = pw.capture(model, nn.CrossEntropyLoss(), optimizer, batches[0])
    eager_step(captured.step)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    torch.manual_seed(3)
    (expected,) = eager_step(captured.step)
    torch.manual_seed(3)
    (found,) = interpreter.run(captured.program, twin, twin_optimizer, [batches[0]])
    assert torch.equal(found, expected)
    assert all(bitwise(v, snapshot(twin, twin_optimizer)[k]) for k, v in snapshot(model, optimizer).items())


@pytest.mark.parametrize("name", zoo.MODELS)
def test_the_zoo(name: str) -> None:
    step = zoo.build_step(TINY_ZOO[name], device="cpu")
    assert step.optimizer is not None
    batches = [randomized(step.batch) for _ in range(4)]
    assert_equal_steps(step.model, step.loss_fn, step.optimizer, batches, 1 if name == "inception-v3" else 2)


def transformers_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 16, "attn_implementation": "eager"}
    made: dict[str, Callable[[], nn.Module]] = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)),
        "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**sizes)),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=1)),
    }
    return made[name]()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_transformers(name: str, micro_batches: int) -> None:
    model = transformers_model(name).train()

    def batch() -> dict[str, Tensor]:
        tokens = torch.randint(17, (4, 8))
        labels = torch.randint(2, (4,)) if name == "bert" else tokens
        mask = torch.ones(4, 8, dtype=torch.long).tril(4)
        return {"input_ids": tokens, "labels": labels, "attention_mask": mask}

    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    assert_equal_steps(model, None, optimizer, [batch() for _ in range(4)], micro_batches)


class Calls(nn.Module):
    """A linear layer, some modules, and a function that calls them."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(4, 4)
        self.others = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x), *self.others)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x * 2  # type: ignore[no-any-return]


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


CASES: dict[str, Callable[[], Calls]] = {
    "checkpoint": lambda: Calls(lambda x, m: checkpoint(m, x, use_reentrant=False), stack()),
    "reentrant-checkpoint": lambda: Calls(lambda x, m: checkpoint(m, x, use_reentrant=True), stack()),
    "attention": lambda: Calls(lambda x, m: m(x[None], x[None], x[None])[0], nn.MultiheadAttention(4, 2, dropout=0.1)),
    "sdpa": lambda: Calls(lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)),
    "transformer": lambda: Calls(lambda x, m: m(x[None], x[None]), nn.Transformer(4, 2, 1, 1, 8)),
    "spectral-norm": lambda: Calls(lambda x, m: m(x), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))),
    "weight-norm": lambda: Calls(lambda x, m: m(x), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
    "autograd-function": lambda: Calls(lambda x: Squared.apply(x)),  # type: ignore[no-untyped-call]
    "double-backward": lambda: Calls(lambda x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0]),
    "randomness": lambda: Calls(lambda x: x * torch.rand(4) + torch.randn_like(x) * torch.empty(4).uniform_(-1, 1)),
    "einsum": lambda: Calls(lambda x: torch.einsum("ij,kj->ik", x, x)),
    "views": lambda: Calls(lambda x: torch.cat([v.t() for v in x.view(2, 2, 4).unbind(0)], 1).flip(0).expand(2, 4, 4)),
    "overlapping-writes": lambda: Calls(lambda x: x.clone().diagonal().copy_(x[0]).add_(1).outer(x[1])),
    "double": lambda: Calls(lambda x: x.to("cpu", torch.float64, True).cpu().double().to(x)),
    "interpolate": lambda: Calls(lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear")),
    "gather": lambda: Calls(lambda x: x.gather(1, x.argsort(1)) + x.topk(4)[0].cumsum(1)),
    "channels-last": lambda: Calls(
        lambda x, m: m(x.reshape(2, 2, 2, 2).to(memory_format=torch.channels_last)), nn.Conv2d(2, 2, 1)
    ),
    "compiled": lambda: Calls(lambda x, m: m(x), torch.compile(nn.Linear(4, 4), backend="eager")),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.filterwarnings(
    "ignore:.*checkpoint", "ignore:enable_nested_tensor", "ignore:The .grad attribute", "ignore::DeprecationWarning"
)
@pytest.mark.parametrize("name", CASES)
def test_what_models_do(name: str) -> None:
    model = CASES[name]()
    batches = [(torch.randn(4, 4), torch.randn(())) for _ in range(4)]
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    assert_equal_steps(model, lambda out, y: (out.sum() - y).square(), optimizer, batches)


class Recurrent(nn.Module):
    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_equal_to_rounding(kind: Callable[..., nn.Module]) -> None:
    """On the CPU torch computes the input gates of all steps in one product; the meta device takes them step by step."""
    model = Recurrent(kind(3, 4, num_layers=2, bidirectional=True))
    batches = [(torch.randn(5, 2, 3), torch.randn(5, 2, 8)) for _ in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    assert_equal_steps(model, nn.MSELoss(), optimizer, batches, same=close)


def test_strided_parameters_and_buffers() -> None:
    """A transposed parameter, an expanded buffer: one number in memory."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    first.weight = nn.Parameter(first.weight.data.t())
    second.register_buffer("scale", torch.ones(1).expand(4))
    model = nn.Sequential(first, second)
    batches = [(torch.randn(4, 6).t(), torch.randn(6, 4)) for _ in range(4)]
    captured = assert_equal_steps(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), batches, 2)
    assert captured.graph.tensors.nbytes[captured.graph.tensors.names.index("1.scale")] == 4


def test_parameters_on_one_memory() -> None:
    """Both updates write the same numbers, one after the other, as in eager code."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = nn.Parameter(first.weight.data)
        model = nn.Sequential(first, second)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    batch = (torch.randn(6, 4), torch.randn(6, 4))
    (model, optimizer), (twin, twin_optimizer) = build(), build()
    captured = pw.capture(model, nn.MSELoss(), optimizer, batch)
    for _ in range(3):
        expected = eager_step(captured.step)
        assert torch.equal(interpreter.run(captured.program, twin, twin_optimizer, [batch])[0], expected[0])
    names = captured.graph.tensors.names
    assert "0.weight" in names
    assert "1.weight" not in names


def test_a_loss_that_is_a_method_of_the_model_or_has_buffers() -> None:
    class WithLoss(nn.Linear):
        def loss(self, output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(output, target) + 0.1 * self.weight.square().sum()

    model = WithLoss(4, 3)
    batches = [(torch.randn(6, 4), torch.randn(6, 3)) for _ in range(4)]
    assert_equal_steps(model, model.loss, torch.optim.SGD(model.parameters(), 0.1), batches)
    classes: list[Any] = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(4)]
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1)
    assert_equal_steps(model, weighted, torch.optim.SGD(model.parameters(), 0.1), classes)


def test_inference() -> None:
    model = Mixture().eval()
    tokens = torch.randint(11, (8, 5))
    for micro_batches in (1, 2):
        captured = pw.capture_inference(model, tokens, micro_batches=micro_batches)
        twin = copy.deepcopy(model)
        found = interpreter.run(captured.program, twin, None, list(tokens.chunk(micro_batches)))
        with torch.no_grad():
            expected = [copy.deepcopy(model)(part) for part in tokens.chunk(micro_batches)]
        assert torch.equal(found[0], expected[0])
        assert len(found) == micro_batches


def test_a_number_that_a_function_imported_from_math_computes_is_refused() -> None:
    """A function that was imported from math takes the present value of the step counter; the program would repeat it."""
    model = nn.Linear(2, 2)
    optimizer = adam_by_hand(math.sqrt)(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    with pytest.raises(CaptureError, match="from math import sqrt"):
        pw.capture(model, nn.MSELoss(), optimizer, (torch.randn(2, 2), torch.randn(2, 2)))


def test_mixed_precision_by_casts() -> None:
    """A model in bfloat16 whose norm is in float32, as in Llama."""
    model = Calls(lambda x, m, n: n(m(x.to(torch.bfloat16)).float()), nn.Linear(4, 4), nn.LayerNorm(4))
    model.others[0].to(torch.bfloat16)
    batches = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(4)]
    assert_equal_steps(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), 0.01), batches, 2)


class Accumulating(torch.optim.Optimizer):
    """Divides by the root of the summed squares, which its constructor makes, as Adagrad's did in older torch."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.ones_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    total = self.state[p]["sum"]
                    total.addcmul_(p.grad, p.grad)
                    p.addcdiv_(p.grad, total.sqrt(), value=-group["lr"])


def test_state_that_the_constructor_makes() -> None:
    model = nn.Linear(4, 3)
    batches = [(torch.randn(4, 4), torch.randn(4, 3)) for _ in range(4)]
    assert_equal_steps(model, nn.functional.mse_loss, Accumulating(model.parameters()), batches, 1)
