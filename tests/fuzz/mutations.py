"""Mutations of files: of the values in them (JSON, TOML, lines of text, rows of SQLite), and of their bytes."""

import gzip
import json
import random
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import tomli_w

DEEP = 50_000  # brackets: more than any parser follows

HOSTILE_TEXTS = (
    "", " ", "\x00", "\x1b]0;x\x07\x1b[2J", "a\nb", "\r", "\u202e", "\ud800", "é" * 40, "x" * 5000, "'", '"',
    "</script><script>", "__proto__", "../../etc/passwd", "%s%n", "{}", "os:abort", "nan", "1e999", "-1", "gpu:0",
    "coarse:0", "name-prefix:99",
)  # fmt: skip

HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -0.0, -1, 1, 2, 7, 0.5, 1e-320, 1e-300, 1e299, 1e308, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1,
    2**63, 2**64, 10**400, [], {}, [[]], [None], [[1, 2]], [0] * 1000, {"": 0}, {"format": "placewise-graph"},
)  # fmt: skip

RAW = ("1e999", "-1e999", "NaN", "Infinity", "9" * 5000, "1" + "0" * 400, "-0", "0x10", "1.", "'", "\\", "[" * DEEP)


class Raw:
    """A value that is written as it stands, valid or not."""

    def __init__(self, text: str) -> None:
        self.text = text


# --- trees: what JSON and TOML hold ---


def mutated_tree(tree: Any, rng: random.Random) -> Any:
    """Returns a copy of nested lists and dicts with some entries changed."""
    tree = deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        nodes = _nodes(tree)
        if not nodes:
            return hostile(rng)
        _change(*rng.choice(nodes), nodes, rng)
    return tree


def hostile(rng: random.Random) -> Any:
    """Returns a value that breaks some rule."""
    kind = rng.randrange(12)
    if kind < 5:
        return deepcopy(rng.choice(HOSTILE_VALUES))
    if kind < 8:
        return rng.choice(HOSTILE_TEXTS)
    if kind == 8:
        return Raw(rng.choice(RAW))
    if kind == 9:
        return rng.randint(-3, 300)
    return rng.uniform(-1, 1e6) if kind == 10 else rng.choice((10.0 ** rng.randint(-320, 308), rng.getrandbits(64)))


def _nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Returns all entries of nested lists and dicts: the container, and the key or index in it."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        at = waiting.pop()
        entries = at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
        for key, value in entries:
            found.append((at, key))
            waiting.append(value)
    return found


def _change(container: Any, key: Any, nodes: list[tuple[Any, Any]], rng: random.Random) -> None:
    kind, value = rng.randrange(9), container[key]
    if kind == 0:
        del container[key]
    elif kind == 1:
        other, at = rng.choice(nodes)
        container[key] = deepcopy(other[at]) if at in range(len(other)) or at in other else hostile(rng)
    elif kind == 2 and isinstance(container, list):
        container[key:key] = [deepcopy(value)] * rng.choice((1, 2, 50))
    elif kind == 3 and isinstance(container, list):
        rng.shuffle(container)
    elif kind == 4 and isinstance(container, dict):
        container[rng.choice((*HOSTILE_TEXTS, *map(str, container)))] = container.pop(key)
    elif kind == 5 and isinstance(value, (int, float)) and not isinstance(value, bool):
        container[key] = rng.choice((value + 1, value - 1, -value, value * 2, value * 10**9))
    elif kind == 6 and isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        container[key] = value[:at] + rng.choice(HOSTILE_TEXTS) + value[at:]
    else:
        container[key] = hostile(rng)


def json_text(value: Any) -> str:
    """Returns a tree as JSON, its raw values as they stand."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(key))}:{json_text(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(json_text, value)) + "]"
    return json.dumps(value)


def toml_text(value: Any) -> str:
    """Returns a tree as TOML; what TOML can't hold is written raw."""
    holes: list[str] = []

    def plain(entry: Any) -> Any:
        if isinstance(entry, dict):
            return {str(key): plain(inner) for key, inner in entry.items()}
        if isinstance(entry, list):
            return [plain(inner) for inner in entry]
        if entry is None or isinstance(entry, Raw):
            holes.append("null" if entry is None else entry.text)
            return f"hole {len(holes) - 1} of it"
        return entry.encode("utf-8", "replace").decode() if isinstance(entry, str) else entry

    text = tomli_w.dumps(plain(value)) if isinstance(value, dict) else json_text(value)
    for number, hole in enumerate(holes):
        text = text.replace(f'"hole {number} of it"', hole)
    return text


# --- bytes and lines ---


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """Returns bytes with some of them flipped, cut, repeated, moved or replaced."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if not found:
            return rng.randbytes(rng.choice((1, 16, 300)))
        at, length = rng.randrange(len(found)), rng.choice((1, 1, 2, 16, 512, 4096))
        kind = rng.randrange(9)
        if kind < 3:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 3:
            found[at : at + length] = rng.randbytes(length)
        elif kind == 4:
            found[at : at + length] = bytes([rng.choice((0, 255, 10, 34, 91))]) * length
        elif kind == 5:
            del found[at : at + length]
        elif kind == 6:
            found = found[:at]
        elif kind == 7:
            found[at:at] = found[at : at + length] * rng.choice((1, 3))
        else:
            other = rng.randrange(len(found))
            found[at : at + length], found[other : other + length] = found[other : other + length], found[at : at + length]
    return bytes(found)


def mutated_lines(text: str, rng: random.Random) -> str:
    """Returns text with some lines or words changed."""
    lines = text.split("\n")
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, kind = rng.randrange(len(lines)), rng.randrange(5)
        if kind == 0:
            lines.insert(at, rng.choice(lines))
        elif kind == 1 and len(lines) > 1:
            del lines[at]
        elif kind == 2:
            rng.shuffle(lines)
        else:
            words = lines[at].split(rng.choice((" ", "=", ",", " -- ")))
            words[rng.randrange(len(words))] = rng.choice((*HOSTILE_TEXTS, *RAW[:6], "[1;2]", "node1", "-5", "1e300"))
            lines[at] = rng.choice((" ", "=", ", ", " -- ")).join(words)
    return "\n".join(lines).encode("utf-8", "replace").decode()


def packed(data: bytes, rng: random.Random) -> bytes:
    """Returns data gzipped: whole, damaged, twice, or with much behind it."""
    kind = rng.randrange(8)
    if kind == 0:
        return mutated_bytes(gzip.compress(data, 1, mtime=0), rng)
    if kind == 1:
        return gzip.compress(gzip.compress(data, 1, mtime=0), 1, mtime=0)
    if kind == 2 and not rng.randrange(20):
        return gzip.compress(data + rng.choice((b" ", b"[", b"\0", b"[],", b"{},")) * 2**26, 1, mtime=0)
    return gzip.compress(data, 1, mtime=0)


def mutated_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Returns a file of arrays with its header's fields changed, or the numbers, or any bytes."""
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    kind = rng.randrange(4)
    if kind == 0:
        return mutated_bytes(data, rng)
    if kind == 1:
        body = mutated_bytes(body, rng)
    else:
        with suppress(ValueError, RecursionError):  # it was damaged before
            header = json_text(mutated_tree(json.loads(header), rng)).encode("utf-8", "replace")
    return len(header).to_bytes(8, "little") + header + body


# --- run files ---


def mutate_run_file(path: Path, rng: random.Random) -> None:
    """Changes some values of a run file, or its tables, in SQLite's own way; or its bytes."""
    _mutate_database(path, rng, _change_row)


def mutate_record(path: Path, rng: random.Random) -> None:
    """Changes some values of a record of train-policy, or its tables, in SQLite's own way; or its bytes."""
    _mutate_database(path, rng, _change_record)


def _mutate_database(path: Path, rng: random.Random, change: Callable[[sqlite3.Connection, random.Random], None]) -> None:
    if rng.randrange(2):
        path.write_bytes(mutated_bytes(path.read_bytes(), rng))
        return
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("pragma ignore_check_constraints = on")
        for _ in range(rng.choice((1, 1, 2, 4))):
            change(connection, rng)
    except sqlite3.Error:
        pass  # SQLite itself has refused it
    finally:
        connection.close()


def _change_row(connection: sqlite3.Connection, rng: random.Random) -> None:
    if not rng.randrange(8):
        connection.execute(rng.choice(DEFINITIONS))
        return
    table = rng.choice(("problems", "runs", "runs", "steps", "steps"))
    columns = [row[1] for row in connection.execute(f"pragma table_info({table})")]
    if not columns:  # it was dropped
        return
    column = rng.choice(columns)
    where, at = ("where run = ? and number = ?", (rng.randint(1, 2), rng.randrange(4))) if table == "steps" else ("", ())
    if not rng.randrange(6):
        connection.execute(f"delete from {table} {where}", at)
        return
    old = connection.execute(f"select {column} from {table} {where}", at).fetchone()
    connection.execute(f"update {table} set {column} = ? {where}", (_cell(None if old is None else old[0], rng), *at))


def _change_record(connection: sqlite3.Connection, rng: random.Random) -> None:
    if not rng.randrange(8):
        connection.execute(rng.choice(RECORD_DEFINITIONS))
        return
    table, columns = rng.choice(
        (("labels", ("devices",)), ("states", ("epoch", "state", "state", "state", "stage", "name")))
    )
    rowid, column = rng.randint(1, 3), rng.choice(columns)
    if not rng.randrange(8):
        connection.execute(f"delete from {table} where rowid = ?", (rowid,))
        return
    row = connection.execute(f"select {column} from {table} where rowid = ?", (rowid,)).fetchone()
    old = None if row is None else row[0]
    value: Any = mutated_bytes(old, rng) if isinstance(old, bytes) and rng.randrange(3) else _cell(old, rng)
    if isinstance(old, bytes) and table == "states" and rng.randrange(3):
        value = mutated_safetensors(old, rng)
    connection.execute(f"update {table} set {column} = ? where rowid = ?", (value, rowid))


RECORD_DEFINITIONS = (
    "create view v as select 1", "create table t (a)", "create index i on labels (devices)", "drop table labels",
    "create trigger t after insert on states begin delete from labels; end", "alter table states add column extra",
    "alter table labels rename to l; create view labels as select * from l", "pragma application_id = 7", "vacuum",
    "pragma user_version = 2", "pragma journal_mode = wal", "update labels set devices = zeroblob(8)",
    "update states set epoch = 1000000", "update states set epoch = 2",
)  # fmt: skip


DEFINITIONS = (
    "create view v as select 1", "create table t (a)", "create index i on steps (notes)", "drop table problems",
    "create trigger t after insert on steps begin delete from runs; end", "alter table runs add column extra",
    "pragma user_version = 2", "pragma application_id = 7", "pragma journal_mode = delete", "vacuum",
    "insert into runs select id + 1000000, key, specification, created, status, outcome from runs",
    "insert into runs select -1, key, specification, created, status, outcome from runs limit 1",
    "update runs set key = (select key from runs limit 1)",
)  # fmt: skip


def _cell(old: Any, rng: random.Random) -> Any:
    """Returns a value for a cell: of another type, or changed in its own."""
    kind = rng.randrange(6)
    if isinstance(old, bytes) and kind < 4:
        if kind == 0:
            return mutated_bytes(old, rng)
        inflate: Callable[[bytes], bytes] = gzip.decompress if old.startswith(b"\x1f\x8b") else zlib.decompress
        try:
            inner = inflate(old)
        except (OSError, EOFError, zlib.error):
            return mutated_bytes(old, rng)
        inner = mutated_bytes(inner, rng)
        if inner.startswith(b"{"):
            with suppress(ValueError, RecursionError):
                inner = json_text(mutated_tree(json.loads(inner), rng)).encode("utf-8", "replace")
        return packed(inner, rng) if inflate is gzip.decompress else zlib.compress(inner)
    if isinstance(old, str) and kind < 4:
        try:
            return json_text(mutated_tree(json.loads(old), rng)).encode("utf-8", "replace").decode()
        except (ValueError, RecursionError):
            return mutated_lines(old, rng)
    value = hostile(rng)
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, (list, dict, bool)) or (isinstance(value, int) and abs(value) >= 2**63):
        return json.dumps(value)
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
