"""Reads files with one-line errors that name the file, the element and the rule; writes a file completely or not at all."""

import gzip
import io
import json
import os
import re
import secrets
import stat
import sys
import tomllib
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from placewise.core.arrays import MAX_NUMBER
from placewise.core.errors import InputError, one_line
from placewise.core.quantities import format_bytes, parse_bytes

MAX_INT = 2**63 - 1

GZIP = b"\x1f\x8b"  # how a gzipped file begins

MAX_FILE_BYTES, MAX_FILE_VARIABLE = 2**28, "PLACEWISE_MAX_FILE"  # a graph of 800,000 ops; the environment can change it

MAX_TOML = 2**22  # characters: a cluster of 190 devices with every link written out

MAX_KEY_PARTS = 64  # of a dotted key: Python's parser takes a time that grows with the square, or worse

DEEP_KEY = re.compile(rf"""(?:[^\s=\[\]"'#.]++\s*+\.\s*+){{{MAX_KEY_PARTS}}}""")

MAX_RATIO, SMALL_BYTES = 32, 2**25  # a gzipped file unpacks to 32 times its size (graphs: 13 times), or to 32 MiB


def read_bytes(path: str | Path, error: type[InputError]) -> bytes:
    """Returns the bytes of a regular file, unpacked if it is gzipped; one that is too large is refused."""
    limit = max_file_bytes()
    with open_regular(path, error) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise error(f"{path}: is larger than {format_bytes(limit)}: {_how_to_raise(limit)}")
    return unpack(data, str(path), error) if data.startswith(GZIP) else data


@contextmanager
def open_regular(path: str | Path, error: type[InputError]) -> Iterator[BinaryIO]:
    """Opens a file for reading; what may never end (a device, a pipe) is refused."""
    if not str(path):
        raise error("expected the name of a file, got ''")
    try:
        check_regular(path, os.stat(path), error)
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # never waits to open a pipe
            check_regular(path, os.fstat(file.fileno()), error)
            yield file
    except FileNotFoundError:
        raise error(f"{path}: there is no such file") from None
    except OSError as problem:
        raise error(f"{path}: can't be read: {problem.strerror or problem}") from None


def check_regular(path: str | Path, found: os.stat_result, error: type[InputError]) -> None:
    """Refuses what is not a regular file."""
    if not stat.S_ISREG(found.st_mode):
        reason = "Is a directory" if stat.S_ISDIR(found.st_mode) else "it is a device or a pipe, which may never end"
        raise error(f"{path}: can't be read: {reason}")


def unpack(data: bytes, source: str, error: type[InputError]) -> bytes:
    """Returns gzipped bytes unpacked; a few bytes could otherwise unpack to fill the memory. Errors name `source`."""
    limit = max_file_bytes()
    if limit == MAX_FILE_BYTES:
        limit = min(limit, max(MAX_RATIO * len(data), SMALL_BYTES))
    try:
        unpacked = gzip.GzipFile(fileobj=io.BytesIO(data)).read(limit + 1)
    except (EOFError, OSError, zlib.error) as problem:
        raise error(f"{source}: is not a complete gzip file: {problem}") from None
    if len(unpacked) > limit:
        raise error(f"{source}: unpacks to more than {format_bytes(limit)}: {_how_to_raise(limit)}")
    return unpacked


def max_file_bytes() -> int:
    """Returns the size of the largest file that is read, unpacked: as the environment says, or MAX_FILE_BYTES."""
    text = os.environ.get(MAX_FILE_VARIABLE, "")
    try:
        return min(parse_bytes(text), sys.maxsize - 1) if text else MAX_FILE_BYTES
    except (ValueError, OverflowError):
        raise InputError(f"{MAX_FILE_VARIABLE}: must be bytes or text like '2GiB', got {describe(text)}") from None


def _how_to_raise(limit: int) -> str:
    return f"if you trust it, set {MAX_FILE_VARIABLE}={format_bytes(4 * max(limit, MAX_FILE_BYTES)).replace(' ', '')}"


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


def parse_toml(path: str | Path, text: str, error: type[InputError]) -> dict[str, Any]:
    """Returns the content of a TOML file; what Python's parser would take minutes for is refused."""
    if len(text) > MAX_TOML:
        raise error(f"{path}: is not a cluster: it has {len(text):,} characters, {MAX_TOML:,} are read")
    if DEEP_KEY.search(text):
        raise error(f"{path}: is not TOML: a key has more than {MAX_KEY_PARTS} parts")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"{path}: is not TOML: {one_line(problem)}") from None


def write_bytes(path: str | Path, data: bytes) -> None:
    """Writes the file atomically: a reader sees the old content or the new, never a part.

    A symbolic link keeps pointing to its target, which is replaced; a device (/dev/null) is written to.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        if is_special(path):
            Path(path).write_bytes(data)
            return
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as problem:
        raise InputError(f"{path}: can't be written: {problem.strerror}") from None
    try:
        with open(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, target)
    except OSError as problem:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{path}: can't be written: {problem.strerror}") from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_special(path: str | Path) -> bool:
    """Returns whether this is a device, a pipe or a folder, which must not be replaced by a file."""
    return os.path.exists(path) and not os.path.isfile(path)


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

    def choice(self, name: str, choices: tuple[str, ...], default: Any = ...) -> int:
        """Returns the index of a field's value among the choices."""
        value = self.text(name, default)
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

    def texts(self, name: str, default: Any = ...) -> list[str]:
        """Returns a field that is a list of strings."""
        value = self.entries(name, default)
        for i, entry in enumerate(value):
            if not isinstance(entry, str):
                raise self.wrong(f"{name}[{i}] must be text, got {describe(entry)}")
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
