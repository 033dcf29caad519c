"""The pass over a graph with optional ops, against the definition."""

import numpy as np
from hypothesis import given, settings
from simulated import Step, leave_some_out, random_order, random_placements, steps

from placewise.simulate.choices import flatten_choices, new_scratch, simulate_choice


@given(steps(options=True, waits=True))
@settings(max_examples=200)
def test_it_equals_the_definition(drawn: tuple[Step, np.random.Generator]) -> None:
    step, rng = drawn
    problem = step.problem
    flat = flatten_choices(problem)
    scratch = new_scratch(flat)  # the same for all passes: each leaves it clean
    for placement in leave_some_out(problem, random_placements(problem, rng, 4), rng):
        present = problem.present(placement)
        order = present.restore_order(random_order(present.problem, rng))
        expected = step.reference(placement, order)
        usage = np.zeros((problem.num_ops, problem.num_devices), np.int64)
        seconds = simulate_choice(flat, placement, order, scratch, usage)
        assert np.isclose(seconds, expected["step_seconds"], rtol=1e-12)
        assert scratch.peak.tolist() == list(expected["peak_bytes"].values())
        for n in np.flatnonzero(placement[problem.op_groups] >= 0).tolist():
            assert np.isclose(scratch.starts[n], expected["start"][n], rtol=1e-12)
        over = np.maximum(usage - problem.cluster.memory_bytes, 0)
        there = placement[problem.op_groups[order]] >= 0
        assert scratch.area[0] == over[there].sum()
