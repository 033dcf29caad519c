"""Complex numbers: rotary embeddings, Fourier transforms, complex weights, and views that conjugate lazily."""

import pytest
import torch
from compiled_steps import assert_runs_like_eager
from torch import Tensor, nn

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]


class Rotary(nn.Module):
    """Turns pairs of numbers by an angle, as Llama's first code does."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.polar(torch.ones(5, 4), torch.arange(20.0).reshape(5, 4)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.query(x).reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.frequencies).flatten(2)


class Fourier(nn.Module):
    """Filters in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, 5, 2))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.einsum("bli,io->blo", torch.fft.rfft(x), torch.view_as_complex(self.filter))
        power = (spectrum.conj() * spectrum).real + spectrum.conj().imag
        filtered: Tensor = torch.fft.irfft(spectrum, n=8) + torch.fft.fft2(x).real
        return filtered + power.sum(-1, keepdim=True)


class Complex(nn.Module):
    """A complex matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        product = x.to(torch.complex64) @ self.weight
        return (product + product.conj().mT.conj().mT).abs()


@pytest.mark.parametrize("layer", [Rotary, Fourier, Complex])
def test_complex_layers_run_like_eager(layer: type[nn.Module]) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(layer(), nn.Linear(8, 3))
        return model, torch.optim.Adam(model.parameters(), 0.01)

    batches = [(torch.randn(6, 5, 8), torch.randn(6, 5, 3)) for _ in range(3)]
    for seed in range(2):
        assert_runs_like_eager(build, nn.MSELoss(), batches, 1 + seed, seed=seed)
