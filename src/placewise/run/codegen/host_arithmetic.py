"""The host's own arithmetic (step counters, learning rates): Python computes it once in a step, at one moment.

That is before the first launch, or when the host's lane first needs a result: then the devices have work meanwhile.
"""

from collections.abc import Callable
from typing import Any

from placewise.core.errors import StepChanged
from placewise.graph_capture.call_slots import written_slots
from placewise.graph_capture.program import Branch, Slot
from placewise.graph_capture.resolved_program import ResolvedProgram
from placewise.run.codegen.source import Source

Key = tuple[Slot, int]  # a value of the host, and how often the step has changed it in place by then


def _refuse(subject: str) -> None:
    raise StepChanged(f"{subject} has changed so that the step is another one: capture and compile the step again")


def _add_branch(source: Source, branch: Branch, name_of: Callable[[Slot], str]) -> None:
    comparison = f"{source.function(branch.function)}({', '.join(source.literal(a, name_of) for a in branch.args)})"
    source.add(f"if {comparison} != {branch.outcome!r}: {source.function(_refuse)}({branch.subject!r})")


class HostScalars:
    """What the host computes in one step: the scalars that lanes read, and the program's updates."""

    def __init__(self, compute: Callable[[], tuple[list[Any], list[Any]]]) -> None:
        self._compute = compute
        self._found: tuple[list[Any], list[Any]] | None = None

    def get(self) -> list[Any]:
        """Returns the scalars; the first call computes them."""
        if self._found is None:
            self._found = self._compute()
        return self._found[0]

    @property
    def updates(self) -> list[Any] | None:
        """The updates; None if nothing has been computed."""
        return None if self._found is None else self._found[1]


class HostArithmetic:
    """The host's calls as one function, and which of its values each op reads.

    All of the host's calls run at one moment. If one changes a tensor in place after an op has read it, that op
    gets a copy of the earlier value.
    """

    def __init__(self, resolved: ResolvedProgram) -> None:
        self._resolved = resolved
        self.positions: dict[Key, int] = {}  # of a value in the list that the host's function returns
        self.reads: dict[int, dict[Slot, Key]] = {}  # op -> slot -> what it reads
        self._num_changes: dict[Slot, int] = {}  # in place, in one step
        for call in resolved.host_calls:
            for slot in written_slots(call):
                self._num_changes[slot] = self._num_changes.get(slot, 0) + 1
        computed = {slot for call in resolved.host_calls for slot in call.results} | self._num_changes.keys()
        branches = resolved.program.branches
        self.late_branches = [branch for branch in branches if not computed.isdisjoint(branch.args)]
        self._early_branches = [branch for branch in branches if computed.isdisjoint(branch.args)]

    def build_check(self, resident_positions: dict[Slot, int]) -> Callable[[list[Any]], None]:
        """Returns the function that refuses a step whose hyper-parameters ask for other ops."""
        source = Source("check", ("residents",))
        for branch in self._early_branches:
            _add_branch(source, branch, lambda slot: f"residents[{resident_positions[slot]}]")
        return source.build()

    def build(self, resident_positions: dict[Slot, int]) -> Callable[[list[Any]], tuple[list[Any], list[Any]]]:
        """Returns a function from the residents to the scalars that the lanes read, and the program's updates.

        `resident_positions` has the place of each resident in their list.
        """
        source = Source("host", ("residents",))
        changed: dict[Slot, int] = {}
        known: set[Slot] = set()
        host_calls = set(map(id, self._resolved.host_calls))

        def name_of(slot: Slot) -> str:
            if slot not in known:
                known.add(slot)
                source.add(f"h{slot:d} = residents[{resident_positions[slot]}]")
            return f"h{slot:d}"

        snapshots: dict[Key, str] = {}
        for call in self._resolved.program.calls:
            if id(call) in host_calls:
                expression = source.call(call, name_of, "cpu")
                source.assign(call, [f"h{slot:d}" for slot in call.results] or ["_"], expression)
                known.update(call.results)
                for slot in written_slots(call):
                    changed[slot] = changed.get(slot, 0) + 1
            for slot in self._resolved.host_slots(call.op) if call.op >= 0 else ():
                key = (slot, changed.get(slot, 0))
                self.reads.setdefault(call.op, {})[slot] = key
                self.positions.setdefault(key, len(self.positions))
                if key not in snapshots:
                    snapshots[key] = name_of(slot)
                    if key[1] < self._num_changes.get(slot, 0):
                        snapshots[key] = f"h{slot:d}_{key[1]}"
                        source.add(f"{snapshots[key]} = {name_of(slot)}.clone()")
        for branch in self.late_branches:
            _add_branch(source, branch, name_of)
        updates = ", ".join(name_of(slot) for _, slot in self._resolved.program.updates)
        source.add(f"return [{', '.join(snapshots[key] for key in self.positions)}], [{updates}]")
        return source.build()

    def position(self, op: int, slot: Slot) -> int:
        """Returns the place of what an op reads in the list of scalars."""
        return self.positions[self.reads[op][slot]]
