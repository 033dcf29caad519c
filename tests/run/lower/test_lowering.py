"""Instructions: exactly the simulator's copies and memory, as text and back, and a checker that finds planted faults."""

from dataclasses import replace

import numpy as np
import pytest
from builders import graph_of, op, tensor, tiny_cluster, tiny_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Step, random_order, random_placements, steps

from placewise.core.cluster import Cluster
from placewise.core.errors import PlanError
from placewise.core.problem import Problem
from placewise.models import load_graph
from placewise.run.lower.check_instructions import check_instructions
from placewise.run.lower.instructions import CopyTensor, FreeTensor, Instructions, RunOp
from placewise.run.lower.lowering import lower, tensor_devices
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator

Drawn = tuple[Step, np.random.Generator]

TINY = """placewise-instructions 1
devices "gpu:0" "gpu:1"
run 0 "gpu:0"
copy 2 "gpu:0" "gpu:1"
run 1 "gpu:1"
copy 3 "gpu:1" "gpu:0"
run 2 "gpu:0"
free 2 "gpu:0"
free 3 "gpu:0"
copy 4 "gpu:0" "gpu:1"
run 3 "gpu:1"
free 4 "gpu:0"
free 4 "gpu:1"
"""


def lowered(drawn: Drawn) -> tuple[Problem, Schedule, Instructions]:
    step, rng = drawn
    placement, order = random_placements(step.problem, rng, 1)[0], random_order(step.problem, rng)
    return step.problem, Simulator(step.problem).schedule(placement, order), lower(step.problem, placement, order)


def test_the_tiny_step_by_hand() -> None:
    """relu and mm.backward on gpu:0, mm and the update on gpu:1: h goes over once, y comes back, then the gradient.

    h (2) is read by mm on gpu:1, where its copy is freed at once, and by mm.backward on gpu:0. y (3) is an output: it stays.
    """
    problem = Problem.of(tiny_graph(), tiny_cluster())
    instructions = lower(problem, np.array([0, 1, 0]))
    copy_freed = TINY.replace('run 1 "gpu:1"\n', 'run 1 "gpu:1"\nfree 2 "gpu:1"\n')
    assert str(instructions) == copy_freed


@given(steps(max_ops=25))
@settings(max_examples=300)
def test_copies_and_memory_are_the_simulators(drawn: Drawn) -> None:
    problem, schedule, instructions = lowered(drawn)
    usage = check_instructions(problem.graph, tensor_devices(problem, schedule.placement), instructions)
    assert np.array_equal(usage, schedule.memory)
    t = schedule.timeline
    copies = [step for step in instructions.sequence if isinstance(step, CopyTensor)]
    columns = (schedule.copy_tensors.tolist(), t.copy_source.tolist(), t.copy_target.tolist())
    assert copies == [CopyTensor(*row) for row in zip(*columns, strict=True)]
    assert [step.op for step in instructions.sequence if isinstance(step, RunOp)] == schedule.order.tolist()


@pytest.mark.parametrize("order", ["program", "priority"])
def test_a_captured_step(order: str) -> None:
    """A step of the zoo with micro-batches, on four GPUs: the text of its instructions passes the checker too."""
    graph = load_graph("nmt:layers=2,hidden=8,length=4,batch=4,vocab=11,micro_batches=2")
    problem = Problem.of(graph, Cluster.load("4xK80"))
    placement = random_placements(problem, np.random.default_rng(0), 1)[0]
    schedule = Simulator(problem, order).schedule(placement)
    instructions = Instructions.parse(str(lower(problem, placement, schedule.order)))
    usage = check_instructions(graph, tensor_devices(problem, placement), instructions)
    assert np.array_equal(usage, schedule.memory)
    assert sum(isinstance(step, CopyTensor) for step in instructions.sequence) == len(schedule.copy_tensors) > 100


@given(steps(max_ops=25))
def test_each_copy_stands_before_its_first_reader(drawn: Drawn) -> None:
    _, schedule, instructions = lowered(drawn)
    readers = iter(schedule.timeline.copy_reader.tolist())
    for number, step in enumerate(instructions.sequence):
        if isinstance(step, CopyTensor):
            following = next(s for s in instructions.sequence[number:] if isinstance(s, RunOp))
            assert following.op == next(readers)
            assert following.device == step.target


@given(steps(max_ops=25), st.lists(st.text(min_size=1), min_size=4, max_size=4, unique=True))
def test_text_parses_back(drawn: Drawn, names: list[str]) -> None:
    _, _, instructions = lowered(drawn)
    instructions = replace(instructions, device_names=tuple(names[: len(instructions.device_names)]))
    assert Instructions.parse(str(instructions)) == instructions


@given(steps(max_ops=25, min_ops=2), st.data())
@settings(max_examples=200)
def test_planted_faults_are_found(drawn: Drawn, data: st.DataObject) -> None:
    """An instruction that is missing, or there twice, or on another device, breaks a rule."""
    problem, schedule, instructions = lowered(drawn)
    homes = tensor_devices(problem, schedule.placement)
    number = data.draw(st.integers(0, len(instructions.sequence) - 1))
    step, before, behind = instructions.sequence[number], instructions.sequence[:number], instructions.sequence[number + 1 :]
    faults = {"left out": (*before, *behind), "twice": (*before, step, step, *behind)}
    if isinstance(step, FreeTensor) and problem.num_devices > 1:
        faults["elsewhere"] = (*before, replace(step, device=(step.device + 1) % problem.num_devices), *behind)
    for faulty in faults.values():
        with pytest.raises(PlanError):
            check_instructions(problem.graph, homes, replace(instructions, sequence=faulty))


@given(steps(max_ops=25, min_ops=2))
def test_a_free_that_is_too_early_is_found_by_the_op_that_needs_it(drawn: Drawn) -> None:
    problem, schedule, instructions = lowered(drawn)
    homes = tensor_devices(problem, schedule.placement)
    for number, step in enumerate(instructions.sequence):
        last = instructions.sequence[number - 1]
        if isinstance(step, FreeTensor) and isinstance(last, RunOp) and step.tensor in problem.graph.ops.reads[last.op]:
            early = list(instructions.sequence)
            early[number - 1], early[number] = step, last
            if step.device == last.device:
                with pytest.raises(PlanError, match="is not on the device"):
                    check_instructions(problem.graph, homes, replace(instructions, sequence=tuple(early)))


def test_memory_that_was_freed_is_not_written() -> None:
    """The second op writes over the first one's result without reading it, after that was freed."""
    graph = graph_of([tensor("a"), tensor("a'", alias_of=0)], [op("make", writes=[0]), op("zero", writes=[1])])
    sequence = (RunOp(0, 0), FreeTensor(0, 0), RunOp(1, 0))
    with pytest.raises(PlanError, match="it writes the memory of tensor 0, which was freed"):
        check_instructions(graph, np.zeros(2, np.int64), Instructions(("gpu:0",), sequence))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "line 1: must be 'placewise-instructions 1'"),
        ("placewise-instructions 1\nrun 0", "line 2: must be 'devices'"),
        ('placewise-instructions 1\ndevices "a" "a"', "line 2: .* each once"),
        (TINY + 'walk 0 "gpu:0"', "line 14: must be 'run OP DEVICE'"),
        (TINY + 'run "gpu:0" 0', "line 14: must be 'run OP DEVICE'"),
        (TINY + 'run 0 "gpu:0" "gpu:1"', "line 14: must be 'run OP DEVICE'"),
        (TINY + "run 0 gpu:0", "line 14: must be 'run OP DEVICE'"),
        (TINY + 'free 0 "gpu:9"', "line 14: there is no device 'gpu:9'; the devices are gpu:0, gpu:1"),
    ],
)
def test_a_text_that_breaks_a_rule_is_refused(text: str, rule: str) -> None:
    with pytest.raises(PlanError, match=rule):
        Instructions.parse(text)
