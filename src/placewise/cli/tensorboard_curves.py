"""Learning curves for TensorBoard."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from placewise.core.errors import InputError

if TYPE_CHECKING:
    from placewise.search.driver import Progress

Listener = Callable[["Progress"], None]
Scalars = Callable[[str, float, int], None]  # a name, a value, and a number of steps


@contextmanager
def scalars(folder: str | None) -> Iterator[Scalars]:
    """Gives a function that writes finite values to a folder for TensorBoard; without a folder it does nothing."""
    if folder is None:
        yield lambda name, value, step: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("--tensorboard needs TensorBoard: pip install 'placewise[learned]'") from None
    try:
        writer = SummaryWriter(folder)
    except OSError as reason:
        raise InputError(f"{folder}: can't be written: {reason.strerror}") from None

    def write(name: str, value: float, step: int) -> None:
        if math.isfinite(value):
            writer.add_scalar(name, value, step)

    try:
        yield write
    finally:
        writer.close()


@contextmanager
def curves(folder: str | None) -> Iterator[Listener]:
    """Gives a function that writes a search's progress to a folder for TensorBoard; without a folder it does nothing.

    It writes the best step's seconds and every note that is a finite number, by evaluations spent.
    """
    with scalars(folder) as write:

        def listen(progress: "Progress") -> None:
            for name, value in {"best_step_seconds": progress.step_seconds, **progress.notes}.items():
                if isinstance(value, (int, float)):
                    write(name, value, progress.evaluations)

        yield listen
