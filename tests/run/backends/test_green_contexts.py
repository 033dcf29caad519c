"""Virtual devices without a GPU: the driver's structure, splitting with a driver that is faked, and what fails."""

import ctypes
from ctypes import c_uint
from typing import Any

import pytest

from placewise.core.errors import ExecutionError
from placewise.run.backends import green_contexts
from placewise.run.backends.green_contexts import Resource, _Driver, _slices, _split


class Splitter:
    """A driver that can only make groups whose size is a multiple of 8: 132 multiprocessors give 4 of 32, not 4 of 33."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, name: str, parts: Any, found: Any, whole: Any, rest: Any, flags: int, size: int) -> None:
        assert name == "cuDevSmResourceSplitByCount"
        self.sizes.append(size)
        rounded = -(-size // 8) * 8
        number = ctypes.cast(found, ctypes.POINTER(c_uint)).contents
        number.value = min(number.value, 132 // rounded)
        for part in parts[: number.value]:
            part.num_multiprocessors = rounded


def whole() -> Resource:
    resource = Resource()
    resource.num_multiprocessors = 132
    return resource


def test_the_resource_has_the_drivers_layout() -> None:
    assert ctypes.sizeof(Resource) == 144
    assert Resource.num_multiprocessors.offset == 96


def test_slices_are_equal_and_as_large_as_can_be() -> None:
    driver: Any = Splitter()
    assert [part.num_multiprocessors for part in _split(driver, whole(), 4, "cuda:0")] == [32] * 4
    assert driver.sizes == [33, 32]


def test_more_slices_than_multiprocessors_are_refused() -> None:
    driver: Any = Splitter()
    with pytest.raises(ExecutionError, match="cuda:0 has 132 multiprocessors, which can't be cut into 40 slices"):
        _split(driver, whole(), 40, "cuda:0")


def test_slices_of_given_sizes_are_made_of_equal_parts() -> None:
    """32 and 64 multiprocessors: one and two parts of 32."""
    driver: Any = Splitter()
    slices = _slices(driver, whole(), (32, 64), "cuda:0")
    assert [[part.num_multiprocessors for part in parts] for parts in slices] == [[32], [32, 32]]
    assert driver.sizes == [32]


@pytest.mark.parametrize("sizes", [(33, 66), (64, 96), (4, 8)])
def test_sizes_that_the_gpu_does_not_have_are_refused(sizes: tuple[int, ...]) -> None:
    driver: Any = Splitter()
    with pytest.raises(ExecutionError, match=f"132 multiprocessors, which can't be cut into slices of {sizes[0]} and"):
        _slices(driver, whole(), sizes, "cuda:0")


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(green_contexts, "LIBRARY", "libthereisnone.so.1")
    with pytest.raises(ExecutionError, match="there is no CUDA driver"):
        _Driver()
