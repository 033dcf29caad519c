"""Deals the calls of modules out to the GPUs: coarse placements for steps that call a module many times.

An unrolled recurrent network calls its modules at every time step, and so does a step of micro-batches. Where the calls of
a module do not wait for each other, they can go round the GPUs as cards are dealt: its weight is copied to each of them
once. Groups do not move there one by one, because the first one pays for that copy. Here a module's phase is one decision:
all calls on one device, or dealt out. What only one parameter's update needs, its gradients and their sums, is a decision
of its own, so that it can stay with the weight: each term of these sums is as large as the weight.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints
from placewise.core.graph import PHASES, TENSOR_KINDS, Graph
from placewise.core.grouping import module_path
from placewise.core.problem import Problem
from placewise.simulate.justified import Justifier
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.candidates import Candidate
from placewise.strategies.blocks import Blocks
from placewise.strategies.single_device import accelerators

FORWARD, BACKWARD, UPDATE = (PHASES.index(phase) for phase in ("forward", "backward", "update"))

FEW = 0.1  # share of a block's groups that may be of names with fewer occurrences than it has calls

NOTHING, SEVERAL = -1, -2  # in place of the parameter that an op is needed for

NUMBER = re.compile(r"_\d+$")  # of an op among those of the same name

ONE, BOTH = 0.5, 0.7  # moves are drawn below these numbers: one block; all blocks of a module; else two blocks swap
DEALT = 0.15  # share of targets that deal a block out, if its calls can be


@dataclass(frozen=True, eq=False)
class Deal:
    """The decisions for a problem. A choice is a device for each block, or the number of devices: its calls are dealt."""

    problem: Problem
    blocks: Blocks
    calls: Ints  # [groups], the number of the call of its block that each group belongs to
    modules: Ints  # [blocks], the number of the module that each belongs to
    can_deal: Bools  # [blocks]

    @classmethod
    def of(cls, problem: Problem) -> "Deal":
        """Returns the decisions for a problem: a block is a module's phase, or what makes its gradients."""
        first = np.full(problem.num_groups, -1, np.int64)  # [groups], the first op of each
        first[problem.op_groups[::-1]] = np.arange(problem.num_ops)[::-1]
        makes_gradients = gradient_work(problem.graph)
        labels: dict[object, int] = {}
        modules: dict[object, int] = {}
        of_group, module_of = np.zeros((2, problem.num_groups), np.int64)
        for group, op in enumerate(first.tolist()):
            module: object = group if op < 0 else module_path(problem.graph, op)
            kind = None if op < 0 else (int(problem.graph.ops.phases[op]), bool(makes_gradients[op]))
            of_group[group] = labels.setdefault((module, kind, int(problem.device_sets[group])), len(labels))
            module_of[group] = modules.setdefault(module, len(modules))
        allowed = np.zeros((len(labels), problem.num_devices), np.bool_)
        allowed[of_group] = problem.allowed
        blocks = Blocks(of_group, allowed, Blocks.of(problem, "module").group_seconds)
        modules_of_blocks = np.zeros(len(labels), np.int64)
        modules_of_blocks[of_group] = module_of
        calls, num_calls = _calls(problem, of_group, first)
        gpus = accelerators(problem)
        can_deal = (num_calls >= len(gpus)) & allowed[:, gpus].all(axis=1)
        if len(gpus) == 1 or most_calls(problem.graph) < len(gpus):
            can_deal[:] = False
        return cls(problem, blocks, calls, modules_of_blocks, can_deal)

    @property
    def dealt(self) -> int:
        """What stands for a block that is dealt out."""
        return self.problem.num_devices

    @cached_property
    def gpus(self) -> Ints:
        """The devices that calls are dealt to."""
        return accelerators(self.problem)

    def expand(self, choice: Ints) -> Ints:
        """Returns the placement [groups] of a choice [blocks]."""
        place = choice[self.blocks.of_group]
        placement: Ints = np.where(place == self.dealt, self.gpus[self.calls % len(self.gpus)], place)
        return placement

    def change(self, choice: Ints, weights: Floats, rng: np.random.Generator) -> Ints:
        """Returns a choice after a random move; `weights` [blocks] adds up how often each block is drawn."""
        changed = choice.copy()
        lot = rng.random()
        block = int(np.searchsorted(weights, rng.random() * weights[-1], side="right"))
        devices = np.flatnonzero(self.blocks.allowed[block])
        deals = rng.random() < DEALT and self.can_deal[block]
        target = self.dealt if deals else int(devices[rng.integers(len(devices))])
        if lot < ONE:
            changed[block] = target
        elif lot < BOTH:
            changed[self.modules == self.modules[block]] = target
        else:
            other = int(rng.integers(len(choice)))
            changed[[block, other]] = changed[[other, block]]
        is_allowed = self.blocks.allowed[np.arange(len(changed)), np.minimum(changed, self.dealt - 1)]
        return np.where(np.where(changed == self.dealt, self.can_deal, is_allowed), changed, choice)


def gradient_work(graph: Graph) -> Bools:
    """Returns whether an op of the backward pass is needed for the update of one parameter at most: [ops]."""
    ops, tensors = graph.ops, graph.tensors
    homes = tensors.home[(tensors.kinds == TENSOR_KINDS.index("parameter")) & (tensors.home >= 0)]
    has_parameter = np.isin(ops.groups, homes)
    needed_by = np.where((ops.phases == UPDATE) & has_parameter, ops.groups, NOTHING).tolist()  # [ops], a parameter's group
    is_update = (ops.phases == UPDATE).tolist()
    writers, readers, _ = graph.edges
    latest_first = np.argsort(-writers, kind="stable")  # so that an op is seen after all its readers
    for op, reader in zip(writers[latest_first].tolist(), readers[latest_first].tolist(), strict=True):
        if not is_update[op] and needed_by[reader] not in (NOTHING, needed_by[op]):
            needed_by[op] = needed_by[reader] if needed_by[op] == NOTHING else SEVERAL
    found: Bools = (ops.phases == BACKWARD) & (np.array(needed_by, np.int64) != SEVERAL)
    return found


def most_calls(graph: Graph) -> int:
    """Returns how many forward ops of one module read one parameter, at most: how often a module is called."""
    readers, read = graph.ops.reads.rows, graph.storage[graph.ops.reads.values]
    is_call = (graph.ops.phases[readers] == FORWARD) & (graph.tensors.kinds[read] == TENSOR_KINDS.index("parameter"))
    readers, read = readers[is_call], read[is_call]
    calls = Counter((module_path(graph, op), tensor) for op, tensor in zip(readers.tolist(), read.tolist(), strict=True))
    return max(calls.values(), default=0)


def _calls(problem: Problem, of_group: Ints, first: Ints) -> tuple[Ints, Ints]:
    """Returns the call of its block that each group belongs to [groups], and how many calls each block has [blocks].

    A block has as many calls as there are micro-batches, or ops of one name in it: the number that divides how many there
    are of most of the others. The backward pass begins with the last call.
    """
    ops = problem.graph.ops
    num_blocks = int(of_group.max(initial=-1)) + 1
    alike: dict[tuple[int, str], list[int]] = defaultdict(list)  # the groups of a block whose first ops have one name
    by_op = np.argsort(first, kind="stable")
    for group in by_op[first[by_op] >= 0].tolist():
        alike[int(of_group[group]), NUMBER.sub("", ops.names[first[group]])].append(group)
    counts: dict[int, list[int]] = defaultdict(list)
    for (block, _), groups in alike.items():
        counts[block] += [len(groups)] * len(groups)
    num_calls = np.ones(num_blocks, np.int64)
    for block, found in counts.items():
        least = sorted(found)[int(FEW * len(found))]
        fitting = {count: sum(other % count == 0 for other in found) for count in sorted(set(found)) if count >= least}
        num_calls[block] = max(fitting, key=lambda count: (fitting[count], count))
    calls = np.zeros(problem.num_groups, np.int64)
    for (block, _), groups in alike.items():
        number = np.arange(len(groups)) * num_calls[block] // len(groups)
        is_backward = ops.phases[first[groups[0]]] == BACKWARD
        calls[groups] = num_calls[block] - 1 - number if is_backward else number
    has_batch = first >= 0
    has_batch[has_batch] = ops.micro_batches[first[has_batch]] >= 0
    calls[has_batch] = ops.micro_batches[first[has_batch]]
    num_batches = np.zeros(num_blocks, np.int64)
    pairs = np.unique(np.stack([of_group[has_batch], calls[has_batch]]), axis=1)
    np.add.at(num_batches, pairs[0], 1)
    return calls, np.where(num_batches > 0, num_batches, num_calls)


def anneal(
    model: Simulator, deal: Deal, start: Candidate, trials: int, batch: int, heat: tuple[float, float], seed: int
) -> Iterator[Candidate]:
    """Yields the best placement so far after each batch of trials, from a start; each is judged in its justified order.

    `heat` are the first and the last temperature, relative to the step time.
    """
    rng, justifier = np.random.default_rng(seed), Justifier(model)
    weights = np.cumsum(np.sqrt(np.bincount(deal.blocks.of_group, weights=deal.blocks.group_seconds)))
    choice = deal.blocks.contract(start.placement)
    (hot, cold), best, least, current = heat, start, start.cost, np.inf
    for trial in range(trials):
        changed = deal.change(choice, weights, rng) if trial else choice
        if trial == 0 or (changed != choice).any():
            placement = deal.expand(changed)
            seconds, overflow = justifier.judge(placement)
            cost = seconds if not overflow else model.failing_seconds * (1 + overflow)
            temperature = least * hot * (cold / hot) ** (trial / trials)
            if trial == 0 or cost <= current - temperature * np.log(1 - rng.random()):
                choice, current = changed, cost
            if cost < least:
                best, least = Candidate.of(model, placement, justifier.order.copy()), cost
        if trial % batch == batch - 1 or trial == trials - 1:
            yield best
