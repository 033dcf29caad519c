"""Learning curves for TensorBoard."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from placewise.core.errors import InputError

if TYPE_CHECKING:
    from placewise.search.driver import Progress

Listener = Callable[["Progress"], None]


@contextmanager
def curves(folder: str | None) -> Iterator[Listener]:
    """Gives a function that writes a search's progress to a folder for TensorBoard; without a folder it does nothing.

    It writes the best step's seconds and every note that is a finite number, by evaluations spent.
    """
    if folder is None:
        yield lambda progress: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("--tensorboard needs TensorBoard: pip install 'placewise[learned]'") from None
    try:
        writer = SummaryWriter(folder)
    except OSError as reason:
        raise InputError(f"{folder}: can't be written: {reason.strerror}") from None

    def write(progress: "Progress") -> None:
        for name, value in {"best_step_seconds": progress.step_seconds, **progress.notes}.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                writer.add_scalar(name, value, progress.evaluations)

    try:
        yield write
    finally:
        writer.close()
