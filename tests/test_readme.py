"""README's examples run, and its links and names exist."""

import re
from pathlib import Path

import pytest

from placewise.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(code, "README.md", "exec"), {})
    assert "ms a step on 4xV100-nvlink" in capsys.readouterr().out


def test_the_first_output_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.search(r"    \$ placewise (.*)\n((?:    .*\n)+)", README)
    assert shown is not None
    assert main(shown[1].split()) == 0
    printed = capsys.readouterr().out.splitlines()
    expected = [line[4:] for line in shown[2].splitlines()]
    assert expected[-1] == "..."
    assert printed[: len(expected) - 1] == expected[:-1]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))], ids=str
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_every_preset_and_model_of_the_docs_exists() -> None:
    from placewise import zoo
    from placewise.machines.presets import PRESETS

    machines = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in machines or name.endswith(("xK40", "xK80")) for name in PRESETS)
    models = (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8")
    assert all(f"`{name}" in models for name in zoo.MODELS)
