"""The names that windows have in the lanes, and the lines that make one where it is first needed."""

from collections.abc import Callable

from placewise.capture.program import Slot
from placewise.execute.placed import Placed
from placewise.execute.source import Source


class Windows:
    """Every window that has a name now, by the memory that it is on.

    `s5` is slot 5 at its home, `c5_7_1` the same window on the copy of tensor 7 on device 1.
    """

    def __init__(self, placed: Placed, positions: dict[Slot, int], source_of: Callable[[int], Source]) -> None:
        self._values, self._homes = placed.values, placed.homes.tolist()
        self._positions, self._source_of = positions, source_of  # where each resident stands in its list; a device's lane
        self._names: dict[tuple[int, int], dict[str, None]] = {}  # (storage or copied tensor, device) -> windows on it
        self._found: dict[int, dict[str, dict[str, None]]] = {}  # device -> names of `find` since `open`, and where they are
        self.inner: set[str] = set()  # names that were last given between `open` and `close`

    def target(self, slot: Slot, tensor: int, device: int) -> str:
        """Returns the name that a new window is given, or "_" for one that has its name already."""
        name, names = self._name(slot, tensor, device)
        if name in names:
            return "_"
        names[name] = None
        (self.inner.add if device in self._found else self.inner.discard)(name)
        return name

    def find(self, slot: Slot, tensor: int, device: int) -> str:
        """Returns the name of a window on a device; it is made there when it is first needed."""
        name, names = self._name(slot, tensor, device)
        if name in names:
            return name
        source = self._source_of(device)
        if slot in self._values.views:
            call = self._values.views[slot]
            expression = source.call(call, lambda other: self.find(other, tensor, device), None)
            targets = [self.target(result, tensor, device) for result in call.results]
            source.assign(call, targets, expression)
        else:
            targets = [self.target(slot, tensor, device)]
            source.add(f"{name} = residents[{self._positions[slot]}]")
        if device in self._found:
            self._found[device] |= {target: names for target in targets if target != "_"}
        return name

    def pop(self, tensor: int, device: int) -> list[str]:
        """Forgets all windows on a piece of memory, and returns their names."""
        names = list(self._names.pop((tensor, device), ()))
        for name in names:
            self._found.get(device, {}).pop(name, None)
        return names

    def open(self, device: int) -> None:
        """Lets a device begin a part of its own: what it finds there is made again elsewhere."""
        self._found[device] = {}

    def close(self, device: int) -> list[str]:
        """Ends a device's part; forgets what it has found there, and returns the names."""
        found = self._found.pop(device)
        for name, names in found.items():
            del names[name]
        return list(found)

    def _name(self, slot: Slot, tensor: int, device: int) -> tuple[str, dict[str, None]]:
        """Returns the name of a window on a tensor, and all names on that memory."""
        if self._homes[tensor] == device:
            return f"s{slot:d}", self._names.setdefault((self._values.storages[slot], device), {})
        return f"c{slot:d}_{tensor}_{device}", self._names.setdefault((tensor, device), {})
