"""The host's own arithmetic: what Python computes once in a step, before anything is launched."""

from collections.abc import Callable
from typing import Any

from placewise.graph_capture.program import Slot
from placewise.run.codegen.source import Source
from placewise.run.lower.slots import HOST, Slots, slots_of, written_slots

Key = tuple[Slot, int]  # a value of the host's, and how often the step has changed it in place before


class HostScalars:
    """Which of the host's values each op reads.

    All of the host's calls run before the first launch. Where one changes a tensor in place behind an op that reads it,
    the op gets a copy of what was there before.
    """

    def __init__(self, values: Slots) -> None:
        self._values = values
        self.wanted: dict[Key, int] = {}  # -> its place in the list that the host's function returns
        self.reads: dict[int, dict[Slot, Key]] = {}  # op -> slot -> what it reads
        self._changes: dict[Slot, int] = {}
        for call in values.host_calls:
            for slot in written_slots(call):
                self._changes[slot] = self._changes.get(slot, 0) + 1

    def build(self, positions: dict[Slot, int]) -> Callable[[list[Any]], tuple[list[Any], list[Any]]]:
        """Returns a function from the residents to the numbers for the lanes and to the program's updates.

        `positions` says where each resident stands in its list.
        """
        source = Source("host", ("residents",))
        changed: dict[Slot, int] = {}
        known: set[Slot] = set()
        host_calls = set(map(id, self._values.host_calls))

        def name_of(slot: Slot) -> str:
            if slot not in known:
                known.add(slot)
                source.add(f"h{slot:d} = residents[{positions[slot]}]")
            return f"h{slot:d}"

        snapshots: dict[Key, str] = {}
        for call in self._values.program.calls:
            if id(call) in host_calls:
                expression = source.call(call, name_of, "cpu")
                source.assign(call, [f"h{slot:d}" for slot in call.results] or ["_"], expression)
                known.update(call.results)
                for slot in written_slots(call):
                    changed[slot] = changed.get(slot, 0) + 1
            for slot in slots_of(call) if call.op >= 0 else ():
                if self._values.storages[slot] == HOST:
                    key = (slot, changed.get(slot, 0))
                    self.reads.setdefault(call.op, {})[slot] = key
                    self.wanted.setdefault(key, len(self.wanted))
                    if key not in snapshots:
                        snapshots[key] = name_of(slot)
                        if key[1] < self._changes.get(slot, 0):
                            snapshots[key] = f"h{slot:d}_{key[1]}"
                            source.add(f"{snapshots[key]} = {name_of(slot)}.clone()")
        updates = ", ".join(name_of(slot) for _, slot in self._values.program.updates)
        source.add(f"return [{', '.join(snapshots[key] for key in self.wanted)}], [{updates}]")
        return source.build()
