"""What waits for what: every dependency is kept, and no queue waits for what it already knows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Step, gpus, random_order, random_placements, steps, takes

from placewise.run.lower.instructions import CopyTensor, Instructions, RunOp
from placewise.run.lower.lowering import lower
from placewise.run.lower.waits import Waits, plan_waits


def dependencies(step: Step, instructions: Instructions) -> list[tuple[int, int]]:
    """Returns every pair of instructions of which the first must have ended before the second starts."""
    graph = step.problem.graph
    ran = {s.op: i for i, s in enumerate(instructions.sequence) if isinstance(s, RunOp)}
    copied = {(s.tensor, s.target): i for i, s in enumerate(instructions.sequence) if isinstance(s, CopyTensor)}
    pairs = []
    for i, s in enumerate(instructions.sequence):
        if isinstance(s, RunOp):
            pairs += [(ran[op], i) for op in graph.ops.after[s.op].tolist()]
            for tensor in graph.ops.reads[s.op].tolist():
                maker = int(graph.producer[tensor])
                pairs += [(copied[tensor, s.device], i)] if (tensor, s.device) in copied else []
                pairs += [(ran[maker], i)] if maker >= 0 else []
        elif isinstance(s, CopyTensor) and graph.producer[s.tensor] >= 0:
            pairs.append((ran[int(graph.producer[s.tensor])], i))
    return pairs


def ended_before(waits: Waits, from_host: list[bool]) -> dict[int, set[int]]:
    """Returns, for each instruction, all others that have surely ended when it starts, in plain Python.

    A queue works in order. What the host has waited for itself (an op on a thread) has ended for all that it launches later.
    """
    before: dict[int, set[int]] = {}
    last: dict[tuple[int, ...], int] = {}
    host: set[int] = set()
    for number, queue in waits.queues.items():
        is_launched = any(from_host[device] for device in queue)
        known = {last[queue]} | before[last[queue]] if queue in last else set()
        for need in waits.before[number]:
            news = {need} | before[need]
            known |= news
            if is_launched and not any(from_host[device] for device in waits.queues[need]):
                host |= news
        before[number] = known | (host if is_launched else set())
        last[queue] = number
    return before


@given(steps(max_ops=25), st.lists(st.booleans(), min_size=4, max_size=4))
@settings(max_examples=300)
def test_every_dependency_is_kept_and_every_wait_is_needed(
    drawn: tuple[Step, np.random.Generator], from_host: list[bool]
) -> None:
    step, rng = drawn
    placement, order = random_placements(step.problem, rng, 1)[0], random_order(step.problem, rng)
    instructions = lower(step.problem, placement, order)
    waits = plan_waits(step.problem.graph, instructions, from_host)
    before = ended_before(waits, from_host)
    for first, second in dependencies(step, instructions):
        assert first in before[second], f"{instructions.sequence[second]} does not wait for {instructions.sequence[first]}"
    for number, needs in waits.before.items():
        for need in needs:
            others = {**waits.before, number: tuple(other for other in needs if other != need)}
            without = ended_before(Waits(waits.queues, others, waits.awaited), from_host)
            assert need not in without[number], (
                f"{instructions.sequence[number]} already knows {instructions.sequence[need]}"
            )


def test_one_wait_for_two_copies_of_one_channel() -> None:
    """Op 2 on gpu:1 reads what ops 0 and 1 made on gpu:0: it waits only for the second copy, op 3 for nothing."""
    tensors = [{"name": f"t{i}", "nbytes": 1, "kind": "activation"} for i in range(4)]
    ops = [takes(1, 0, [], [0]), takes(1, 1, [], [1]), takes(1, 2, [0, 1], [2]), takes(1, 3, [0], [3])]
    graph = {"format": "placewise-graph", "version": 1, "name": "test", "tensors": tensors, "ops": ops, "outputs": []}
    step = Step.of(graph, gpus(2))
    instructions = lower(step.problem, np.array([0, 0, 1, 1]))
    waits = plan_waits(step.problem.graph, instructions, [True, True])
    kinds = [type(s).__name__ for s in instructions.sequence[:6]]
    assert kinds == ["RunOp", "RunOp", "CopyTensor", "CopyTensor", "RunOp", "FreeTensor"]
    assert waits.before[2] == (0,)
    assert waits.before[3] == (1,)
    assert waits.before[4] == (3,)
    assert not waits.before[next(i for i, s in enumerate(instructions.sequence) if s == RunOp(3, 1))]


def test_random_ops_on_threads_draw_one_after_the_other() -> None:
    tensors = [{"name": f"t{i}", "nbytes": 1, "kind": "activation"} for i in range(2)]
    graph = {"format": "placewise-graph", "version": 1, "name": "test", "tensors": tensors, "outputs": []}
    step = Step.of({**graph, "ops": [takes(1, 0, [], [0]), takes(1, 1, [], [1])]}, gpus(2))
    instructions = lower(step.problem, np.array([0, 1]))
    second = instructions.sequence.index(RunOp(1, 1))
    assert plan_waits(step.problem.graph, instructions, [False, False], frozenset({0, 1})).before[second] == (0,)
    assert plan_waits(step.problem.graph, instructions, [True, True], frozenset({0, 1})).before[second] == ()
