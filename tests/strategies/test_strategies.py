"""What every strategy must do; a new one gets these tests by being in STRATEGIES."""

import dataclasses
import inspect
import json
import math
import os
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bless import EVALUATIONS, FEWER_EVALUATIONS, HISTORIES, LENGTH, SEED, found
from builders import graph_data, graph_of, mixed_cluster, op, tensor, tiny_cluster, tiny_graph, wired
from captured import captured_problem
from simulated import Step, gpus, random_step, takes
from small_problems import two_chains

from placewise.core.contracts import Evaluator, Proposal
from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.evaluate.pool import ProcessPool
from placewise.formats.cluster_file import parse_cluster
from placewise.search.budget import Budget
from placewise.simulate.simulator import Simulator
from placewise.strategies import FAMILIES, STRATEGIES, make, names_of, parameters

ROOT = Path(__file__).parents[2]
NAMES = list(STRATEGIES)


def too_large() -> Problem:
    """Returns a step that no device has the memory for."""
    parameters = [tensor(f"w{n}", 10, "parameter", home=n) for n in range(4)]
    return Step.of(graph_data(parameters, [takes(1.0, n, reads=[n]) for n in range(4)]), gpus(2, memory=3)).problem


def bound_to_kinds() -> Problem:
    """Returns a chain of ops on a GPU and a CPU; some can run on one of them alone."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"devices": ["cpu"]},
        {"devices": ["gpu"]},
        {},
        {"devices": ["cpu", "gpu"]},
        {"devices": ["cpu"]},
    )
    rows: list[dict[str, Any]] = [op(f"op{n}", n, [n - 1] if n else [], [n]) for n in range(6)]
    for row, fields in zip(rows, kinds, strict=True):
        row |= {"flops": 10, **fields}
    return Problem.of(graph_of([tensor(f"t{n}", 2) for n in range(6)], rows), mixed_cluster())


def one_device() -> Problem:
    """Returns a chain on a single GPU."""
    graph = wired([(0, 1), (1, 2)], 3, flops=[1, 2, 3])
    return Problem.of(graph, parse_cluster(gpus(1)))


def random_problem(seed: int) -> Problem:
    """Returns a random step on one to four devices."""
    return random_step(seed, 14, 1 + seed % 4, 60, "colocated")[0].problem


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "empty": lambda: Problem.of(graph_of([], []), tiny_cluster()),
    "one op": lambda: Problem.of(wired([], 1, flops=[1]), tiny_cluster()),
    "one device": one_device,
    "disconnected": lambda: Problem.of(wired([(0, 3), (1, 4)], 6, flops=[1] * 6), tiny_cluster()),
    "all ties": partial(two_chains, 8, 3),
    "no work": lambda: Problem.of(wired([(0, 1), (1, 2)], 3), tiny_cluster()),
    "tiny": lambda: Problem.of(tiny_graph(), tiny_cluster()),
    "bound to kinds": bound_to_kinds,
    "too large": too_large,
    **{f"random {seed}": partial(random_problem, seed) for seed in range(8)},
}


@pytest.fixture(scope="module")
def problem() -> Problem:
    """The captured step."""
    return captured_problem()


@pytest.fixture(scope="module")
def findings(problem: Problem) -> dict[str, Any]:
    """What each strategy finds in this process, computed on demand."""
    simulator = Simulator(problem)

    class Findings(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            self[name] = found(name, problem, simulator)
            return self[name]

    return Findings()


@pytest.fixture(scope="module", params=["1", "12345"])
def elsewhere(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What each strategy finds in a fresh process with another PYTHONHASHSEED."""
    environment = {**os.environ, "PYTHONHASHSEED": request.param}
    command = [sys.executable, "-W", "error", str(ROOT / "tests" / "bless.py"), "--print"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    data: dict[str, Any] = json.loads(done.stdout)
    return data


@pytest.fixture(scope="module", params=[1, 2, 4])
def pool(request: pytest.FixtureRequest, problem: Problem) -> Iterator[Evaluator]:
    """Simulators on some processes."""
    evaluator = ProcessPool(partial(Simulator, problem, threads=1), request.param)
    yield evaluator
    evaluator.close()


def check_proposal(problem: Problem, proposal: Proposal) -> None:
    """Asserts that all placements and orders are valid, and that the notes can be written as JSON."""
    assert isinstance(proposal, Proposal)
    assert len(proposal.placements) >= 1
    problem.check_placements(proposal.placements)
    if proposal.orders is not None:
        assert len(proposal.orders) in (1, len(proposal.placements))
        for order in proposal.orders:
            problem.check_order(order)
    json.dumps(dict(proposal.notes), allow_nan=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", PROBLEMS)
def test_proposals_are_valid_and_nothing_is_printed(name: str, case: str, capfd: pytest.CaptureFixture[str]) -> None:
    problem = PROBLEMS[case]()
    simulator = Simulator(problem, threads=1)
    proposals = make(name).search(problem, np.random.default_rng(SEED))
    if name == "cpu-only" and all(device.kind != "cpu" for device in problem.cluster.devices):
        with pytest.raises(StrategyError, match="needs a CPU"):
            next(proposals)
        return
    spent, proposal = 0, next(proposals)  # even an empty problem has one placement
    while spent < FEWER_EVALUATIONS.get(name, EVALUATIONS):
        check_proposal(problem, proposal)
        spent += len(proposal.placements)
        try:
            proposal = proposals.send(simulator(proposal.placements, proposal.orders))
        except StopIteration:
            break
    proposals.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", NAMES)
def test_proposals_and_evaluations_are_never_changed_later(name: str, problem: Problem) -> None:
    proposals = make(name).search(problem, np.random.default_rng(SEED))
    simulator, evaluation = Simulator(problem), None
    seen: list[tuple[Any, Any]] = []  # an array and a copy of it
    for _ in range(5):
        try:
            proposal = next(proposals) if evaluation is None else proposals.send(evaluation)
        except StopIteration:
            break
        evaluation = simulator(proposal.placements, proposal.orders)
        seen.append((proposal.placements, proposal.placements.copy()))
        seen.append((evaluation.cost, evaluation.cost.copy()))
    proposals.close()
    for array, copy in seen:
        assert np.array_equal(array, copy)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_has_the_same_history(name: str, problem: Problem, findings: dict[str, Any]) -> None:
    assert found(name, problem, Simulator(problem)) == findings[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_process_with_another_hash_seed_has_the_same_history(
    name: str, findings: dict[str, Any], elsewhere: dict[str, Any]
) -> None:
    assert elsewhere[name] == findings[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_any_number_of_threads_has_the_same_history(
    name: str, threads: int, problem: Problem, findings: dict[str, Any]
) -> None:
    assert found(name, problem, Simulator(problem, threads=threads)) == findings[name]


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_workers_has_the_same_history(
    name: str, problem: Problem, pool: Evaluator, findings: dict[str, Any]
) -> None:
    assert found(name, problem, pool) == findings[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_search_can_be_closed_at_any_proposal(name: str) -> None:
    problem = PROBLEMS["bound to kinds" if name == "cpu-only" else "tiny"]()  # the tiny machine has no CPU
    simulator = Simulator(problem, threads=1)
    for steps in range(6):
        proposals = make(name).search(problem, np.random.default_rng(SEED))
        try:
            proposal = next(proposals) if steps else None
            for _ in range(steps - 1):
                assert proposal is not None
                proposal = proposals.send(simulator(proposal.placements, proposal.orders))
        except StopIteration:
            break
        proposals.close()
        assert inspect.getgeneratorstate(proposals) == inspect.GEN_CLOSED


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_of_one_evaluation_is_enough(name: str, problem: Problem) -> None:
    assert found(name, problem, Simulator(problem), budget=Budget(evaluations=1))["evaluations"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_is_frozen_data_whose_fields_have_defaults(name: str) -> None:
    strategy = make(name)
    assert dataclasses.is_dataclass(strategy)
    assert typing.cast(Any, type(strategy)).__dataclass_params__.frozen
    for field in dataclasses.fields(strategy):
        assert field.default is not dataclasses.MISSING, field.name
        assert isinstance(field.default, (bool, int, float, str)), field.name
    assert parameters(name) == dataclasses.asdict(strategy)
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.anything = 1


@pytest.mark.parametrize("name", NAMES)
def test_defaults_can_be_written_as_text(name: str) -> None:
    texts = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in parameters(name).items()}
    assert make(name, texts) == make(name)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_parameters_are_refused_in_one_line(name: str) -> None:
    wrong = [("no_such_parameter", "1", "unknown parameter 'no_such_parameter': ")]
    for key, default in parameters(name).items():
        if isinstance(default, bool) or not isinstance(default, str):
            wrong.append((key, "many", f"{key} must be"))
        if isinstance(default, (int, float)) and not isinstance(default, bool):
            wrong.append((key, "-1000000000", f"{key} must be"))
            wrong.append((key, str(math.nan), f"{key} must be"))
        if typing.get_origin(typing.get_type_hints(type(make(name)))[key]) is typing.Literal:
            wrong.append((key, "no such word", f"{key} must be one of"))
    for key, text, rule in wrong:
        with pytest.raises(StrategyError) as refusal:
            make(name, {key: text})
        assert f"strategy {name!r}: " in str(refusal.value)
        assert rule in str(refusal.value)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_of_the_docs_names_every_parameter(name: str) -> None:
    page = (ROOT / "docs" / "strategies" / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {name}\n")
    for key in parameters(name):
        assert f"`{key}`" in page, key


@pytest.mark.parametrize("name", NAMES)
def test_the_search_begins_as_it_always_did(name: str, findings: dict[str, Any]) -> None:
    golden = json.loads(HISTORIES.read_text(encoding="utf-8"))
    assert name in golden, "python tests/bless.py writes the golden histories"
    now = findings[name]["history"][:LENGTH]
    assert [spent for spent, _ in now] == [spent for spent, _ in golden[name]]
    assert [best for _, best in now] == pytest.approx([best for _, best in golden[name]], rel=1e-9)


def test_golden_histories_are_those_of_the_table() -> None:
    assert list(json.loads(HISTORIES.read_text(encoding="utf-8"))) == NAMES, "python tests/bless.py writes them again"


def test_names_of_the_table() -> None:
    assert names_of("all") == tuple(STRATEGIES)
    assert names_of("random,heft,random") == ("random", "heft")
    assert names_of("heft,classical")[0] == "heft"
    for name, entry in STRATEGIES.items():
        assert entry.family in FAMILIES
        assert entry.summary
        assert name == name.lower().replace("_", "-")
    for text in ("", "no-such", "random,no-such", "random,"):
        with pytest.raises(StrategyError, match="unknown strategy"):
            names_of(text)
    with pytest.raises(StrategyError, match="unknown strategy 'no-such'"):
        make("no-such")


def test_without_torch_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("placewise.strategies.importlib.import_module", missing)
    with pytest.raises(StrategyError, match=r"strategy 'hdp' needs PyTorch: pip install 'placewise\[learned\]'"):
        make("hdp")
