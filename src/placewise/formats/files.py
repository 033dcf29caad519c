"""Reading files with errors of one line, writing them whole or not at all."""

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from placewise.core.arrays import MAX_NUMBER
from placewise.core.errors import InputError

MAX_INT = 2**63 - 1


def read_bytes(path: str | Path, error: type[InputError]) -> bytes:
    """Returns the file's bytes, unpacked where it is gzipped."""
    if not str(path):
        raise error("'': must be the name of a file")
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
        raise error(f"{path}: is not a whole gzip file: {problem}") from None


def parse_json(path: str | Path, data: bytes, error: type[InputError]) -> Any:
    """Returns what a JSON file says; NaN and Infinity, which JSON does not have, are refused."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    try:
        return json.loads(data.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as problem:  # ValueError has the decoding errors below it
        raise error(f"{path}: is not JSON: {one_line(problem)}") from None


def one_line(problem: BaseException) -> str:
    """Returns an exception's message without line breaks."""
    return " ".join(str(problem).split()) or type(problem).__name__


def write_bytes(path: str | Path, data: bytes) -> None:
    """Writes the file whole: whoever reads it meanwhile sees the old one or the new one, never a part.

    A link stays a link to the new file, and a device (/dev/null) stays what it is.
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
    """Returns whether this is a device, a pipe or a folder, which no file can take the place of."""
    return os.path.exists(path) and not os.path.isfile(path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class Table:
    """One table of a file while it is read: every wrong field is an error that names the file, the element and the rule.

    Fields that are not known are refused at once; those of a file's first table by `kind_of_file`, for of another kind of
    file it says that.
    """

    __slots__ = ("element", "error", "fields", "known")

    def __init__(self, element: str, fields: Any, known: Collection[str], error: type[InputError]) -> None:
        self.element, self.error = element, error
        if not isinstance(fields, Mapping):
            raise self.wrong(f"must be a table of fields, it is {describe(fields)}")
        self.fields, self.known = fields, known
        if "format" not in known:
            self._check_known()

    def _check_known(self) -> None:
        if extra := sorted(set(self.fields) - set(self.known)):
            raise self.wrong(f"has no field {extra[0]!r}; the fields are {', '.join(self.known)}")

    def wrong(self, rule: str) -> InputError:
        """Returns the error that says this rule does not hold."""
        return self.error(f"{self.element}: {rule}")

    def get(self, name: str, default: Any = ...) -> Any:
        """Returns the field, or the default; a field without one must be there."""
        value = self.fields.get(name, default)
        if value is ...:
            raise self.wrong(f"needs the field {name!r}")
        return value

    def text(self, name: str, default: Any = ...) -> str:
        """Returns a field that is text."""
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self.wrong(f"{name} must be text, it is {describe(value)}")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> int:
        """Returns the index of a field's value among the choices."""
        value = self.text(name)
        if value not in choices:
            raise self.wrong(f"{name} must be one of {', '.join(choices)}, it is {value!r}")
        return choices.index(value)

    def integer(self, name: str, default: Any = ...) -> int:
        """Returns a field that is a whole number of at least 0."""
        value = self.get(name, default)
        if name not in self.fields:
            return int(value)
        if type(value) is not int or not 0 <= value <= MAX_INT:
            raise self.wrong(f"{name} must be a whole number from 0 to 2**63 - 1, it is {describe(value)}")
        return value

    def number(self, name: str, default: Any = ..., *, above_zero: bool = False) -> float:
        """Returns a field that is a finite number, not negative."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not (0 < value < MAX_NUMBER or (value == 0 and not above_zero)):
            rule = "above 0" if above_zero else "at least 0"
            raise self.wrong(f"{name} must be a finite number {rule}, it is {describe(value)}")
        return float(value) or 0.0  # never -0.0

    def rows(self, name: str, default: Any = ...) -> list[Any]:
        """Returns a field that is a list."""
        value = self.get(name, default)
        if type(value) is not list:
            raise self.wrong(f"{name} must be a list, it is {describe(value)}")
        return value

    def indices(self, name: str, default: Any = ...) -> list[int]:
        """Returns a field that is a list of whole numbers of at least 0."""
        value = self.rows(name, default)
        for i, entry in enumerate(value):
            if type(entry) is not int or not 0 <= entry <= MAX_INT:
                raise self.wrong(f"{name}[{i}] must be a whole number from 0 to 2**63 - 1, it is {describe(entry)}")
        return value

    def kind_of_file(self, kind: str, version: int, *, optional: bool = False) -> None:
        """Checks the fields format and version, and that all others are known."""
        if (found := self.get("format", kind if optional else ...)) != kind:
            raise self.wrong(f"format must be {kind!r}, it is {describe(found)}")
        self._check_known()
        if (number := self.get("version", version if optional else ...)) != version or isinstance(number, bool):
            raise self.wrong(f"version must be {version}, it is {describe(number)}")


def describe(value: Any) -> str:
    """Returns a value as an error shows it: short, and in the words of JSON."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) > MAX_INT:
        return f"a whole number of {value.bit_length()} bits"  # Python refuses to write out very long ones
    words = {type(None): "null", list: "a list", dict: "a table"}
    text = words.get(type(value)) or repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
