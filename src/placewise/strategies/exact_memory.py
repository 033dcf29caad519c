"""Memory in the constraint program: at every launch, what is taken on a device fits."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from placewise.strategies.exact_logic import Literal

if TYPE_CHECKING:
    from placewise.strategies.exact_model import Program


class Copy(NamedTuple):
    """A tensor that may be copied to a device."""

    tensor: int
    target: int


def add_memory(program: "Program") -> None:
    """Adds what memory allows, unless everything at once would fit every device."""
    problem, tensors = program.problem, program.problem.graph.tensors
    if not _matters(program):
        return
    storages = _storages(program)
    alive = {(root, n): literal for root in storages for n, literal in enumerate(_alive(program, root))}
    for d, memory in enumerate(problem.cluster.memory_bytes.tolist()):
        resident = _resident(program, d)
        _fit(program, resident, memory)
        for n in program.ops:
            made = [(root, program.logic.all_of([alive[root, n], program.on[program.home[root]][d]])) for root in storages]
            copied = [(copy.tensor, _is_copy_alive(program, copy, n)) for copy in program.copies if copy.target == d]
            _fit(program, [*resident, *((int(tensors.nbytes[t]), literal) for t, literal in made + copied)], memory)


def _matters(program: "Program") -> bool:
    graph = program.problem.graph
    copied = sum(int(graph.tensors.nbytes[t]) for t in sorted({copy.tensor for copy in program.copies}))
    own = graph.storage == np.arange(len(graph.tensors))
    return bool(int(graph.tensors.nbytes[own].sum()) + copied > program.problem.cluster.memory_bytes.min())


def _fit(program: "Program", taken: list[tuple[int, Literal]], memory: int) -> None:
    """Adds that the bytes of those that are there fit."""
    fixed = sum(size * literal for size, literal in taken if isinstance(literal, int))
    program.model.add(sum(size * literal for size, literal in taken if not isinstance(literal, int)) + fixed <= memory)


def _resident(program: "Program", device: int) -> list[tuple[int, Literal]]:
    """Returns the bytes that are on a device all the time; what nobody reads and has no home is on the first."""
    graph = program.problem.graph
    rows = []
    for t in np.flatnonzero((graph.producer < 0) & (graph.tensors.alias_of < 0)).tolist():
        size, group = int(graph.tensors.nbytes[t]), program.home[t]
        rows.append((size, program.on[group][device] if group >= 0 else int(device == 0)))
    return rows


def _storages(program: "Program") -> list[int]:
    """Returns the tensors that own memory which the step takes."""
    graph = program.problem.graph
    own = (graph.producer >= 0) & (graph.storage == np.arange(len(graph.tensors))) & (graph.tensors.nbytes > 0)
    return [int(t) for t in np.flatnonzero(own)]


def _alive(program: "Program", root: int) -> list[Literal]:
    """Returns whether a storage is taken when each op is launched: made not later, and used then or later, or kept."""
    graph = program.problem.graph
    maker = int(graph.producer[root])
    kept = int((graph.storage[graph.outputs] == root).any())
    known, literals = _uses(program, root), []
    for n in program.ops:
        made = 1 if maker == n else program.before[maker, n]
        uses = [program.logic.all_of([use, 1 if k == n else program.before[n, k]]) for k, use in known]
        literals.append(program.logic.all_of([made, program.logic.any_of([kept, *uses])]))
    return literals


def _uses(program: "Program", root: int) -> list[tuple[int, Literal]]:
    """Returns the ops that use a storage, and when: a write, a read on its device, or the launch of a copy."""
    graph = program.problem.graph
    uses: list[tuple[int, Literal]] = []
    for t in np.flatnonzero(graph.storage == root).tolist():
        if graph.producer[t] >= 0:
            uses.append((int(graph.producer[t]), 1))
        copies = [copy for copy in program.copies if copy.tensor == t]
        for k in sorted(set(graph.readers[t].tolist())):
            pairs = [pair for pair in program.both_on(program.group[k], program.home[t]) if pair is not None]
            uses += [(k, program.logic.all_of(pair)) for pair in pairs]
            uses += [(k, program.first[k, copy]) for copy in copies if (k, copy) in program.first]
    return uses


def _is_copy_alive(program: "Program", copy: Copy, n: int) -> Literal:
    """Returns whether a copy is taken when an op is launched: a reader not later, and a reader then or later."""
    readers = program.copies[copy]
    here = {r: program.on[program.group[r]][copy.target] for r in readers}
    later = program.logic.any_of([program.logic.all_of([here[r], 1 if r == n else program.before[n, r]]) for r in readers])
    return program.logic.all_of([program.is_launched_by(copy, n), later])
