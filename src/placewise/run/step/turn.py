"""One call of a compiled step at a time, in the process that compiled it: any other would wait for threads in vain."""

import os
import threading
from collections.abc import Callable
from operator import methodcaller
from typing import TypeVar

from placewise.core.errors import ExecutionError

Result = TypeVar("Result")

_try_to_acquire = methodcaller("acquire", blocking=False)


class Turn:
    """Runs one piece of work at a time, and refuses another one meanwhile."""

    def __init__(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()

    def run(self, work: Callable[[], Result]) -> Result:
        """Returns what the work returns.

        Ctrl-C can come between any two bytecodes, so the call that takes the lock also counts it.
        """
        if os.getpid() != self._process:
            raise ExecutionError(
                "the train step was compiled in another process, and its threads are not in this one: compile the plan here"
            )
        taken: list[bool] = []
        try:
            taken.extend(map(_try_to_acquire, [self._lock]))
            if not taken[0]:
                raise ExecutionError("the train step is already running: call it from one thread at a time")
            return work()
        finally:
            if True in taken:
                self._lock.release()
