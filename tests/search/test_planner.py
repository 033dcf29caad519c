"""The planner: pw.place, budgets and gaps."""

import re
from pathlib import Path
from typing import Any

import pytest
from builders import tiny_cluster, tiny_graph

import placewise as pw
from placewise.core.errors import InputError, NothingFits
from placewise.evaluate import open_evaluator
from placewise.evaluate.measured import Measure
from placewise.formats.cluster_file import write_cluster
from placewise.formats.graph_file import write_graph
from placewise.search.budget import Budget, budget_of
from placewise.search.planner import Planner, gap_of
from placewise.search.request import DEFAULT_STRATEGY

MODEL = "rnnlm:layers=2,hidden=8,steps=3,batch=4,vocab=11"


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a small captured graph."""
    from placewise.models import load_graph

    path = tmp_path_factory.mktemp("graph") / "graph.json"
    write_graph(load_graph(MODEL), path)
    return path


def test_place_from_python(graph: Path) -> None:
    from placewise.models import load_graph

    plan = pw.place(load_graph(str(graph)), pw.Cluster.load("2xK80"), evaluations=30, strategy="random", seed=4)
    assert plan.fits
    assert plan.step_seconds is not None
    assert plan.gap is not None
    step = f"{plan.step_seconds * 1e3:.4g} ms a step on 2xK80, at most {plan.gap:.1%} above the best possible"
    assert str(plan).startswith(f"{step} (random, 30 evaluations, seed 4)")


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"cluster": None}, "cluster must be a Cluster, or the name of a preset or a file, got a NoneType"),
        ({"measure": 3}, "measure must be True, or a Measure of placewise.evaluate.measured, got 3"),
        ({"seconds": "3"}, "seconds must be a number, got '3'"),
        ({"evaluations": "3"}, "evaluations must be a whole number, got '3'"),
        ({"seed": 0.5}, "seed must be a whole number, got 0.5"),
        ({"seed": None}, "seed must be a whole number, got None"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"settings": "batch=3"}, "settings must be a dict or None, got 'batch=3'"),
        ({"strategy": ["random"]}, "strategy must be a string, got ['random']"),
        ({"grouping": None}, "grouping must be a string, got None"),
        ({"ray": True}, "ray must be an address, or 'local', got True"),
    ],
)
def test_place_refuses_what_is_of_another_kind(given: dict[str, Any], rule: str) -> None:
    with pytest.raises(InputError, match=re.escape(rule)):
        pw.place(tiny_graph(), **{"cluster": "2xK80", "strategy": "random", "evaluations": 1, **given})


def test_a_cluster_may_be_a_path(tmp_path: Path) -> None:
    write_cluster(tiny_cluster(), tmp_path / "tiny.toml")
    assert pw.place(tiny_graph(), tmp_path / "tiny.toml", strategy="random", evaluations=1).cluster == tiny_cluster().name


@pytest.mark.parametrize(("given", "measure"), [(True, Measure()), (False, None), (None, None), (Measure(5), Measure(5))])
def test_true_measures_as_usual(given: Any, measure: Measure | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate(planner: Planner) -> Any:
        assert planner.request.measure == measure
        return open_evaluator(planner.problem)

    monkeypatch.setattr(Planner, "evaluator", simulate)
    plan = pw.place(tiny_graph(), tiny_cluster(), strategy="random", evaluations=1, measure=given)
    assert (plan.predicted_seconds is not None) == (measure is not None)


def test_measured_times_have_no_gap() -> None:
    with pytest.raises(InputError, match="a target gap can't be used when placements are measured"):
        budget_of("auto", None, None, 0.1, is_measured=True)


def test_a_search_does_without_a_bound_that_fails(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from placewise.models import load_graph

    monkeypatch.setattr("placewise.bounds.best_bound.bound", lambda problem, seconds: 1 / 0)
    with pytest.warns(UserWarning, match="there is no bound for this step: ZeroDivisionError"):
        plan = pw.place(load_graph(str(graph)), pw.Cluster.load("2xK80"), evaluations=30, strategy="random")
    assert (plan.bound_seconds, plan.gap, plan.fits) == (None, None, True)
    assert "above the best possible" not in str(plan)


@pytest.mark.parametrize(("step", "bound", "gap"), [(3.0, 2.0, 0.5), (2.0, 2.0, 0.0), (0.0, 0.0, 0.0), (1.0, 0.0, None)])
def test_gap(step: float, bound: float, gap: float | None) -> None:
    assert gap_of(step, bound) == gap


def test_the_bound_takes_its_time_from_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth is left for the search, however long the bound takes; a budget in evaluations stays what it is."""
    assert Budget(seconds=10.0).without(4.0) == Budget(seconds=6.0)
    assert Budget(seconds=10.0).without(40.0) == Budget(seconds=1.0)
    assert Budget(evaluations=3).without(4.0) == Budget(evaluations=3)
    clock, budgets = iter([5.0, 9.0]), list[Budget]()

    def search(*_: Any, budget: Budget, **__: Any) -> Any:
        budgets.append(budget)
        raise InputError("enough")

    monkeypatch.setattr("placewise.search.planner.search", search)
    monkeypatch.setattr("placewise.search.planner.time.monotonic", lambda: next(clock))
    with pytest.raises(InputError, match="enough"):
        pw.place(tiny_graph(), tiny_cluster(), strategy="random", seconds=10.0)
    assert [budget.seconds for budget in budgets] == [6.0]


def test_without_a_budget_auto_has_seconds_and_others_have_evaluations() -> None:
    assert DEFAULT_STRATEGY == "auto"
    assert budget_of("auto", None, None) == Budget(seconds=10.0, target_gap=1e-6)  # auto ends when the gap is closed
    assert budget_of("genetic", None, None, 0.1) == Budget(evaluations=2400, target_gap=0.1)
    assert budget_of("auto", 7, None) == Budget(evaluations=7, target_gap=1e-6)
    assert budget_of("genetic", None, 2.0) == Budget(seconds=2.0)


def test_nothing_fits_from_python(graph: Path) -> None:
    from placewise.models import load_graph

    with pytest.raises(NothingFits, match="nothing fits"):
        pw.place(load_graph(str(graph)), tiny_cluster(memory=1000), evaluations=3, strategy="random")
