"""`placewise bench policy` on small problems: weights judge only families that they have not seen."""

import json
from pathlib import Path
from typing import Any

import pytest
from captured import GOLDEN

from placewise.core.errors import InputError
from placewise.experiments.bench import bench_policy
from placewise.experiments.bench.bench_policy import FOLDS, ONE_SHOT, PUBLIC, TUNED, UnseenFamilies, _by_family, _summary
from placewise.experiments.policy import corpus, teaching
from placewise.experiments.policy.corpus import FAMILIES, Lesson

MODEL = str(GOLDEN / "captured.json.gz")


def test_no_weights_judge_a_family_that_they_have_seen() -> None:
    for held_out, families in FOLDS.items():
        assert set(held_out) <= set(FAMILIES)
        assert set(families) <= {*held_out, "transformers"}
        assert "transformers" not in families or {"gpt", "bert"} <= set(held_out)
    models = [model for families in FOLDS.values() for model in families.get("random", ())]
    assert all(int(model.partition(":")[2]) >= 10**6 for model in models)  # beyond the seeds of the corpus
    architectures = {"gnmt": "nmt", "bert": "bert", "inception": "inception", "resnet": "resnet"}
    others = {"densenet": "resnet", "vgg": "resnet"}  # held out as the convolutional networks that they are like
    for held_out, families in PUBLIC.items():
        for path in (path for paths in families.values() for path in paths):
            (family,) = (family for name, family in (architectures | others).items() if Path(path).name.startswith(name))
            assert family in held_out
    for held_out, rows in TUNED.items():
        assert all(model.startswith(held_out) for model, _ in rows)


def test_rows_by_family(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def learn(prepared: Any, training: Any, record: Any, listen: Any) -> Any:
        seen.append([one.lesson.family for one in prepared])
        return teaching.new_network(48, 3, 0)

    lessons = [Lesson(family, f"random-step:{n}", "2xK80", n, 8) for n, family in enumerate(("nmt", "random"))]
    monkeypatch.setattr(corpus, "draw_lessons", lambda count, seed: lessons)
    monkeypatch.setattr("placewise.experiments.policy.policy_training.learn", learn)
    monkeypatch.setattr(teaching, "TEACHER_PROPOSALS", 1)
    monkeypatch.setattr(bench_policy, "FOLDS", {("nmt", "rnnlm"): {"nmt": (MODEL,)}})
    monkeypatch.setattr(bench_policy, "TUNED", {("random",): ((MODEL, "2xK80"),)})
    monkeypatch.setattr(bench_policy, "TUNED_EVALUATIONS", 20)
    monkeypatch.setattr(bench_policy, "POST_EVALUATIONS", 24)
    found = UnseenFamilies(clusters=("2xK80",), seconds=0.05, plots=str(tmp_path)).run()
    assert seen == [["random"]]
    (row,) = found.data["policy"]
    assert row["family"] == "nmt"
    assert row["graph-policy"] > 0
    assert found.text.splitlines()[0].split()[:2] == ["family", "graph-policy"]
    assert "1 problems: the policy's first answer takes" in found.text
    assert found.warnings == ("dnn-partitioning and pipedream are skipped: --public names a folder with their graphs",)
    assert (tmp_path / "graph-policy-families.svg").exists()
    ablated = UnseenFamilies(clusters=("2xK80",), ablate=True, plots=str(tmp_path)).run().data["policy"]
    assert {"all families", "nmt"} < set(ablated[0])
    assert (tmp_path / "graph-policy-ablation.svg").exists()
    (tuned,) = UnseenFamilies(tuned=True, seeds=2, run_file=str(tmp_path / "runs.db")).run().data["policy"]
    assert seen[-1] == ["nmt"]
    assert tuned["policy, 200 ms"] <= tuned["first ms"]
    with pytest.raises(InputError, match="--also must be FAMILY=MODEL, got 'nmt'"):
        UnseenFamilies(also=("nmt",)).run()


def test_public_graphs_are_judged_on_their_own_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes: list[dict[str, Any]] = [
        {"id": n, "cpuLatency": 8, "fpgaLatency": 2, "size": 0, "supportedOnFpga": 1} for n in range(2)
    ]
    nodes = [{**node, "isBackwardNode": 0, "name": f"n{node['id']}"} for node in nodes]
    graph = {"maxFPGAs": 2, "maxCPUs": 1, "maxSizePerFPGA": 2**30, "nodes": nodes, "edges": []}
    (tmp_path / "two.json").write_text(json.dumps(graph))
    monkeypatch.setattr(bench_policy, "FOLDS", {})
    monkeypatch.setattr(bench_policy, "PUBLIC", {("nmt",): {"dnn-partitioning": ("two.json",)}})
    monkeypatch.setattr(bench_policy._Weights, "without", lambda self, held_out: "shipped")
    (row,) = UnseenFamilies(seconds=0.01, public=str(tmp_path)).run().data["policy"]
    assert (row["family"], row["cluster"], row["ops"]) == ("dnn-partitioning", "its own", 2)
    assert row["auto"] == row["graph-policy"] == pytest.approx(2e-3)


def test_means_count_families_alike_and_only_what_fits() -> None:
    """Family a: the policy takes 1 and 4 times auto's step, so 2; heft fits once, with 3. Family b: 2, heft does not fit."""
    policy = {
        "graph-policy, not refined": 4.0,
        "graph-policy, greedy": 9.0,
        "policy cpu s": 0.1,
        "auto cpu s": 10.0,
        "ops": 5,
    }
    rows: list[dict[str, Any]] = [
        {"family": "a", "auto": 1.0, "graph-policy": 1.0, "heft": 3.0, **policy},
        {"family": "a", "auto": 1.0, "graph-policy": 4.0, "heft": None, **policy},
        {"family": "b", "auto": 1.0, "graph-policy": 2.0, "heft": None, **policy},
    ]
    a, b, everywhere, against = _by_family(rows)
    assert "heft" in ONE_SHOT
    assert [a["graph-policy"], a["heft"], a["best of all"]] == pytest.approx([2, 3, 3])
    assert (b["graph-policy"], b["heft"]) == (2, "-")
    assert [everywhere["graph-policy"], everywhere["heft"], against["heft"]] == pytest.approx([2, 3, 1 / 3])
    assert "2.000 times as long as auto's plan in the median, 4.000 at most; nothing that fits: heft 2;" in _summary(rows)
    unfit = [{**rows[0], "graph-policy": None}, *rows[1:]]
    assert "where the policy finds nothing that fits, another does 1 times" in _summary(unfit)
