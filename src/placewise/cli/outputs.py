"""What a command writes: JSON, warnings, and files that are checked before any work is done."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from placewise.core.errors import InputError

LOG_ENDINGS = ("-wal", "-shm", "-journal")  # of the files that SQLite writes beside a run file


def print_json(data: Any) -> None:
    """Prints one JSON object."""
    print(json.dumps(data, indent=1, allow_nan=False))


def warn(line: str) -> None:
    """Prints a line on standard error, whatever characters its names have."""
    from placewise.report.terminal_text import printable

    with suppress(OSError):  # nobody can be told that standard error can't be written
        print(f"placewise: {printable(line)}", file=sys.stderr)


def how_to_continue(options: argparse.Namespace) -> str:
    """Returns how to continue a search that was stopped."""
    return "the same command continues it" if options.run_file else "with --run-file it could be continued"


def check_writable(*paths: str | None, reads: Sequence[str | None] = ()) -> None:
    """Refuses output files that can't be written, that have the same name, or that are input files.

    What is read may also name a function in a file: model.py:build.
    """
    from placewise.formats.files import is_special

    given = [part for path in reads if path is not None for part in (path, path.rpartition(":")[0])]
    inputs = [os.path.realpath(path) for path in given if os.path.isfile(path)]
    outputs: dict[str, str] = {}  # the file -> as it was given
    for path in paths:
        if path is None:
            continue
        _check_writable(path)
        target = os.path.realpath(path)
        if target in inputs and not is_special(path):
            raise InputError(f"{path}: refusing to overwrite an input file")
        if target in outputs and not is_special(path):
            raise InputError(f"{path}: can't be written: two outputs have this name")
        outputs[target] = path
    logs = {name + ending: os.path.basename(name) for name in (*inputs, *outputs) for ending in LOG_ENDINGS}
    for target, path in outputs.items():
        if target in logs:
            raise InputError(f"{path}: a file of this name would be a part of {logs[target]}: choose another name")


def _check_writable(path: str) -> None:
    from placewise.formats.files import is_special

    folder = Path(path).absolute().parent
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as problem:  # a name that is too long, or has a zero byte
        raise InputError(f"{path}: can't be written: {getattr(problem, 'strerror', None) or problem}") from problem
    if os.path.isdir(path):
        raise InputError(f"{path}: can't be written: it is a folder")
    if not os.path.isdir(folder):
        raise InputError(f"{path}: can't be written: there is no folder {folder}")
    if not os.access(path if is_special(path) else folder, os.W_OK):
        raise InputError(f"{path}: can't be written: no permission to write to {folder}")


def check_folder(path: str | None) -> None:
    """Refuses a folder that files can't be written to; it need not exist yet."""
    if path is None:
        return
    nearest = Path(path).absolute()
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not os.path.isdir(nearest):
        raise InputError(f"{path}: can't be written: {nearest} is not a folder")
    if not os.access(nearest, os.W_OK):
        raise InputError(f"{path}: can't be written: no permission to write to {nearest}")
