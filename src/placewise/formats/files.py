"""Reads files with one-line errors that name the file, the element and the rule; writes a file completely or not at all."""

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from placewise.core.arrays import MAX_NUMBER
from placewise.core.errors import InputError, one_line

MAX_INT = 2**63 - 1


def read_bytes(path: str | Path, error: type[InputError]) -> bytes:
    """Returns the file's bytes, decompressed if it is gzipped."""
    if not str(path):
        raise error("expected the name of a file, got ''")
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise error(f"{path}: there is no such file") from None
    except OSError as problem:
        raise error(f"{path}: can't be read: {problem.strerror or problem}") from None
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, OSError, zlib.error) as problem:
        raise error(f"{path}: is not a complete gzip file: {problem}") from None


def read_json(path: str | Path, error: type[InputError]) -> Any:
    """Returns the content of a JSON file."""
    return parse_json(path, read_bytes(path, error), error)


def parse_json(path: str | Path, data: bytes, error: type[InputError]) -> Any:
    """Returns the content of a JSON file; NaN and Infinity, which JSON does not have, are refused."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    try:
        return json.loads(data.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as problem:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise error(f"{path}: is not JSON: {one_line(problem)}") from None


def write_bytes(path: str | Path, data: bytes) -> None:
    """Writes the file atomically: a reader sees the old content or the new, never a part.

    A symbolic link keeps pointing to its target, which is replaced; a device (/dev/null) is written to.
    """
    target = Path(os.path.realpath(path))
    try:
        if is_special(path):
            Path(path).write_bytes(data)
            return
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as problem:
        raise InputError(f"{path}: can't be written: {problem.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as problem:
        Path(temporary).unlink(missing_ok=True)
        raise InputError(f"{path}: can't be written: {problem.strerror}") from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def is_special(path: str | Path) -> bool:
    """Returns whether this is a device, a pipe or a folder, which must not be replaced by a file."""
    return os.path.exists(path) and not os.path.isfile(path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class Fields:
    """The fields of one dict in a file, checked as they are read: an error names the file, the element and the rule.

    Unknown fields are refused at once. Those of a file's top level are refused by `check_format`, so that a file of
    another format is reported as that.
    """

    __slots__ = ("element", "error", "given", "known")

    def __init__(self, element: str, given: Any, known: Collection[str], error: type[InputError]) -> None:
        self.element, self.error = element, error
        if not isinstance(given, Mapping):
            raise self.wrong(f"must be a dict, got {describe(given)}")
        self.given, self.known = given, known
        if "format" not in known:
            self._check_known()

    def _check_known(self) -> None:
        if unknown := sorted(set(self.given) - set(self.known)):
            raise self.wrong(f"unknown field {unknown[0]!r}; the fields are {', '.join(self.known)}")

    def check_format(self, name: str, version: int, *, optional: bool = False) -> None:
        """Checks the fields format and version, and that all other fields are known."""
        if (found := self.get("format", name if optional else ...)) != name:
            raise self.wrong(f"format must be {name!r}, got {describe(found)}")
        self._check_known()
        if (number := self.get("version", version if optional else ...)) != version or isinstance(number, bool):
            raise self.wrong(f"version must be {version}, got {describe(number)}")

    def wrong(self, rule: str) -> InputError:
        """Returns the error for a rule that does not hold."""
        return self.error(f"{self.element}: {rule}")

    def get(self, name: str, default: Any = ...) -> Any:
        """Returns the field, or the default; a field without a default is required."""
        value = self.given.get(name, default)
        if value is ...:
            raise self.wrong(f"needs the field {name!r}")
        return value

    def text(self, name: str, default: Any = ...) -> str:
        """Returns a field that is a string."""
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self.wrong(f"{name} must be text, got {describe(value)}")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> int:
        """Returns the index of a field's value among the choices."""
        value = self.text(name)
        if value not in choices:
            raise self.wrong(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        return choices.index(value)

    def integer(self, name: str, default: Any = ...) -> int:
        """Returns a field that is a whole number of at least 0; the default may be any."""
        value = self.get(name, default)
        if name not in self.given:
            return int(value)
        if type(value) is not int or not 0 <= value <= MAX_INT:
            raise self.wrong(f"{name} must be a whole number from 0 to 2**63 - 1, got {describe(value)}")
        return value

    def number(self, name: str, default: Any = ..., *, above_zero: bool = False) -> float:
        """Returns a field that is a finite number of at least 0."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not (0 < value < MAX_NUMBER or (value == 0 and not above_zero)):
            rule = "above 0" if above_zero else "at least 0"
            raise self.wrong(f"{name} must be a finite number {rule}, got {describe(value)}")
        return float(value) or 0.0  # never -0.0

    def entries(self, name: str, default: Any = ...) -> list[Any]:
        """Returns a field that is a list."""
        value = self.get(name, default)
        if type(value) is not list:
            raise self.wrong(f"{name} must be a list, got {describe(value)}")
        return value

    def indices(self, name: str, default: Any = ...) -> list[int]:
        """Returns a field that is a list of whole numbers of at least 0."""
        value = self.entries(name, default)
        for i, entry in enumerate(value):
            if type(entry) is not int or not 0 <= entry <= MAX_INT:
                raise self.wrong(f"{name}[{i}] must be a whole number from 0 to 2**63 - 1, got {describe(entry)}")
        return value

    def mapping(self, name: str, default: Any = ...) -> dict[str, Any]:
        """Returns a field that is a dict."""
        value = self.get(name, default)
        if not isinstance(value, dict):
            raise self.wrong(f"{name} must be a dict, got {describe(value)}")
        return value


def describe(value: Any) -> str:
    """Returns a value as an error shows it: short, with JSON's true, false and null."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) > MAX_INT:
        return f"a whole number of {value.bit_length()} bits"  # Python refuses to convert very long ones to text
    words = {type(None): "null", list: "a list", dict: "a dict"}
    text = words.get(type(value)) or repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
