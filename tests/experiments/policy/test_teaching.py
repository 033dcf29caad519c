"""Teaching: it lowers the loss, what is recorded is not repeated, and an interrupted run ends with the same weights."""

import json
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import refused

from placewise.cli import main
from placewise.core.errors import StoreError
from placewise.experiments.policy import corpus, policy_training, teaching
from placewise.experiments.policy.corpus import Lesson
from placewise.experiments.policy.policy_training import Training, train
from placewise.experiments.policy.teaching import Report, prepare, sample_advantages
from placewise.experiments.policy.teaching_record import TeachingRecord, opened_record

FEW = Training(width=8, rounds=1, imitation_epochs=4, gradient_epochs=2, samples=4, batch=2, lessons=6)

LESSONS = [Lesson("random", f"random-step:{n}", "2xK80", n, 8) for n in range(6)]


@pytest.fixture(autouse=True)
def few_small_lessons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random steps of some ops, and a quick teacher."""
    monkeypatch.setattr(policy_training, "draw_lessons", lambda count, seed, hold_out: LESSONS[:count])
    monkeypatch.setattr(teaching, "TEACHER_PROPOSALS", 2)


def run(folder: Path, name: str, listen: Any = lambda report: None, record: str | None = None) -> bytes:
    path = folder / name
    train(FEW, path, None if record is None else folder / record, listen)
    return path.read_bytes()


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path: Path) -> None:
    reports: list[Report] = []
    whole = run(tmp_path, "whole.safetensors", reports.append)
    stages = [(report.stage, report.number) for report in reports]
    assert stages == [
        *(("label", n) for n in range(1, 7)),
        *(("imitation", n) for n in range(1, 5)),
        ("gradient", 1),
        ("gradient", 2),
    ]
    losses = [report.loss for report in reports if report.stage == "imitation"]
    assert losses[-1] < losses[0]

    class Killed(Exception):
        pass

    for last in (("label", 3), ("imitation", 2), ("gradient", 1)):

        def stop(report: Report, last: tuple[str, int] = last) -> None:
            if (report.stage, report.number) == last:
                raise Killed

        with pytest.raises(Killed):
            run(tmp_path, "part.safetensors", stop, "runs.db")
        assert not (tmp_path / "part.safetensors").exists()
    again: list[Report] = []
    assert run(tmp_path, "part.safetensors", again.append, "runs.db") == whole
    assert [(report.stage, report.number) for report in again if report.stage != "label"] == [("gradient", 2)]


def test_a_damaged_record_is_one_line(tmp_path: Path) -> None:
    with opened_record(tmp_path / "runs.db") as record:
        prepare(LESSONS, record, lambda report: None)
        name: list[str] = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(policy_training, "teach", lambda prepared, training, record, found, listen: name.append(found))
            policy_training.learn(prepare(LESSONS, record, print), FEW, record, print)
        record.keep(name[0], "imitation", 2, {"network.second.bias": np.zeros(3)})
    with pytest.raises(StoreError, match=r"runs\.db: can't be continued: its imitation is damaged: "):
        run(tmp_path, "weights.safetensors", record="runs.db")


HOSTILE = {
    "a view": ("ALTER TABLE labels RENAME TO l; CREATE VIEW labels AS SELECT * FROM l", "has other tables"),
    "a trigger": ("CREATE TRIGGER t AFTER INSERT ON states BEGIN DELETE FROM labels; END", "has other tables"),
    "a label of text": ("UPDATE labels SET devices = 'text'", "a label of it is of another type"),
    "half a number": ("UPDATE labels SET devices = zeroblob(3)", "a label of it is of another type"),
    "too few blocks": ("UPDATE labels SET devices = zeroblob(2)", "placements must be whole numbers of shape"),
    "no such device": (
        f"UPDATE labels SET devices = substr(x'{'0700' * 99}', 1, length(devices))",
        "Expected 0 <= device < 3",
    ),
    "an epoch of text": ("UPDATE states SET epoch = 'x'", "a state of it is of another type"),
    "no arrays": ("UPDATE states SET state = x''", "is not a safetensors file"),
    "other arrays": (
        "UPDATE states SET state = (SELECT state FROM states WHERE name = 'other')",
        "its imitation is damaged",
    ),
    "a label elsewhere": (
        "UPDATE states SET state = (SELECT state FROM states WHERE name = 'elsewhere') WHERE stage = 'gradient'",
        "its gradient is damaged: Expected 0 <= device < 3",
    ),
}


@pytest.fixture(scope="module")
def whole_record(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The record of a training that was stopped in its gradient epochs."""
    folder = tmp_path_factory.mktemp("record")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(policy_training, "draw_lessons", lambda count, seed, hold_out: LESSONS[:count])
        patched.setattr(teaching, "TEACHER_PROPOSALS", 2)
        train(replace(FEW, lessons=2), folder / "weights", folder / "runs.db", lambda report: None)
    with opened_record(folder / "runs.db") as record:
        record.keep("other", "imitation", 1, {"known": np.zeros((1, 2))})
        (name,) = record._execute("SELECT name FROM states WHERE stage = 'gradient'")
        epoch, state = record.state(name, "gradient")
        record.keep("elsewhere", "gradient", epoch, {**state, "label.0": np.full_like(state["label.0"], 7)})
    return (folder / "runs.db").read_bytes()


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_record_is_one_line_and_stays_as_it_is(case: str, tmp_path: Path, whole_record: bytes) -> None:
    path = tmp_path / "runs.db"
    path.write_bytes(whole_record)
    change, rule = HOSTILE[case]
    with closing(sqlite3.connect(path)) as database:
        database.executescript(change)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=f"^{re.escape(str(path))}: .*{re.escape(rule)}"):
        train(replace(FEW, lessons=2), tmp_path / "weights", path, lambda report: None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["runs.db"]
    assert path.read_bytes() == before


def test_labels_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lessons = [Lesson("random", "random-step:1", "2xK80", 0, 8)]
    with opened_record(tmp_path / "runs.db") as record:
        (first,) = prepare(lessons, record, lambda report: None)
    monkeypatch.setattr(teaching, "best_placement", lambda model, rng: pytest.fail("made again"))
    with opened_record(tmp_path / "runs.db") as record:
        (second,) = prepare(lessons, record, lambda report: None)
    assert np.array_equal(first.label, second.label)
    cost = first.model(first.label[None]).cost[0]
    assert cost == pytest.approx(first.seconds)
    assert cost <= first.model(np.zeros((1, first.graph.problem.num_groups), np.int64)).cost[0]


def test_advantages_by_hand() -> None:
    """Two samples, one twice as slow: half of log 2 from their mean, over a deviation of half of log 2 and 0.02."""
    half = np.log(2) / 2
    assert sample_advantages(np.array([1.0, 2.0]), 1.0).tolist() == pytest.approx(
        [half / (half + 0.02), -half / (half + 0.02)]
    )
    best = sample_advantages(np.array([4.0, 1.0, 2.0, 4.0]), 0.5)
    assert best[0] == best[3] == 0
    assert best[1] > best[2] > 0


def test_a_record_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("no database at all, but long enough to be read as one" * 30)
    with pytest.raises(StoreError, match=r"text\.db: is not a record of `placewise train-policy`"):
        TeachingRecord(tmp_path / "text.db")
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE runs (a)")
    with pytest.raises(StoreError, match=r"other\.db: is not a record"):
        TeachingRecord(tmp_path / "other.db")


def test_a_record_that_another_process_writes_is_one_line(tmp_path: Path) -> None:
    with opened_record(tmp_path / "runs.db") as record:
        other = sqlite3.connect(tmp_path / "runs.db")
        other.execute("BEGIN EXCLUSIVE")
        record._database.execute("PRAGMA busy_timeout = 0")
        with pytest.raises(StoreError, match=r"runs\.db: can't be read or written: database is locked"):
            record.add_label("lesson", np.zeros(3, np.int64))
        other.close()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "weights.safetensors")
    few = ["--lessons", "3", "--imitation", "1", "--gradient", "1"]
    assert main(["train-policy", "-o", path, *few, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["lessons"], found["examined"]) == (2, 1)
    assert found["bytes"] == Path(path).stat().st_size
    model = "rnnlm:layers=1,hidden=4,steps=2,batch=2,vocab=5"
    place = ["place", model, "--cluster", "2xK80", "--strategy", "graph-policy", "--budget", "3"]
    assert main([*place, "--set", f"weights={path}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["evaluations"] == 3


def test_wrong_options_are_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "weights.safetensors")
    assert "unknown family 'ntm': did you mean 'nmt'?" in refused(["train-policy", "-o", path, "--hold-out", "ntm"], capsys)
    every = [word for family in corpus.FAMILIES for word in ("--hold-out", family)]
    assert "leaves no family" in refused(["train-policy", "-o", path, *every], capsys)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--device cuda: this machine has no GPU" in refused(["train-policy", "-o", path, "--device", "cuda"], capsys)
    assert "there is no folder" in refused(["train-policy", "-o", str(tmp_path / "no" / "w")], capsys)
    assert not Path(path).exists()
