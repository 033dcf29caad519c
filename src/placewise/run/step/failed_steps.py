"""What a failed step leaves behind: counters go back with the parameters that stayed, and the error says what changed."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from placewise.graph_capture.call_slots import written_slots
from placewise.graph_capture.program import Resident
from placewise.graph_capture.resolved_program import ResolvedProgram

MOST_NAMES = 12  # that the error lists, of each kind

_versions = attrgetter("_version")


class Before(NamedTuple):
    """The state of a step's residents before it starts."""

    counters: list[torch.Tensor]  # the values of each group of counters; none before the host's arithmetic
    versions: list[int]  # of what the step writes; PyTorch counts the writes into each tensor


class FailedSteps:
    """Puts a step's counters back when it fails, and adds to the error what else it has changed by then.

    The host advances the optimizer's counters before the first launch. Those of a parameter that was not updated go back,
    so a step that fails before its update can be repeated.
    """

    def __init__(self, resolved: ResolvedProgram) -> None:
        counted = {slot for call in resolved.host_calls for slot in written_slots(call)}
        groups: dict[Any, list[tuple[int, Resident]]] = {}
        self._written: list[tuple[int, Resident]] = []  # positions in the list of residents
        for position, resident in enumerate(resolved.program.residents):
            if resident.tensor < 0 and resident.like is not None and resident.slot in counted:
                groups.setdefault((resident.like.dtype, resident.like.shape), []).append((position, resident))
            is_kept = resident.kind in ("parameter", "buffer", "state")
            if is_kept and resolved.storages[resident.slot] in resolved.written_storages:
                self._written.append((position, resident))
        self._counters = list(groups.values())
        # Numbers of Python are counted for all that was updated, see `Residents.keep`.
        self._numbers = [resident for resident, _ in resolved.program.updates if resident.kind != "hyper-parameter"]

    def look(self, residents: Sequence[Any]) -> Before:
        """Returns what `recover` needs, but for the counters; called before the first launch."""
        return Before([], self._look_at_versions(residents))

    def look_at_counters(self, residents: Sequence[Any], before: Before) -> None:
        """Adds the counters; called before the host's arithmetic."""
        before.counters.extend(torch.stack([residents[place] for place, _ in group]) for group in self._counters)

    def recover(
        self, residents: Sequence[Any], before: Before, failure: BaseException, is_replayed: bool = False
    ) -> list[str]:
        """Puts back the counters of the parameters that were not updated; returns those that were.

        The writes of a replayed recording are not counted, so all may have been.
        """
        now = self._look_at_versions(residents)
        pairs = zip(self._written, before.versions, now, strict=True)
        changed = [resident for (_, resident), old, new in pairs if old != new or is_replayed]
        updated = list(dict.fromkeys(resident.name for resident in changed if resident.kind != "buffer"))
        self.set_back(residents, before, updated)
        counted = [resident for group in self._counters for _, resident in group] + self._numbers
        changed += [resident for resident in counted if resident.name in updated]
        if changed:
            has = "may have" if is_replayed else "had"
            failure.add_note(f"Before it failed, the step {has} changed {_describe(changed)}: go back to a checkpoint.")
        return updated

    def set_back(self, residents: Sequence[Any], before: Before, updated: Sequence[str] = ()) -> None:
        """Sets the counters back, but those of parameters that were updated."""
        for group, values in zip(self._counters, before.counters, strict=False):
            for (position, resident), value in zip(group, values, strict=True):
                if resident.name not in updated:
                    residents[position].copy_(value)

    def _look_at_versions(self, residents: Sequence[Any]) -> list[int]:
        return list(map(_versions, [residents[position] for position, _ in self._written]))


def _describe(changed: Iterable[Resident]) -> str:
    """Returns '2 parameters (0.weight, 0.bias) and 1 buffer (1.running_mean)'."""
    names: dict[str, list[str]] = {"parameter": [], "buffer": [], "state": []}
    for resident in changed:
        names[resident.kind].append(f"{resident.key} of {resident.name}" if resident.kind == "state" else resident.name)
    parts = []
    for word, found in zip(("parameter", "buffer", "value"), names.values(), strict=True):
        if found:
            listed = ", ".join(found[:MOST_NAMES]) + (f", {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else "")
            state = " of optimizer state" if word == "value" else ""
            parts.append(f"{len(found)} {word}{'' if len(found) == 1 else 's'}{state} ({listed})")
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
