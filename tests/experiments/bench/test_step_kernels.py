"""What a step launches, and where two ways to run it differ."""

from threading import Thread

import torch

from placewise.experiments.bench.step_kernels import Launched, differences, kernels_of


def test_ops_are_counted_on_all_threads_without_what_only_prepares_them() -> None:
    """A linear layer is a transposition and a product with an addition; a thread multiplies twice, and adds in place."""
    x, weight, bias = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)

    def other() -> None:
        torch.empty(3).copy_((x * x)[0]).add_(1)
        x.mul(2)

    def run() -> None:
        torch.nn.functional.linear(x, weight, bias)
        thread = Thread(target=other)
        thread.start()
        thread.join()

    found = kernels_of(run, lambda: None, "cpu")
    counts = {name: launched.launches for name, launched in found.items()}
    assert counts.pop("aten::mul") == 2
    assert counts.pop("aten::add_") == 1
    assert {name for name in counts if "view" in name or "empty" in name or name in ("aten::t", "aten::linear")} == set()
    assert all(launched.seconds > 0 for launched in found.values())


def test_rows_are_the_sum_and_what_differs_with_the_largest_time_first() -> None:
    """Both run `same` once; `slow` is launched three times instead of once, `new` only by the second way."""
    first = {"same": Launched(1, 1.0), "slow": Launched(1, 2.0)}
    second = {"same": Launched(1, 0.5), "slow": Launched(3, 5.0), "new": Launched(2, 0.25)}
    assert differences("m", first, second, ("a", "b")) == [
        {"model": "m", "kernel": "all", "a: launches": 2, "b: launches": 6, "a: ms": 3000.0, "b: ms": 5750.0},
        {"model": "m", "kernel": "slow", "a: launches": 1, "b: launches": 3, "a: ms": 2000.0, "b: ms": 5000.0},
        {"model": "m", "kernel": "new", "a: launches": 0, "b: launches": 2, "a: ms": 0.0, "b: ms": 250.0},
    ]
