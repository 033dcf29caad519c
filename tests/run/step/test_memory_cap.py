"""A GPT that does not fit on any device alone trains with the plan that auto finds, within every device's memory."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from compiled_steps import cpu_cluster

from placewise.core.errors import NothingFits
from placewise.core.problem import Problem
from placewise.measure.random_batch import load_with_weights, random_batch
from placewise.measure.steps import measure_steps
from placewise.run.devices import real_devices
from placewise.run.step.compiling import compile_placement
from placewise.search.planner import place
from placewise.simulate.simulator import Simulator

MODEL = "gpt:layers=4,hidden=64,heads=2,length=32,batch=4,vocab=300,dropout=0,micro_batches=2"


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("shares", [(0.45, 0.45, 0.45), (1 / 3, 0.8)])
def test_a_gpt_trains_on_devices_without_the_memory_that_it_needs(shares: tuple[float, ...]) -> None:
    """`shares` are of the memory that it needs on one device."""
    torch.manual_seed(0)
    step = load_with_weights(MODEL)
    roomy = cpu_cluster(len(shares))
    alone = Problem.of(step.graph, roomy)
    needed = Simulator(alone, "program").simulate(np.zeros((1, alone.num_groups), np.int64)).peak_bytes[0, 0]
    caps = [int(share * needed) for share in shares]
    devices = zip(roomy.devices, caps, strict=True)
    capped = replace(roomy, devices=tuple(replace(device, memory_bytes=cap) for device, cap in devices))

    for device in capped.devices:
        with pytest.raises(NothingFits):
            place(step, replace(capped, devices=(device,), links=()), strategy="gpu-only")
    plan = place(step, capped, evaluations=20)
    problem = Problem.of(step.graph, capped)
    placement, order = plan.resolve(problem)
    predicted = Simulator(problem).schedule(placement, order)
    train_step = compile_placement(problem, placement, order, step, real_devices(capped))
    batch = random_batch(step)
    losses = [float(train_step(batch)) for _ in range(5)]
    measured = measure_steps(train_step, predicted, batch, 1)
    train_step.close()
    assert losses[-1] < losses[0]
    assert (measured.schedule.peak_bytes <= caps).all()
    assert (measured.schedule.peak_bytes / caps).max() > 0.5  # it needs much of the memory
