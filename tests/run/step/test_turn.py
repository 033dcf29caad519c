"""A compiled step is run by one thread at a time, in the process that compiled it; nothing waits for ever."""

import copy
import inspect
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from compiled_steps import capture_with_mse, compiled, small_training

from placewise.core.errors import ExecutionError
from placewise.run.backends.cpu_threads import Cancellation, LaneThreads
from placewise.run.devices import RealDevice
from placewise.run.step.turn import Turn


def test_a_second_thread_is_refused_while_the_step_runs() -> None:
    """Four threads call it at once: one runs, and each of the others gets one line."""
    model, optimizer, batch = small_training()
    train_step = compiled(capture_with_mse(model, optimizer, batch))
    refused: list[str] = []
    losses: list[torch.Tensor] = []
    barrier = threading.Barrier(4)

    def call() -> None:
        barrier.wait()
        for _ in range(50):
            try:
                losses.append(train_step(batch))
            except ExecutionError as problem:
                refused.append(str(problem))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(losses) + len(refused) == 200
    assert set(refused) <= {"the train step is already running: call it from one thread at a time"}
    assert int(optimizer.state[next(model.parameters())]["step"]) == len(losses) > 0
    assert train_step(batch).isfinite()


@pytest.mark.parametrize("call", ["__call__", "bring_home", "trace", "host_seconds", "close"])
def test_every_use_is_refused_while_the_step_runs(call: str) -> None:
    model, optimizer, batch = small_training()
    train_step = compiled(capture_with_mse(model, optimizer, batch))
    found: list[Any] = []

    def use() -> None:
        with pytest.raises(ExecutionError, match="already running"):
            getattr(train_step, call)(*([] if call == "close" else [batch]))
        found.append(call)

    train_step._turn.run(use)
    assert found == [call]
    assert train_step(batch).isfinite()


def in_a_child(work: Callable[[], object]) -> str:
    """Returns what the work raises in a forked child, as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends the child if it hangs
        try:
            work()
            os.write(writer, b"nothing")
        except BaseException as problem:
            os.write(writer, f"{type(problem).__name__}: {problem}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be forked here")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_is_refused() -> None:
    """A fork has none of the threads, so the step would wait for them for ever."""
    model, optimizer, batch = small_training()
    train_step = compiled(capture_with_mse(model, optimizer, batch))
    rule = "ExecutionError: the train step was compiled in another process, and its threads are not in this one"
    assert in_a_child(lambda: train_step(batch)).startswith(rule)
    assert in_a_child(train_step.close).startswith(rule)
    assert train_step(batch).isfinite()


def interrupted(turn: Turn, moment: int) -> bool:
    """Runs with Ctrl-C before bytecode `moment` of `Turn.run`, and returns whether it came.

    Python looks for signals at calls, so none comes in the last two lines before the lock is released.
    """
    lines, first = inspect.getsourcelines(Turn.run)
    left, last = iter(range(moment)), first + len(lines) - 2

    def interrupt(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not Turn.run.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lineno < last and next(left, None) is None:
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    sys.settrace(interrupt)
    try:
        turn.run(lambda: None)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_the_lock_is_free_after_an_interrupt() -> None:
    """At whichever bytecode it comes."""
    turn, moment = Turn(), 0
    while interrupted(turn, moment):
        assert not turn._lock.locked(), f"at bytecode {moment}"
        moment += 1
    assert moment > 20


@pytest.mark.parametrize("function", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_step_is_not_copied(function: Callable[[Any], Any]) -> None:
    train_step = compiled(capture_with_mse(*small_training()))
    with pytest.raises(ExecutionError, match=r"can't be copied or pickled, because it owns threads: save the plan"):
        function(train_step)


def test_a_second_interrupt_gives_up_an_op_that_does_not_end() -> None:
    """The first one waits for the op, since the step can go on after it; the second one closes the step."""
    threads = LaneThreads({0: RealDevice("a", "cpu", "cpu", threads=1)}, Cancellation())
    release, interrupts = threading.Event(), iter(range(2))

    def press(*_: object) -> None:
        if next(interrupts) == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            threads.run({0: release.wait}, None)  # type: ignore[dict-item]
    finally:
        signal.signal(signal.SIGALRM, before)
        release.set()
    assert "compile it again" in caught.value.__notes__[0]
    assert threads.is_closed
