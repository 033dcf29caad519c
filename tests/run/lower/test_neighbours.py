"""Updates in rows: what one call launches, in an order that raises no peak and has the same bits."""

import dis
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from compiled_steps import capture_with_mse, compiled, cpu_cluster, one_thread_each
from eager_steps import OPTIMIZERS
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import random_order, random_placements
from torch import nn

from placewise.core.problem import Problem
from placewise.graph_capture.capture import CapturedStep
from placewise.graph_capture.resolved_program import ResolvedProgram
from placewise.run.lower import neighbours
from placewise.run.lower.check_instructions import check_instructions
from placewise.run.lower.instructions import FreeTensor, RunOp
from placewise.run.lower.lowering import lower, tensor_devices
from placewise.run.lower.neighbours import FOREACH, find_rows, likeness, lower_side_by_side
from placewise.run.lower.placed_step import PlacedStep


def captured(optimizer: str = "adamw", layers: int = 3, width: int = 4, rows: int = 600, **how: Any) -> CapturedStep:
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    batch = (torch.randn(rows, width), torch.randn(rows, width))
    return capture_with_mse(model, OPTIMIZERS[optimizer](model.parameters()), batch, **how)


def placed(step: CapturedStep, seed: int, devices: int, *, has_thread: bool = True, shuffled: bool = True) -> PlacedStep:
    cluster, rng = cpu_cluster(devices), np.random.default_rng(seed)
    problem = Problem.of(step.graph, cluster)
    placement = random_placements(problem, rng, 1)[0]
    order = random_order(problem, rng) if shuffled else None
    resolved = ResolvedProgram.of(step)
    found = lower_side_by_side(problem, placement, order, resolved, [has_thread] * devices)
    homes = tensor_devices(problem, placement)
    plain = lower(problem, placement, order)
    usage, before = (check_instructions(step.graph, homes, given) for given in (found, plain))
    assert (usage.max(0) <= before.max(0)).all()
    assert sorted(map(str, found.sequence)) == sorted(map(str, plain.sequence))
    return PlacedStep(resolved, found, homes, one_thread_each(cluster))


def rows_of(step: PlacedStep) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(find_rows(step, lambda number, op: None).values()))


@pytest.mark.parametrize("seed", [1, 5, 7, 9])
def test_rows_that_would_raise_a_peak_are_not_made(seed: int) -> None:
    """Few rows of the batch, so that the update has the peak; in these orders rows would hold more at once."""
    placed(captured(layers=4, width=30, rows=6), seed, 1)  # asserts that no peak is higher


def test_nothing_is_freed_inside_a_row_that_makes_memory() -> None:
    """One call makes all of it at once, so what is freed between two updates in this order would still be there."""
    step = placed(captured(), 0, 2)
    storages, sequence = step.resolved.graph.storage.tolist(), step.instructions.sequence
    writes, rows = step.resolved.graph.ops.writes.lists(), rows_of(step)
    assert rows
    for row in rows:
        first = sequence[row[0]]
        assert isinstance(first, RunOp)
        makes = any(storages[t] == t for t in writes[first.op])
        inside = sequence[row[0] : row[-1]]
        assert not (makes and any(isinstance(s, FreeTensor) and s.device == first.device for s in inside))


def test_adam_of_all_parameters_is_one_row_for_each_of_its_ops() -> None:
    """Three layers have 6 parameters: 8 ops each become 8 rows of 6, whose ops are of one kind and neighbours."""
    step = placed(captured(), 0, 1, shuffled=False)
    rows, kinds = rows_of(step), step.resolved.graph.ops.kinds
    assert [len(row) for row in rows] == [6] * 8
    sequence = step.instructions.sequence
    found = [[kinds[s.op] for n in row if isinstance(s := sequence[n], RunOp)] for row in rows]
    assert [len(set(names)) for names in found] == [1] * 8
    assert [names[0] for names in found] == [
        "aten.mul_", "aten.lerp_", "aten.mul_", "aten.addcmul_", "aten.sqrt", "aten.div", "aten.add_", "aten.addcdiv_"
    ]  # fmt: skip


def test_fused_updates_are_one_row() -> None:
    step = placed(captured("adamw-fused"), 0, 1, shuffled=False)
    assert [len(row) for row in rows_of(step)] == [6]


def test_an_update_that_another_queue_waits_for_ends_its_row() -> None:
    """Six updates, and a queue that waits for the second: it must not have to wait for the other four."""
    step = placed(captured("adamw-fused"), 0, 1, shuffled=False)
    ((_, second, *_),) = rows_of(step)
    waits = replace(step.waits, awaited=frozenset({second}))
    awaited = cast(PlacedStep, SimpleNamespace(resolved=step.resolved, instructions=step.instructions, waits=waits))
    assert [len(row) for row in rows_of(awaited)] == [2, 4]


def test_a_row_has_only_as_many_temporary_results_as_fit_below_the_peak() -> None:
    """Six weights of 4 KiB and biases of 128 bytes; all else is small, so the peak is in the first weight's update.

    There Adam has two temporary results of 4 KiB, and the gradient is freed: 4 KiB more than before the update. So two
    weights are never in one row, and all biases are. With 600 rows of activations the peak is elsewhere: all 6 are.
    """
    for rows, expected in ((1, 0), (600, 6)):
        step = placed(captured(layers=6, width=32, rows=rows), 0, 1, has_thread=False, shuffled=False)
        sequence, graph = step.instructions.sequence, step.resolved.graph
        counts = []
        for row in rows_of(step):
            ops = [s.op for n in row if isinstance(s := sequence[n], RunOp)]
            sizes = [graph.tensors.nbytes[graph.ops.writes[op][0]] for op in ops]
            counts.append((sizes.count(4096), sizes.count(128)))
        assert max(weights for weights, _ in counts) == expected
        assert max(biases for _, biases in counts) == 6


def test_on_a_thread_a_row_is_no_larger_than_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of 64 bytes has 5 tensors, two temporary ones with it: 6 parameters fit into 4 KiB, not into 0."""
    monkeypatch.setattr(neighbours, "CACHED_BYTES", 0)
    assert rows_of(placed(captured(), 0, 1, shuffled=False)) == []


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 99), st.integers(1, 3), st.sampled_from(["adamw", "momentum", "adagrad", "adam-fused", "rmsprop"]))
def test_any_placement_and_order_keeps_its_copies_and_its_peaks(seed: int, devices: int, optimizer: str) -> None:
    """The checker follows the arranged instructions, and nothing is launched twice, left out or copied more often."""
    for clip in (None, 1.0):
        step = placed(captured(optimizer, layers=2, clip_grad_norm=clip), seed, devices, has_thread=bool(seed % 2))
        reads, after = step.resolved.graph.ops.reads.lists(), step.resolved.graph.ops.after.lists()
        makers = step.resolved.graph.producer.tolist()
        sequence = step.instructions.sequence
        for row in rows_of(step):
            ops = [s.op for n in row if isinstance(s := sequence[n], RunOp)]
            assert not {makers[tensor] for op in ops for tensor in reads[op]} & set(ops)
            assert not {earlier for op in ops for earlier in after[op]} & set(ops)
            assert len({likeness(step.resolved, op) for op in ops}) == 1


def test_lanes_launch_a_row_by_one_call() -> None:
    """SGD's one op for each of 6 parameters becomes one call; with two learning rates, one for each group."""
    for rates in ((0.1,), (0.1, 0.2)):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        parameters = list(model.parameters())
        groups = [{"params": parameters[i :: len(rates)], "lr": rate} for i, rate in enumerate(rates)]
        batch = (torch.randn(6, 4), torch.randn(6, 4))
        train_step = compiled(capture_with_mse(model, torch.optim.SGD(groups), batch), devices=1)
        (lane,) = train_step._lanes.functions.values()
        kept = {name: str(value) for name, value in lane.__globals__.items() if name.endswith("_kept")}
        calls = [kept.get(f"{instruction.argval}_kept") for instruction in dis.get_instructions(lane)]
        train_step(batch)
        train_step.close()
        assert calls.count("aten._foreach_add_.List") == len(rates)
        assert calls.count("aten.add_.Tensor") == 0


NUMBERS = {"add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "lerp", "lerp_"}


@pytest.mark.parametrize("name", FOREACH)
def test_a_call_of_lists_has_the_bits_of_single_calls(name: str) -> None:
    """Of tensors, of tensors with one number for all, and with a number for each."""
    aten, count = torch.ops.aten, FOREACH[name]
    packet, lists = getattr(aten, name), getattr(aten, f"_foreach_{name}")
    generator = torch.Generator().manual_seed(0)
    tensors = [[torch.rand(5, 3, generator=generator) + 0.5 for _ in range(count)] for _ in range(4)]

    def copies() -> list[list[torch.Tensor]]:
        return [[tensor.clone() for tensor in row] for row in tensors]

    def same(single: Any, together: Any) -> None:
        rows, others = copies(), copies()
        made = [single(*row, i) for i, row in enumerate(rows)]
        found = together(*map(list, zip(*others, strict=True)))
        results = [row[0] for row in others] if name.endswith("_") else found
        assert all(map(torch.equal, made, results))

    if name not in ("lerp", "lerp_"):
        same(lambda *args: packet(*args[:-1]), lambda *args: lists(*args))
    if name in NUMBERS:
        keep = 2 if "lerp" in name else 1
        same(lambda *args: packet(*args[:keep], 0.3), lambda *args: lists.Scalar(*args[:keep], 0.3))
        same(
            lambda *args: packet(*args[:keep], 0.3 + args[-1]),
            lambda *args: lists.ScalarList(*args[:keep], [0.3, 1.3, 2.3, 3.3]),
        )
