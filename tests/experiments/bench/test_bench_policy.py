"""`placewise bench policy` on small problems: weights judge only families that they have not seen."""

from pathlib import Path
from typing import Any

import pytest
from captured import GOLDEN

from placewise.core.errors import InputError
from placewise.experiments.bench import bench_policy
from placewise.experiments.bench.bench_policy import FOLDS, TUNED, UnseenFamilies
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
    found = UnseenFamilies(clusters=("2xK80",), seconds=0.05).run()
    assert seen == [["random"]]
    (row,) = found.data["policy"]
    assert row["family"] == "nmt"
    assert row["graph-policy"] > 0
    assert found.text.splitlines()[0].split()[:2] == ["family", "graph-policy"]
    assert "1 problems: the policy's first answer takes" in found.text
    (tuned,) = UnseenFamilies(tuned=True, seeds=2, run_file=str(tmp_path / "runs.db")).run().data["policy"]
    assert seen[1] == ["nmt"]
    assert tuned["policy, 200 ms"] <= tuned["first ms"]
    with pytest.raises(InputError, match="--also must be FAMILY=MODEL, got 'nmt'"):
        UnseenFamilies(also=("nmt",)).run()
