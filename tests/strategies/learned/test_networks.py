"""The sequence-to-sequence network, and what all strategies with a network share."""

import math

import numpy as np
import pytest
import torch
from builders import graph_of, op, tensor

from placewise.core.errors import StrategyError
from placewise.strategies.learned import features, training
from placewise.strategies.learned.networks import Prior, Seq2Seq


def network(seed: int, **settings: object) -> Seq2Seq:
    """Returns a small network for three devices, with outputs large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    made = training.build_network(
        lambda: Seq2Seq(4, 3, **{"units": 8, "layers": 2, **settings}),  # type: ignore[arg-type]
        generator,
    )
    with torch.no_grad():
        for parameter in made.output.parameters():
            parameter.uniform_(-2, 2, generator=generator)
    return made


@pytest.mark.parametrize(
    "settings", [{}, {"layers": 1}, {"two_ways": True}, {"two_ways": True, "ceiling": 5.0, "temperature": 10.0}]
)
@pytest.mark.parametrize("seed", range(5))
def test_drawing_step_by_step_follows_the_probabilities_of_one_pass(seed: int, settings: dict[str, object]) -> None:
    """Given what was drawn, the race of every block has the same winner by the probabilities of the whole pass."""
    made = network(seed, **settings)
    rng = torch.Generator().manual_seed(seed)
    inputs, prior = torch.randn((7, 4), generator=rng), Prior(torch.randn((7, 3), generator=rng), torch.full((7, 3), 0.02))
    waits = training.waiting_times((5, 7, 3), rng)
    with torch.no_grad():
        memory = made.read(inputs)
        placements = made.sample(memory, prior, waits)
        probabilities = prior.probabilities(made(memory, placements))  # [batch, blocks, devices]
    assert torch.equal((probabilities / waits).argmax(dim=2), placements)
    assert len(torch.unique(placements, dim=0)) > 1


def test_a_table_adds_its_row_to_the_logits_of_a_block() -> None:
    made = network(0, table_blocks=3)
    inputs, placements = torch.zeros((3, 4)), torch.zeros((1, 3), dtype=torch.int64)
    assert made.table is not None
    with torch.no_grad():
        before = made(made.read(inputs), placements)[0]
        made.table.weight[1] = torch.tensor([1.0, 2.0, 3.0])
        after = made(made.read(inputs), placements)[0]
    assert torch.allclose(after - before, torch.tensor([[0.0] * 3, [1.0, 2.0, 3.0], [0.0] * 3]), atol=1e-6)


def test_parts_of_a_network_have_rates_of_their_own() -> None:
    made = network(0, table_blocks=3)
    parts = {rate["lr"]: {id(p) for p in rate["params"]} for rate in training.rated(made, 0.1, 0.2, 0.3)}
    assert made.table is not None
    assert parts[0.3] == {id(made.table.weight)}
    assert parts[0.2] == {id(p) for p in (*made.output.parameters(), made.own_output.weight)}
    assert sum(map(len, parts.values())) == len(list(made.parameters()))
    assert [part["lr"] for part in training.rated(network(0), 0.1)] == [0.1]


def test_an_lstm_begins_by_remembering() -> None:
    """The biases of the forget gates, the second quarter, are 1 together; all others are 0."""
    made = network(0)
    biases = dict(made.named_parameters())
    for lstm in ("encoder", "decoder"):
        together = biases[f"{lstm}.bias_ih_l1"] + biases[f"{lstm}.bias_hh_l1"]
        assert together.view(4, 8).tolist() == [[0.0] * 8, [1.0] * 8, [0.0] * 8, [0.0] * 8]


def test_standardised_columns() -> None:
    """Values 1 and 3 are -1 and 1; a column of equal values is 0."""
    assert features.standardised(np.array([[1.0, 5.0], [3.0, 5.0]])).tolist() == [[-1, 0], [1, 0]]


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    """With initial probabilities 0.2, 0, 0.8 and logits of nearly 0, a fifth of the draws is device 0, none is 1."""
    generator = torch.Generator().manual_seed(0)
    made = training.build_network(lambda: Seq2Seq(4, 3, units=8, layers=1), generator)
    prior = training.prior_of(np.array([[0.2, 0.0, 0.8]]), np.array([[True, False, True]]), 0.0)
    with torch.no_grad():
        memory = made.read(torch.zeros(1, 4))
        drawn = made.sample(memory, prior, training.waiting_times((20000, 1, 3), generator))[:, 0]
        probabilities = prior.probabilities(made(memory, drawn[:1, None]))[0, 0]
    shares = torch.bincount(drawn, minlength=3) / len(drawn)
    assert shares[1] == probabilities[1] == 0
    assert float(shares[0]) == pytest.approx(0.2, abs=0.02)
    assert float(probabilities[0]) == pytest.approx(0.2, abs=0.02)


def test_exploration_is_a_number_of_decisions() -> None:
    """Half a decision of two is a quarter of each: 0.25 over the allowed devices, whatever the logits are."""
    allowed = np.array([[True, True, False], [False, True, False]])
    prior = training.prior_of(np.array([[0.5, 0.5, 0], [0, 1, 0]]), allowed, 0.5)
    certain = torch.tensor([[100.0, -100, 0], [0, 0, 0]])
    assert prior.probabilities(certain).tolist() == [[0.875, 0.125, 0], [0, 1, 0]]
    assert training.prior_of(np.ones((1, 1)), np.ones((1, 1), np.bool_), 3.0).floor.tolist() == [[1]]


def test_a_block_depends_on_those_before_it_alone() -> None:
    made = network(3)
    inputs = torch.randn((6, 4), generator=torch.Generator().manual_seed(1))
    one, other = torch.zeros((1, 6), dtype=torch.int64), torch.tensor([[0, 0, 0, 2, 1, 0]])
    with torch.no_grad():
        memory = made.read(inputs)
        a, b = made(memory, one)[0], made(memory, other)[0]
    assert torch.equal(a[:4], b[:4])
    assert not torch.allclose(a[4], b[4])


def test_logits_stay_below_the_ceiling() -> None:
    made = network(0, ceiling=5.0, temperature=0.01)
    with torch.no_grad():
        logits = made(made.read(torch.ones(3, 4)), torch.zeros((1, 3), dtype=torch.int64))
    assert float(logits.abs().max()) == pytest.approx(5, abs=0.2)
    assert float(logits.abs().max()) <= 5


def test_one_seed_builds_one_network_and_torch_s_own_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = network(0), network(0), network(1)
    assert torch.equal(torch.get_rng_state(), before)
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.dim() == 1 or not torch.equal(a, c)


def test_threads_are_given_back_even_after_an_error() -> None:
    torch.set_num_threads(threads := 3)
    seen: list[int] = []

    def work() -> None:
        with training.one_thread():
            seen.append(torch.get_num_threads())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert seen == [1]
    assert torch.get_num_threads() == threads


def test_gradients_that_are_not_finite_are_an_error_that_says_where() -> None:
    made = network(0)
    loss = made.output.weight.sum() * torch.tensor(float("nan")) + sum(p.sum() for p in made.parameters())
    with pytest.raises(StrategyError, match=r"strategy 'colocrl': .*update 17;"):
        training.gradients(torch.as_tensor(loss), made, "colocrl", 17)


def test_reinforce_s_gradient_is_that_of_the_expected_signal() -> None:
    """Two devices with logits (0, z): E[signal] = (1 - p) · 3 + p · 1 with p = sigmoid(z), so dE/dz = -2 p (1 - p).

    Over both placements weighted by their probabilities (a half each, so a plain mean), the loss's gradient is the same.
    """
    z = torch.zeros((), requires_grad=True)
    logs = torch.log_softmax(torch.stack([torch.zeros(()), z]), dim=0)
    loss = training.reinforce_loss(logs, -torch.tensor([3.0, 1.0]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert float(z.grad) == pytest.approx(-2 * 0.25)


def test_sizes_neighbours_and_kinds_of_three_blocks() -> None:
    """Blocks a = {0, 1}, b = {2}, c = {3}.

    Op 0 writes t0 (9 B) for op 1 alone and t1 (99 B) for op 2; op 1 writes t2 (999 B) for ops 2 and 3; op 2 writes t3 (0 B),
    which nobody reads; op 3 writes nothing.
    So a has the outputs t2 and t1 (t0 stays inside): 0.3 and 0.2. b has t3: 0. The edges are a-b and a-c.
    """
    graph = graph_of(
        [tensor("t0", 9), tensor("t1", 99), tensor("t2", 999), tensor("t3", 0)],
        [
            op("op0", 0, [], [0, 1], kind="mm"),
            op("op1", 1, [0], [2], kind="add"),
            op("op2", 2, [1, 2], [3], kind="mm"),
            op("op3", 3, [2], [], kind="relu"),
        ],
    )
    labels = np.array([0, 0, 1, 2])
    kinds = features.Kinds.of(graph)
    assert kinds.of_op.tolist() == [0, 1, 0, 2]
    assert kinds.counted(labels, 3).tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 1]]
    shapes, counts = features.output_shapes(graph, labels, 3)
    assert counts.tolist() == [2, 1, 0]
    pad = [-1.0] * 3
    assert shapes[0].tolist() == pytest.approx([0.3, *pad, 0.2, *pad] + [-1.0] * 16)
    assert shapes[1].tolist() == [0, *pad] + [-1] * 20
    assert shapes[2].tolist() == [-1] * 24
    source, target = features.edges_between(graph, labels, 3)
    assert (source.tolist(), target.tolist()) == ([0, 0], [1, 2])
    assert features.adjacency(source, target, 3).tolist() == [[0, 1, 1], [0, 0, 0], [0, 0, 0]]
    near = features.neighbours(source, target, 3)
    assert near[0].tolist() == pytest.approx([-1] * 6 + [1 / 3, 2 / 3, -1, -1, -1, -1])
    assert near[2].tolist() == pytest.approx([0] + [-1] * 11)


def test_a_known_shape_replaces_the_bytes() -> None:
    """A tensor of 9 x 99 counts as these two sizes; one of five dimensions by its first four."""
    graph = graph_of(
        [
            {**tensor("t0", 891), "shape": [9, 99], "dtype": "int8"},
            {**tensor("t1", 9), "shape": [9, 1, 1, 1, 1], "dtype": "int8"},
        ],
        [op("op0", 0, [], [0, 1])],
    )
    shapes, _ = features.output_shapes(graph, np.array([0]), 1)
    assert shapes[0, :8].tolist() == pytest.approx([0.1, 0.2, -1, -1, 0.1, *[math.log10(2) / 10] * 3])


def test_more_outputs_and_neighbours_than_there_is_room_for_are_left_out() -> None:
    """Op 0 writes tensors of 1 to 9 bytes, each for an op of its own: the six largest count, and the first six readers."""
    graph = graph_of(
        [tensor(f"t{n}", n + 1) for n in range(9)],
        [op("op0", 0, [], list(range(9))), *(op(f"op{n}", n, [n - 1]) for n in range(1, 10))],
    )
    labels = np.arange(10)
    shapes, counts = features.output_shapes(graph, labels, 10)
    assert counts[0] == 9
    assert shapes[0, ::4].tolist() == pytest.approx(features.scaled(np.array([9, 8, 7, 6, 5, 4])).tolist())
    near = features.neighbours(*features.edges_between(graph, labels, 10), 10)
    assert near[0].tolist() == pytest.approx([-1] * 6 + [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
