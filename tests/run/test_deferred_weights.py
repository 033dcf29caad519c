"""Models whose weights are made later: all values are those of a model that is built at once."""

import math
from collections.abc import Callable

import pytest
import torch
from tiny_zoo import TINY_ZOO
from torch import Tensor, nn

from placewise import zoo
from placewise.core.errors import ExecutionError
from placewise.run.deferred_weights import DeferredWeights
from placewise.run.step.own_weights import fill_own


class ManyInitializers(nn.Module):
    """Initializers that draw until they like it, decompose, look at values, copy, tie, cast and write parts."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = nn.Parameter(torch.randn(20, 20) * 0.02)
        nn.init.trunc_normal_(self.drawn, std=0.02)
        self.turned = nn.Parameter(nn.init.orthogonal_(torch.empty(9, 30)))
        self.positions: Tensor
        self.register_buffer("positions", torch.arange(50).float()[:, None] * torch.exp(torch.arange(10))[None])
        self.embedding, self.head = nn.Embedding(30, 8, padding_idx=3), nn.Linear(8, 30)
        self.head.weight = self.embedding.weight
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 40)]
        self.layers = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2)
        self.memory = nn.LSTM(4, 4)
        self.apply(self._initialize)
        self.norm = self.head.weight.norm().item()
        with torch.no_grad():
            self.drawn[5:10].normal_()
            self.drawn[0, 0] = 3
            self.head.weight.mul_(1 / self.norm)
        self.rounded = nn.Linear(8, 8).to(torch.bfloat16)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, math.sqrt(5))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "initializers": ManyInitializers,
    "gpt": lambda: zoo.build_step(TINY_ZOO["gpt"] + ",micro_batches=2", device="cpu").model,
}


@pytest.mark.parametrize(("name", "min_bytes"), [("initializers", 0), ("initializers", 256), ("gpt", 256)])
def test_deferred_weights_are_those_of_a_model_built_at_once(name: str, min_bytes: int) -> None:
    """Also the generator is then where it would be, and tensors that share memory share it."""
    torch.manual_seed(0)
    wanted, after = BUILDERS[name](), torch.get_rng_state()
    torch.manual_seed(0)
    with DeferredWeights(min_bytes) as weights:
        model = BUILDERS[name]()
    assert torch.equal(torch.get_rng_state(), after)
    assert any(parameter.is_meta for parameter in model.parameters())
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters)
    fill_own(model, frozenset(), weights)
    assert torch.equal(torch.get_rng_state(), after)
    assert all(new is old for new, old in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    expected = {**dict(wanted.named_parameters()), **dict(wanted.named_buffers())}
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), key
        assert (tensor.stride(), tensor.requires_grad) == (expected[key].stride(), expected[key].requires_grad)


def test_what_is_far_gets_no_values() -> None:
    """The first layer lives elsewhere: it stays on the meta device."""
    with DeferredWeights(min_bytes=0) as weights:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fill_own(model, frozenset({("0.weight", ""), ("0.bias", "")}), weights)
    assert [parameter.is_meta for parameter in model.parameters()] == [True, True, False, False]


def test_weights_from_elsewhere_are_refused() -> None:
    """A model on the meta device that was not built in the weights, and a misspelt word."""
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(ExecutionError, match="weight is on the meta device and was not built in these deferred weights"):
        fill_own(model, frozenset(), DeferredWeights())
    with pytest.raises(ExecutionError, match=r"weights must be .* got 'nothing'"):
        fill_own(model, frozenset(), "nothing")
    fill_own(model, frozenset(), "empty")
    assert model.weight.isnan().all()
