"""Tables, bold words and wrapped lines: plain where they are piped, and as wide as the terminal at most."""

import re
import sys

import pytest

from placewise.report.terminal_text import bold, table, wrapped

ROWS = [("gpu:0", "a GPU with a long name", 1, "2.5 ms"), ("cpu:0", "a CPU", 1000, "12 ms")]
HEADER = ("device", "what it is", "ops", "busy")
PLAIN = """\
device  what it is               ops    busy
gpu:0   a GPU with a long name     1  2.5 ms
cpu:0   a CPU                   1000   12 ms"""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_what_is_piped_is_plain() -> None:
    assert table(HEADER, ROWS, left=2) == PLAIN
    assert table(("a", ""), [("x", ""), ("[bold]y", "z")]) == "a\nx\n[bold]y  z"
    assert (bold("x"), wrapped("long " * 50)) == ("x", "long " * 50)


@pytest.mark.usefixtures("terminal")
def test_a_table_that_fits_is_the_same_with_a_bold_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = table(HEADER, ROWS, left=2).splitlines()
    assert lines[0].startswith("\x1b[1m")
    assert [re.sub(r"\x1b\[\d*m", "", line).rstrip() for line in lines] == PLAIN.splitlines()
    monkeypatch.setenv("NO_COLOR", "1")
    assert table(HEADER, ROWS, left=2) == PLAIN


@pytest.mark.usefixtures("terminal")
def test_a_table_that_is_too_wide_moves_together_and_folds_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "42")
    assert table(HEADER, ROWS, left=2).splitlines()[1] == "gpu:0  a GPU with a long name    1 2.5 ms"
    monkeypatch.setenv("COLUMNS", "34")
    folded = table(HEADER, ROWS, left=2).splitlines()
    assert max(map(len, folded)) <= 34
    assert folded[1].endswith("   1 2.5 ms")
    assert " ".join("".join(line[7:23] for line in folded[1:3]).split()) == "a GPU with a long name"


@pytest.mark.usefixtures("terminal")
def test_numbers_are_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    text = table(HEADER, ROWS, left=2)
    assert all(word in text for word in ("1000", "2.5 ms", "12 ms", "a GPU with a long name"))


@pytest.mark.usefixtures("terminal")
def test_bold_and_wrapped_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert bold("x") == "\x1b[1mx\x1b[0m"
    assert wrapped("one two three four five") == "one two three four\n  five"
    monkeypatch.setenv("NO_COLOR", "1")
    assert bold("x") == "x"
