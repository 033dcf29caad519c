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
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map
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

    One thread, for a second one only makes such small ops wait where the machine is busy.
    """
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.backends.mkldnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH):
        yield
    torch.set_num_threads(num_threads)


def cut(batch: Any, number: int, count: int) -> Any:
    return tree_map(lambda t: t.chunk(count)[number] if isinstance(t, Tensor) and t.dim() else t, batch)


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def eager_step(step: TrainingStep) -> list[Tensor]:
    """The training loop that everybody writes, with gradient accumulation."""
    assert step.optimizer is not None
    step.optimizer.zero_grad()
    losses = []
    for number in range(step.micro_batches):
        part = cut(step.batch, number, step.micro_batches)
        if isinstance(part, tuple):
            assert step.loss_fn is not None
            loss = step.loss_fn(call(step.model, part[0]), part[1])
        else:
            loss = call(step.model, part).loss
        if step.micro_batches > 1:
            loss = loss / step.micro_batches
        torch.autograd.backward(loss)
        losses.append(loss.detach())
    step.optimizer.step()
    return losses


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    values: dict[str, Any] = {f"model.{name}": value for name, value in model.state_dict().items()}
    values |= {f"buffer.{name}": value for name, value in model.named_buffers()}
    for name, parameter in model.named_parameters():
        values |= {f"state.{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return values


def bitwise(found: Any, expected: Any) -> bool:
    if isinstance(found, Tensor):
        return bool(torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num()))
    return bool(type(found) is type(expected) and found == expected)


def close(found: Any, expected: Any) -> bool:
    torch.testing.assert_close(found, expected)
    return True


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
        found = interpreter.run(captured.program, twin, twin_optimizer, parts)
        assert all(same(f, e) for f, e in zip(found, expected, strict=True)), f"losses of step {number}"
        after, wanted = snapshot(twin, twin_optimizer), snapshot(model, optimizer)
        assert after.keys() == wanted.keys()
        assert [key for key in wanted if not same(after[key], wanted[key])] == []
    return captured


def token_batches(rows: int = 8, vocab: int = 11, length: int = 5, count: int = 4) -> list[Any]:
    return [(torch.randint(vocab, (rows, length)), torch.randint(vocab, (rows,))) for _ in range(count)]


class Mixture(nn.Module):
    """A little of everything that a step can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.cells = nn.ModuleList([nn.LSTMCell(6, 5), nn.LSTMCell(5, 6)])
        self.convolution = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.norms = nn.ModuleList([nn.BatchNorm1d(6), nn.LayerNorm(6)])
        self.dropout = nn.Dropout(0.3)
        self.output = nn.Linear(6, 11, bias=False)
        self.output.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(6))
        self.plain = torch.arange(6) * 0.1
        self.number = torch.tensor(0.7)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        embedded = embedded + self.convolution(embedded.transpose(1, 2)).transpose(1, 2)
        state = None
        for step in range(tokens.shape[1]):
            state = self.cells[0](embedded[:, step], state)
        assert state is not None
        hidden = self.norms[0](self.cells[1](state[0])[0])
        hidden = hidden + F.dropout(self.plain, 0.5, self.training) * (self.number * 2) + self.frozen
        hidden = hidden * torch.arange(1, 7) / torch.tensor([1.0, 2, 3, 4, 5, 6]) + hidden.new_tensor([0.25])
        hidden = hidden.masked_fill(hidden > 3, 0.5)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        parts = torch.zeros(hidden.shape)
        parts[:, :4] = hidden[:, 2:]
        parts[:, [5, 4]] += hidden[:, [0, 1]] * self.mean[:2]
        parts[parts > 2] = 1.0
        parts.unsqueeze_(1).squeeze_(1).mul_(self.temperature)
        return self.output(self.dropout(self.norms[1](parts).relu_()))  # type: ignore[no-any-return]


def adam_by_hand(bias: Callable[[float], float]) -> type[torch.optim.Optimizer]:
    """An optimizer as people write them: the step counter is a Python number."""

    class ByHand(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})
            self.beta = 0.9

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state["count"], state["mean"] = 0, torch.zeros_like(p)
                    state["count"] += 1
                    state["mean"].lerp_(p.grad, 1 - self.beta)
                    p.data = p.data - group["lr"] / bias(1 - self.beta ** state["count"]) * state["mean"]

    return ByHand


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, torch.tensor(0.01)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01, lr_decay=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.01),
    "by-hand": lambda p: adam_by_hand(lambda x: x**0.5)(p, lr=0.01),  # type: ignore[call-arg]
}


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


ZOO = {
    "inception-v3": "inception-v3:image=75,batch=2,classes=4,aux=false",
    "resnet": "resnet:depth=50,image=32,batch=4,classes=4",
    "cifar-cnn": "cifar-cnn:batch=4",
    "rnnlm": "rnnlm:layers=2,hidden=8,steps=3,batch=4,vocab=11",
    "nmt": "nmt:layers=2,hidden=8,length=3,batch=4,vocab=11",
    "gpt": "gpt:layers=2,hidden=16,heads=2,length=8,batch=4,vocab=13",
    "bert": "bert:layers=2,hidden=16,heads=2,length=8,batch=4,vocab=13",
}


def randomized(batch: Any) -> Any:
    """Random images, and tokens and labels of 0 or 1, which every model has; masks stay as they are."""

    def draw(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape)
        return tensor if tensor.dtype == torch.bool else torch.where(tensor < 0, tensor, torch.randint(0, 2, tensor.shape))

    return tree_map(draw, batch)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_the_zoo(name: str) -> None:
    step = zoo.build_step(ZOO[name], device="cpu")
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


def test_a_number_that_math_computes_is_refused() -> None:
    """math.sqrt takes the step counter's value as it is now; the program would repeat this moment for ever."""
    model = nn.Linear(2, 2)
    optimizer = adam_by_hand(math.sqrt)(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    with pytest.raises(CaptureError, match="not those of math"):
        pw.capture(model, nn.MSELoss(), optimizer, (torch.randn(2, 2), torch.randn(2, 2)))


def test_dropout_in_a_checkpoint_is_refused() -> None:
    """Eager code draws the same numbers again in backward; the recorded step would draw others."""
    model = Calls(lambda x, m: checkpoint(m, x, use_reentrant=False), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    with pytest.raises(CaptureError, match="in a checkpointed module"):
        pw.capture(model, lambda out: out.sum(), torch.optim.SGD(model.parameters()), torch.randn(4, 4))


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
