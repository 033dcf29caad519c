"""Files are written completely or not at all; values in errors are short."""

import gzip
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import tiny_graph

from placewise.core.errors import InputError
from placewise.formats.files import describe, read_bytes, write_bytes
from placewise.formats.graph_file import write_graph


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    path = tmp_path / "graph.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises((InputError, KeyboardInterrupt)) as caught:
        write_graph(tiny_graph(), path)
    assert isinstance(caught.value, KeyboardInterrupt) or str(caught.value).startswith(f"{path}: can't be written: No space")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["graph.json"]


def test_a_killed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text("old")
    code = (
        "import os, signal, sys; from placewise.formats import files\n"
        "files.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.write_bytes(sys.argv[1], b'new')"
    )
    result = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert result.returncode == -signal.SIGKILL
    assert path.read_text() == "old"


def test_what_cannot_be_written_is_refused_by_the_name_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path, reason in {"no/graph.json": "No such file or directory", ".": "Is a directory"}.items():
        with pytest.raises(InputError) as caught:
            write_graph(tiny_graph(), path)
        assert str(caught.value) == f"{path}: can't be written: {reason}"


def test_writing_to_a_link_writes_the_file_behind_it(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "graph.json", tmp_path / "link.json"
    link.symlink_to(real)
    for content in (b"one", b"two"):
        write_bytes(link, content)
        assert link.is_symlink()
        assert real.read_bytes() == content


def test_writing_to_a_pipe_leaves_a_pipe(tmp_path: Path) -> None:
    """As for /dev/null, which a rename would replace by a plain file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_bytes(pipe, b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_written_file_has_the_usual_permissions(tmp_path: Path) -> None:
    write_bytes(tmp_path / "ours", b"")
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        ([1], "a list"),
        ({}, "a dict"),
        (-7, "-7"),
        (2**63, "a whole number of 64 bits"),
        (1.5, "1.5"),
        ("a\nb", "'a\\nb'"),
        ("x" * 99, "'" + "x" * 56 + "..."),
    ],
)
def test_values_are_shown_in_few_words(value: Any, shown: str) -> None:
    assert describe(value) == shown


def test_a_number_that_python_refuses_to_write_out_is_shown() -> None:
    assert describe(-(1 << 99_999)) == "a whole number of 100000 bits"


def bomb(unpacked_bytes: int) -> bytes:
    return gzip.compress(bytes(unpacked_bytes), compresslevel=9, mtime=0)


def test_what_unpacks_to_much_more_than_its_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 65 kB that unpacks to 64 MiB: 32 MiB are read of it, and no more is unpacked."""
    path = tmp_path / "graph.json.gz"
    path.write_bytes(bomb(2**26))
    with pytest.raises(InputError, match=r"unpacks to more than 32 MiB: if you trust it, set PLACEWISE_MAX_FILE=1GiB"):
        read_bytes(path, InputError)
    monkeypatch.setenv("PLACEWISE_MAX_FILE", "64MiB")
    assert len(read_bytes(path, InputError)) == 2**26
    monkeypatch.setenv("PLACEWISE_MAX_FILE", str(2**26 - 1))
    with pytest.raises(InputError, match="unpacks to more than 64 MiB"):
        read_bytes(path, InputError)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "graph.json"
    path.write_bytes(bytes(101))
    monkeypatch.setenv("PLACEWISE_MAX_FILE", "100")
    with pytest.raises(InputError, match=r"graph\.json: is larger than 100 B: if you trust it, set PLACEWISE_MAX_FILE=1GiB"):
        read_bytes(path, InputError)
    monkeypatch.setenv("PLACEWISE_MAX_FILE", "101")
    assert len(read_bytes(path, InputError)) == 101
    monkeypatch.setenv("PLACEWISE_MAX_FILE", "much")
    with pytest.raises(InputError, match="PLACEWISE_MAX_FILE: must be bytes or text like '2GiB', got 'much'"):
        read_bytes(path, InputError)


@pytest.mark.parametrize("kind", ["pipe", "device", "link to a device", "folder"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    """A pipe without a writer and /dev/zero never end."""
    path = tmp_path / "graph.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    else:
        path = Path("/dev/zero")
    with pytest.raises(InputError, match=r"can't be read: (it is a device or a pipe, which may never end|Is a directory)$"):
        read_bytes(path, InputError)
