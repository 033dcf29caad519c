"""A fixed part of `python -m tests.fuzz`, which mutates every kind of file that is read."""

from pathlib import Path

import pytest
from fuzz.harness import Fuzzer
from fuzz.targets import TARGETS

PART = 400


@pytest.mark.parametrize("first", range(0, 4 * PART, PART))
def test_no_mutated_file_breaks_a_command(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is one line, or works: no traceback, no changed file, no control characters, no foreign script in a page."""
    monkeypatch.chdir(tmp_path)
    fuzzer = Fuzzer(tmp_path, seed=0, most_seconds=None)
    assert [finding for number in range(first, first + PART) for finding in fuzzer.run(number)] == []
    assert fuzzer.codes[0] > PART / 20  # mutated files that are still valid
    assert fuzzer.codes[2] > PART / 2


def test_the_good_files_are_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mutation every command that a target can run succeeds, so that a refusal is the mutation's."""
    monkeypatch.chdir(tmp_path)
    fuzzer = Fuzzer(tmp_path, seed=0, most_seconds=None)
    refused = []
    for target in TARGETS:
        for number in range(25):
            code, said = fuzzer.run_unchanged(target, number)
            refused += [f"{target.name}: {said}"] if code else []
    assert [line for line in refused if "run 3 measures 'os:abort'" not in line] == []
