"""A compiled step gives bit for bit what eager PyTorch gives, wherever its ops run and in whatever order."""

import pytest
import torch
from compiled_steps import RandomNet, assert_runs_like_eager
from eager_steps import OPTIMIZERS, Mixture, token_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_zoo import TINY_ZOO, randomized
from torch import nn

from placewise import zoo

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, micro_batches: int) -> None:
    """Five steps, without optimizer state at first: the executor creates it as the optimizer's first step would."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Mixture()
        if name == "rprop":
            model.temperature.requires_grad_(False)
        return model, OPTIMIZERS[name](model.parameters())

    seed = 10 * list(OPTIMIZERS).index(name) + micro_batches
    assert_runs_like_eager(build, nn.CrossEntropyLoss(), token_batches(count=5), micro_batches, seed=seed)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_the_zoo(name: str) -> None:
    """A random placement on two devices, in a random order; in program order if there is dropout, to draw as eager does."""
    step = zoo.build_step(TINY_ZOO[name], device="cpu")

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        built = zoo.build_step(TINY_ZOO[name], device="cpu")
        assert built.optimizer is not None
        return built.model, built.optimizer

    batches = [randomized(step.batch) for _ in range(5)]
    in_program_order = any(isinstance(module, nn.Dropout) and module.p for module in step.model.modules())
    micro_batches = 1 if name == "inception-v3" else 2
    assert_runs_like_eager(build, step.loss_fn, batches, micro_batches, seed=1, in_program_order=in_program_order)


@given(seed=st.integers(0, 2**32 - 1), num_ops=st.integers(0, 14), devices=st.integers(1, 3))
@settings(max_examples=200)
def test_random_networks(seed: int, num_ops: int, devices: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = RandomNet(seed, num_ops)
        return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    torch.manual_seed(seed % 1000)
    batches = [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(2)]
    assert_runs_like_eager(build, nn.MSELoss(), batches, seed=seed, devices=devices, in_program_order=False)
