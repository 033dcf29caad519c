"""What a step notes about itself: when each instruction ran, and how many bytes it made."""

from torch import Tensor


class Notes:
    """Times and sizes by instruction; lanes add to it from their own threads."""

    def __init__(self) -> None:
        self.times: dict[int, tuple[float, float]] = {}  # instruction -> start and end, in seconds of one clock
        self.nbytes: dict[int, int] = {}  # instruction -> bytes of the storages that it made

    def add(self, number: int, start: float | None, end: float | None, *made: Tensor | None) -> None:
        """Notes an instruction; one on a GPU gets its times when the step has ended.

        An op may return None for a gradient that nobody wants.
        """
        if start is not None and end is not None:
            self.times[number] = (start, end)
        storages = [tensor.untyped_storage() for tensor in made if tensor is not None]
        self.nbytes[number] = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
