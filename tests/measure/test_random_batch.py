"""Random batches that a model can read."""

from placewise.measure.random_batch import load_with_weights, random_batch


def test_tokens_of_a_random_batch_are_within_the_vocabulary() -> None:
    step = load_with_weights("nmt:layers=1,hidden=8,length=6,batch=64,vocab=7")
    (source, target), labels = random_batch(step)
    for tokens in (source, target, labels):
        assert sorted(set(tokens.flatten().tolist())) == list(range(7))
