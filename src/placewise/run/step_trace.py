"""What one traced step did: when each instruction ran, and how many bytes it allocated."""

from torch import Tensor

from placewise.graph_capture.whole_passes import LeanPass, SavedPass


class StepTrace:
    """Times and sizes by instruction; each lane adds its own, from its own thread."""

    def __init__(self) -> None:
        self.times: dict[int, tuple[float, float]] = {}  # instruction -> start and end, in seconds of one clock
        self.nbytes: dict[int, int] = {}  # instruction -> bytes of the storages that it made
        self.rows: dict[int, tuple[int, ...]] = {}  # instruction -> all that one call launched with it

    def add(self, number: int, start: float | None, end: float | None, *made: Tensor | SavedPass | LeanPass | None) -> None:
        """Adds an instruction; the streams fill in the times of what the host launches when the step has ended.

        An op may return None for a gradient that nobody needs.
        """
        if start is not None and end is not None:
            self.times[number] = (start, end)
        storages = []
        for value in made:
            if value is not None:
                tensors = value.own_tensors() if isinstance(value, SavedPass | LeanPass) else [value]
                storages += [tensor.untyped_storage() for tensor in tensors]
        self.nbytes[number] = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
