"""The docs site builds, agrees with the code, and loads nothing from other servers."""

import html
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import placewise as pw
from placewise.cli import main
from placewise.cli.parser import COMMANDS
from placewise.core.cluster import Device
from placewise.experiments.bench import find_benchmarks
from placewise.strategies import FAMILIES, STRATEGIES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GUIDES = sorted((DOCS / "guides").glob("*.md"))
LOADED = re.compile(r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//|<link[^>]*\shref=["']?(?:https?:)?//""")

needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="mkdocs-material or mkdocstrings is not installed: pip install 'placewise[docs]'",
)


def build(config: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    """Builds the site with warnings as errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


@needs_mkdocs
def test_the_site_builds_without_warnings(site: Path) -> None:
    built = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")}
    assert built >= {page.relative_to(DOCS).as_posix() for page in PAGES}


@needs_mkdocs
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not LOADED.search(page.read_text(encoding="utf-8")), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:", sheet.read_text(encoding="utf-8")), sheet


@needs_mkdocs
def test_the_reference_has_docstrings_comments_and_every_command(site: Path) -> None:
    nouns = (site / "reference" / "nouns.html").read_text(encoding="utf-8")
    assert html.escape((pw.Cluster.__doc__ or "").partition("\n")[0], quote=False) in nouns
    comment = re.search(r"flops: float  # (.+)", inspect.getsource(Device))
    assert comment is not None
    assert html.escape(comment[1], quote=False) in nouns
    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    every = len(COMMANDS) + len(find_benchmarks())
    assert len(re.findall(r"usage: placewise ", commands)) == every


@needs_mkdocs
def test_a_list_behind_a_line_of_text_is_a_list(site: Path) -> None:
    """`**Our choices**` followed by `- ...` would be one paragraph with dashes without our hook."""
    for page in site.rglob("*.html"):
        text = re.sub(r"<pre>.*?</pre>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"<p>[^<]*(?:<[^p/][^>]*>[^<]*</[^>]*>)*\n- ", text), page


@needs_mkdocs
def test_a_page_that_nobody_finds_and_a_dead_link_end_the_build(tmp_path: Path) -> None:
    for name, text, trouble in (
        ("forgotten.md", "# Forgotten", "forgotten.md"),
        ("index.md", "# Home\n[gone](gone.md)", "'gone.md'"),
    ):
        folder = tmp_path / name
        (folder / "docs").mkdir(parents=True)
        (folder / "docs" / "index.md").write_text("# Home", encoding="utf-8")
        (folder / "docs" / name).write_text(text, encoding="utf-8")
        settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:\n")[0]
        settings = re.sub(r"^(hooks|extra_css): .*\n", "", settings, flags=re.MULTILINE)
        (folder / "mkdocs.yml").write_text(settings + "nav:\n  - index.md\n", encoding="utf-8")
        done = build(folder / "mkdocs.yml", folder / "site")
        assert done.returncode != 0
        assert trouble in done.stderr


def test_strategies_are_listed_by_family_with_their_own_words() -> None:
    index = (DOCS / "strategies" / "index.md").read_text(encoding="utf-8")
    sections = index.split("\n## ")[1:]
    assert len(sections) == len(FAMILIES)
    for family, section in zip(FAMILIES, sections, strict=True):
        rows = [line for line in section.splitlines() if line.startswith("| [")]
        expected = [(name, entry.summary) for name, entry in STRATEGIES.items() if entry.family == family]
        assert rows == [f"| [{name}]({name}.md) | {summary} |" for name, summary in expected]
    assert {page.stem for page in (DOCS / "strategies").glob("*.md")} == {"index", *STRATEGIES}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda page: page.stem)
def test_code_of_a_guide_is_code_of_an_example(guide: Path) -> None:
    examples = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.py")))
    for code in re.findall(r"^```python\n(.*?)^```", guide.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        assert code in examples, code


def test_the_step_of_the_guide_can_be_placed_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "guides" / "place-your-model.md").read_text(encoding="utf-8")
    code = re.search(r'^```python title="my_project/train.py"\n(.*?)^```', text, re.MULTILINE | re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(compile(code[1], "my_project/train.py", "exec"), names)
    plan = pw.place(pw.capture(*names["step"]()), pw.Cluster.load("4090+3060"), strategy="gpu-only")
    assert plan.fits
    (tmp_path / "guided.py").write_text(code[1], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["detect", "--cpus", "2", "-o", "here.toml"]) == 0
    given = ["guided:step", "--cluster", "here.toml"]
    assert main(["place", *given, "--budget", "2", "-o", "plan.json"]) == 0
    assert main(["run", *given, "--plan", "plan.json", "--steps", "1"]) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    """Also without building the site: people read the pages in the repository."""
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


TEXTS = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *PAGES]
FILE = re.compile(r"(?<![\w./:-])(?:[\w.-]+/)+[\w-]+\.(?:py|js|md|toml|yml)\b")
MODULE = re.compile(r"(?<![\w./-])placewise(?:\.[A-Za-z_]\w*)+")
INVENTED = {"my_project/train.py", "path/to/file.py"}  # files of a user's own


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.relative_to(ROOT).as_posix())
def test_files_and_names_that_a_text_mentions_exist(text: Path) -> None:
    """A path starts at the root of the repository, and NAME in it stands for any name; links have a test of their own."""
    words = re.sub(r"\]\([^)]*\)|https?://\S+", "", text.read_text(encoding="utf-8"))
    for path in set(FILE.findall(words)) - INVENTED:
        assert any(ROOT.glob(path.replace("NAME", "*"))), path
    for name in set(MODULE.findall(words)):
        found: Any = pw
        for i, part in enumerate(name.split(".")[1:], start=2):
            if not hasattr(found, part):
                importlib.import_module(".".join(name.split(".")[:i]))
            found = getattr(found, part)


def test_the_map_has_every_room() -> None:
    rooms = re.findall(r"^\| `(\w+/|\w+\.py)` \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    source = ROOT / "src" / "placewise"
    folders = {f"{path.parent.name}/" for path in source.glob("*/__init__.py")}
    assert sorted(rooms) == sorted(folders | {path.name for path in source.glob("[!_]*.py")})


def test_rows_of_the_readme_are_those_of_the_results() -> None:
    specification = importlib.util.spec_from_file_location("readme", ROOT / "scripts" / "readme.py")
    assert specification is not None
    assert specification.loader is not None
    readme = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(readme)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (DOCS / "results" / "rows.md").read_text(encoding="utf-8")
    assert len(readme.ROW.findall(text)) == 6
    assert f"[All {len(readme.results(page))} rows and every method]" in text
    others = set(re.findall(r"^\| ([a-z-]+) \|", page, re.MULTILINE)) & set(STRATEGIES) - {"auto"}
    assert f"the best of {len(others)} other methods" in text
    assert readme.updated_rows(text, page) == text, "python scripts/readme.py brings README up to date"
