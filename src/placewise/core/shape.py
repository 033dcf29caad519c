"""What people call a tensor's shape: the type of its elements, and how many there are in each dimension."""

from typing import NamedTuple


class Shape(NamedTuple):
    """The window on a tensor's memory that was made first; it is shown, and changes no step."""

    dtype: str  # as torch names it: float32
    sizes: tuple[int, ...]  # empty for a single number

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.sizes)}"
