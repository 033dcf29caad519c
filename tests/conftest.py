"""What several files of tests share."""

from collections.abc import Iterator

import pytest

from placewise.experiments.training_setups.torchvision_ops import declare_missing_ops

declare_missing_ops()


@pytest.fixture
def same_kernels() -> Iterator[None]:
    """Plain ATen kernels on one thread, for eager code and ours."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.backends.mkldnn.flags(enabled=False):
        yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for eager code, as devices and ranks have it: results may depend on the number of threads."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
