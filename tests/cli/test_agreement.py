"""The command line agrees with itself: one spelling, one way to show defaults, old spellings, hints for misspelt names."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import refused, write_tiny_files

from placewise.cli import main
from placewise.cli.parser import make_parser

DAY = (
    "place advise compare simulate bound memory detect profile run report runs resume models clusters strategies capture "
    "info import"
)


def parsers(parser: argparse.ArgumentParser | None = None) -> Iterator[argparse.ArgumentParser]:
    """Gives the parsers of all commands and benchmarks."""
    for action in (parser or make_parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield inner
                yield from parsers(inner)


ACTIONS = [(parser.prog, action) for parser in parsers() for action in parser._actions]
OWN = ("--output", "--set", "--keep", "--help")  # of each command its own


def test_commands_are_in_the_order_of_a_newcomers_day() -> None:
    names = [parser.prog.split()[1] for parser in parsers() if len(parser.prog.split()) == 2]
    assert names == [*DAY.split(), "reproduce", "bench", "train-policy", "completion"]


def test_an_option_takes_the_same_everywhere() -> None:
    """--cluster is C in every command, not FILE in one; what is written ends with -output, or is -o."""
    found: dict[str, dict[str, str]] = {}
    for command, action in ACTIONS:
        for option in action.option_strings:
            if option.startswith("--") and option not in OWN:
                found.setdefault(option, {}).setdefault(str(action.metavar), command)
    assert {option: names for option, names in found.items() if len(names) > 1} == {}


@pytest.mark.parametrize(("command", "action"), ACTIONS, ids=[f"{command} {action.dest}" for command, action in ACTIONS])
def test_help_shows_defaults_one_way(command: str, action: argparse.Action) -> None:
    text = action.help
    if isinstance(action, argparse._SubParsersAction) or text is None:
        return
    assert not re.search(r"\(default [^:]|\(\d[\d.]*\)|\([a-z]+\)$", text), text
    assert not text.endswith("."), text
    if action.default not in (None, False, [], argparse.SUPPRESS):
        default = f"{action.default:g}" if isinstance(action.default, float) else action.default
        assert f"(default: {default})" in text, text


def test_every_command_and_option_has_help() -> None:
    assert [(command, action.dest) for command, action in ACTIONS if not action.help and action.metavar != "BENCHMARK"] == []


def test_old_spellings_are_accepted_and_not_shown() -> None:
    old = ["profile", "m", "--cluster", "c", "-o", "p.json", "--graph", "g.json", "--cluster-out", "m.toml"]
    options = make_parser().parse_args(old)
    assert (options.graph_output, options.cluster_output) == ("g.json", "m.toml")
    (profile,) = (parser for parser in parsers() if parser.prog == "placewise profile")
    assert re.findall(r"--(?:graph|cluster)-\w+", profile.format_usage()) == ["--graph-output", "--cluster-output"]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["place", "graph.json", "--cluster", "2xk80"], "2xk80: is neither a file nor a preset: did you mean '2xK80'?"),
        (["place", "rnlm", "--cluster", "2xK80"], "did you mean 'rnnlm'?"),
        (["place", "rnnlm:layer=2", "--cluster", "2xK80"], "unknown option 'layer': did you mean 'layers'?"),
        (["place", "graph.json", "--cluster", "2xK80", "--strategy", "hefft"], "did you mean 'heft'?"),
        (["compare", "graph.json", "--cluster", "2xK80", "--strategies", "clasical"], "did you mean 'classical'?"),
        (
            ["place", "graph.json", "--cluster", "2xK80", "--strategy", "genetic", "--set", "cross-over=uniform"],
            "strategy 'genetic': unknown parameter 'cross-over': did you mean 'crossover'?",
        ),
        (["bound", "graph.json", "--cluster", "2xK80", "--grouping", "modul"], "did you mean 'module'?"),
    ],
)
def test_a_misspelt_name_gets_a_hint(
    arguments: list[str],
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_tiny_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert hint in refused(arguments, capsys)


def loaded_by(*arguments: str) -> set[str]:
    """Returns the packages outside of the standard library that a command loads in a fresh process."""
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from placewise.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "import json; print(json.dumps(sorted(names)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return {name for name in json.loads(done.stdout.splitlines()[-1]) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("arguments", "packages"),
    [
        ("--help", {"placewise"}),
        ("place --help", {"placewise"}),
        ("bench measured --help", {"placewise"}),
        ("place graph.json --cluster cluster.toml --clutser x", {"placewise"}),
        ("clusters", {"placewise", "numpy", "tomli_w"}),
        ("info graph.json --cluster cluster.toml", {"placewise", "numpy", "tomli_w"}),
    ],
)
def test_commands_load_only_what_they_use(
    arguments: str, packages: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert loaded_by(*arguments.split()) <= packages


def test_a_search_into_a_pipe_loads_no_rich_and_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    loaded = loaded_by("place", "graph.json", "--cluster", "cluster.toml", "--strategy", "gpu-only")
    assert "numba" in loaded
    assert loaded.isdisjoint({"rich", "torch", "ray", "transformers", "tensorboard"})


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)[: len(DAY.split())] == DAY.split()
