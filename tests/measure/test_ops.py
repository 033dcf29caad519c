"""Ops that can be run alone: their signatures, and values that they accept."""

import torch
from small_steps import mlp_step, signatures_of, words_step

import placewise as pw
from placewise.measure.ops import RunnableOp, op_calls


def test_a_signature_says_function_shapes_types_and_plain_arguments() -> None:
    found = signatures_of(pw.capture(*mlp_step()))
    assert found[0] == "aten.addmm.default(float32[5], float32[4, 6], float32[6, 5] by [1, 6])"
    assert "aten.relu.default(float32[4, 5])" in found
    assert len(found) > len(set(found)), "equal ops have equal signatures"
    assert found != signatures_of(pw.capture(*mlp_step(batch=8)))


def test_the_hosts_numbers_do_not_count() -> None:
    """Adam's divisions by numbers of the host have one signature for each shape, whatever the numbers are."""
    found = [signature for signature in signatures_of(words_step()) if "addcdiv" in signature]
    assert len(found) == 3
    assert all("value=float" in signature for signature in found)


def test_values_are_ones_that_the_ops_can_take() -> None:
    """Words of an embedding of 13 are below 13, floats are probabilities, and what runs in place is restored."""
    calls = op_calls(words_step().program, len(words_step().graph.ops))
    by_name = {call.signature.partition("(")[0]: call for call in calls}
    work = RunnableOp(by_name["aten.embedding.default"], "cpu")
    weight, words = work._args[:2]
    assert 0 <= words.min() <= words.max() < 13
    assert 0 < weight.min() <= weight.max() < 1
    in_place = RunnableOp(by_name["aten.addcdiv_.default"], "cpu")
    before = in_place._args[0].clone()
    in_place.run()
    assert in_place.changes_inputs
    assert not torch.equal(in_place._args[0], before)
    in_place.restore()
    assert torch.equal(in_place._args[0], before)
