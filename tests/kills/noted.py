"""Runs the command line, notes its phases, and may send itself a signal in one of them.

python tests/kills/noted.py NOTE PHASE:SIGNAL:EVENT place ...    the signal at this call or return of the phase
python tests/kills/noted.py NOTE count place ...                 counts the calls and returns of all phases
python tests/kills/noted.py NOTE - place ...                     notes the phases alone
"""

import importlib.abc
import importlib.machinery
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])  # instead of this folder

from kills.phases import Note

WRAPPED = {  # module -> what begins a phase there
    "placewise.cli.running": {"run": "rest"},
    "placewise.models": {"load_graph": "capture", "load_step": "capture"},
    "placewise.measure.random_batch": {"load_with_weights": "capture"},
    "placewise.bounds.best_bound": {"bound": "bound"},
    "placewise.search.driver": {"search": "search"},
    "placewise.search.store": {"Run.add": "recording", "Run.finish": "recording", "RunFile.create": "recording"},
    "placewise.report.page.html": {"write_page": "report"},
    "placewise.core.plan": {"Plan.save": "report"},
    "placewise.run.step.train_step": dict.fromkeys(
        ("TrainStep.__call__", "TrainStep.trace", "TrainStep.host_seconds"), "step"
    ),
}


class Phases(importlib.abc.MetaPathFinder):
    """Wraps functions as soon as their module is loaded."""

    def __init__(self, note: Note) -> None:
        self.note = note

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns how to load a module of ours so that its phases are noted."""
        if name not in WRAPPED:
            return None
        specification = importlib.machinery.PathFinder.find_spec(name, path)
        assert specification is not None
        loader = specification.loader
        assert loader is not None
        load = loader.exec_module

        def load_and_wrap(module: ModuleType) -> None:
            load(module)
            for function, phase in WRAPPED[name].items():
                owner, _, short = function.rpartition(".")
                holder = getattr(module, owner) if owner else module
                setattr(holder, short, self._in_phase(getattr(holder, short), phase))

        loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return specification

    def _in_phase(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def noted(*values: Any, **named: Any) -> Any:
            outer, self.note.phase = self.note.phase, phase
            try:
                return function(*values, **named)
            finally:
                self.note.phase = outer

        return noted


def watch(note: Note, wanted: str) -> None:
    """Counts calls and returns from here on; sends the signal when its event has come."""
    phase, number, event = (
        ("", 0, 0) if wanted == "count" else ((parts := wanted.split(":"))[0], int(parts[1]), int(parts[2]))
    )

    def on_event(frame: Any, what: str, argument: Any) -> None:
        now = note.phase
        if note.count(now) == event and now == phase:
            sys.setprofile(None)
            os.kill(os.getpid(), number)

    sys.setprofile(on_event)


def main() -> int:
    """Runs one command; its phases are in the note. What it loads before it runs is the phase of imports."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in a shell's background ignores it
    note = Note(Path(sys.argv[1]))
    note.phase = "import"
    sys.meta_path.insert(0, Phases(note))
    from placewise.cli import main as command_line

    if sys.argv[2] != "-":
        watch(note, sys.argv[2])
    return command_line(sys.argv[3:])


if __name__ == "__main__":
    sys.exit(main())
