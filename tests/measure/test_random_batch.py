"""Random batches that a model can read."""

import pytest

from placewise.core.errors import ModelError
from placewise.measure.random_batch import load_with_weights, random_batch


def test_tokens_of_a_random_batch_are_within_the_vocabulary() -> None:
    step = load_with_weights("nmt:layers=1,hidden=8,length=6,batch=64,vocab=7")
    (source, target), labels = random_batch(step)
    for tokens in (source, target, labels):
        assert sorted(set(tokens.flatten().tolist())) == list(range(7))


@pytest.mark.parametrize("fused", ["", "fused:"])
def test_weights_that_the_machine_can_not_hold_are_refused(fused: str) -> None:
    """A run file may name any model of the zoo: an LSTM of a million units has 8 * 10**12 weights."""
    model = f"{fused}rnnlm:layers=1,hidden=1000000,steps=2,batch=2,vocab=1000000"
    with pytest.raises(ModelError, match=r"its weights and batch take 36.4 TiB, this machine has"):
        load_with_weights(model)
