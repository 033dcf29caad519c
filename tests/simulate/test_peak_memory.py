"""What is in memory at every launch."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Step, random_order, random_placements, steps

from placewise.simulate.peak_memory import allocated_at, allocations_of, bytes_before_step, peak_positions
from placewise.simulate.simulator import Simulator


@given(steps(), st.booleans())
@settings(max_examples=60)
def test_what_is_live_adds_up_at_every_launch(drawn: tuple[Step, np.random.Generator], is_ordered: bool) -> None:
    """The simulator adds and takes away; here the pieces that are there are added up."""
    step, rng = drawn
    problem = step.problem
    placement = random_placements(problem, rng, 1)[0]
    schedule = Simulator(problem, "program", 1).schedule(placement, random_order(problem, rng) if is_ordered else None)
    allocations, sizes = allocations_of(schedule), problem.graph.tensors.nbytes
    for position, n in enumerate(schedule.order.tolist()):
        device = int(schedule.devices[n])
        used = sizes[allocations.tensors[allocated_at(allocations, device, position)]].sum()
        assert used == schedule.memory[position, device]
    for device, position in enumerate(peak_positions(schedule).tolist()):
        used = sizes[allocations.tensors[allocated_at(allocations, device, position)]].sum()
        assert used == schedule.peak_bytes[device]
        if position < 0:
            assert used == bytes_before_step(schedule, allocations)[device]
