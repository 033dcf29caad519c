"""Graph files: what is written reads back; every broken file gives one line and exit code 2."""

import copy
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import graph_rows, graphs, tiny_data, tiny_graph
from command_line import refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated import Step, steps

from placewise.core.errors import GraphError
from placewise.core.graph import Graph, Shape
from placewise.formats.graph_file import OP_FIELDS, TENSOR_FIELDS, format_graph, parse_graph, read_graph, write_graph

# --- what is written reads back ---


@given(graph=graphs(), name=st.sampled_from(["graph.json", "graph.json.gz"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_reads_back(tmp_path: Path, graph: Graph, name: str) -> None:
    path = tmp_path / name
    write_graph(graph, path)
    again = read_graph(path)
    assert again.digest == graph.digest
    assert format_graph(again) == format_graph(graph)
    assert os.listdir(tmp_path) == [name]
    path.unlink()


@given(graph_rows())
def test_the_text_says_what_the_data_said(data: dict[str, Any]) -> None:
    """Reading drops only fields without content: amounts of 0 and empty dicts."""
    written = json.loads(format_graph(parse_graph(data)))
    for row in data["ops"]:
        for field in ("flops", "nbytes_moved", "seconds"):
            if not row.get(field):
                row.pop(field, None)
        if row.get("compute") == "float32":
            del row["compute"]
    assert written == data


def test_the_tiny_file_is_as_people_would_write_it() -> None:
    assert json.loads(format_graph(tiny_graph())) == tiny_data()
    assert len(format_graph(tiny_graph()).splitlines()) == 1 + 1 + 6 + 1 + 4 + 1  # a line for each tensor and op


def test_the_docs_show_every_field_and_their_example_can_be_read() -> None:
    section = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text().partition("## The graph's file\n")[2]
    for name in (*TENSOR_FIELDS, *OP_FIELDS):
        assert f"`{name}`" in section
    graph = parse_graph(json.loads("".join(line for line in section.splitlines() if line.startswith("    "))))
    assert str(graph.tensors.shape_of(1)) == "float32 [64, 4]"


def test_shapes_are_optional_and_stand_once() -> None:
    """Tensors 0 and 3 are 4 x 8 floats, 2 is a single whole number; nothing is said of the others."""
    data, known = tiny_data(), {"shape": [4, 8], "dtype": "float32"}
    data["tensors"][0] |= known
    data["tensors"][2] |= {"shape": [], "dtype": "int64"}
    data["tensors"][3] |= known
    graph = parse_graph(data)
    assert graph.tensors.shapes == (Shape("float32", (4, 8)), Shape("int64", ()))
    assert graph.tensors.shape.tolist() == [0, -1, 1, 0, -1, -1]
    assert json.loads(format_graph(graph)) == data
    assert '"shape": [4, 8], "dtype": "float32"}' in format_graph(graph).splitlines()[2]


def test_the_same_graph_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("graph.json", "graph.json.gz"):
        contents = []
        for copy_number in range(2):
            path = tmp_path / f"{copy_number}{name}"
            write_graph(tiny_graph(), path)
            contents.append(path.read_bytes())
        assert contents[0] == contents[1]
    assert gzip.decompress(contents[0]).decode() == format_graph(tiny_graph())


def test_the_content_says_whether_a_file_is_gzipped(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_bytes(gzip.compress(format_graph(tiny_graph()).encode()))
    assert read_graph(path).digest == tiny_graph().digest


# --- broken files ---

WRONG_VALUES: dict[str, Any] = {
    "text": "7",
    "float": 0.5,
    "bool": True,
    "null": None,
    "list": [[]],
    "dict": {"a": 1},
    "negative": -1,
    "huge": 10**30,
    "endless": 10**400,
}
AN_INTEGER = tuple(WRONG_VALUES)
A_NUMBER = ("text", "bool", "null", "list", "dict", "negative", "endless")
A_TEXT = ("float", "bool", "null", "list", "dict", "negative")
A_LIST = ("text", "float", "bool", "null", "list", "dict")  # "list": the wrong entries
FIELDS: dict[str, tuple[str, ...]] = {  # where, and which values are wrong there
    "name": A_TEXT,
    "tensors": ("text", "float", "bool", "null", "list", "dict"),
    "ops": ("text", "float", "bool", "null", "list", "dict"),
    "outputs": A_LIST,
    "tensors.0.name": A_TEXT,
    "tensors.0.nbytes": AN_INTEGER,
    "tensors.0.kind": ("text", *A_TEXT),
    "tensors.1.home": AN_INTEGER,
    "tensors.5.alias_of": AN_INTEGER,
    "tensors.0.shape": A_LIST,
    "tensors.0.shape.1": AN_INTEGER,
    "tensors.0.dtype": A_TEXT,
    "ops.0.name": A_TEXT,
    "ops.0.kind": A_TEXT,
    "ops.0.phase": ("text", *A_TEXT),
    "ops.0.group": AN_INTEGER,
    "ops.0.reads": A_LIST,
    "ops.0.writes": A_LIST,
    "ops.0.after": A_LIST,
    "ops.0.reads.0": AN_INTEGER,
    "ops.3.after.0": AN_INTEGER,
    "ops.0.flops": A_NUMBER,
    "ops.0.nbytes_moved": A_NUMBER,
    "ops.0.compute": ("text", *A_TEXT),
    "ops.0.devices": A_LIST,
    "ops.0.micro_batch": AN_INTEGER,
    "ops.0.seconds": ("text", "float", "bool", "null", "list"),
    "ops.0.seconds.gpu": A_NUMBER,
}
NEEDED = ("format", "version", "tensors", "ops")
NEEDED_OF_TENSOR = ("name", "nbytes", "kind")
NEEDED_OF_OP = ("name", "kind", "phase", "group", "reads", "writes")


def at(data: Any, path: str) -> tuple[Any, Any]:
    """Returns the dict or list that contains a field, and the field's key in it."""
    *parents, last = path.split(".")
    for key in parents:
        data = data[int(key)] if isinstance(data, list) else data[key]
    return data, int(last) if isinstance(data, list) else last


def changed(path: str, value: Any) -> str:
    data = copy.deepcopy(tiny_data())
    if path.startswith(("tensors.0.shape", "tensors.0.dtype")):
        data["tensors"][0] |= {"shape": [4, 8], "dtype": "float32"}
    holder, key = at(data, path)
    holder[key] = value
    return json.dumps(data)


def without(path: str) -> str:
    data = tiny_data()
    holder, key = at(data, path)
    del holder[key]
    return json.dumps(data)


def element(path: str) -> str:
    """Returns how an error names the element of a path: 'ops.0.reads.0' is in ops[0]."""
    parts = path.split(".")
    return f"{parts[0]}[{parts[1]}]" if len(parts) > 1 else ""


def field(path: str) -> str:
    """Returns how an error names the field of a path."""
    parts = path.split(".")[2:] or path.split(".")
    return parts[0]


Content = str | bytes | None
Broken = dict[str, tuple[Content, tuple[str, ...]]]


def wrong_fields() -> Broken:
    cases: Broken = {}
    for path, values in FIELDS.items():
        for value in values:
            fragments = (element(path), field(path).removesuffix("s"))
            cases[f"{path} {value}"] = (changed(path, WRONG_VALUES[value]), fragments)
    needed = [*NEEDED, *(f"tensors.2.{name}" for name in NEEDED_OF_TENSOR), *(f"ops.1.{name}" for name in NEEDED_OF_OP)]
    for path in needed:
        cases[f"no {path}"] = (without(path), (element(path), f"needs the field {field(path)!r}"))
    return cases


def text(old: str, new: str) -> str:
    """Returns the file with a piece of its text replaced."""
    written = json.dumps(tiny_data())
    assert old in written
    return written.replace(old, new, 1)


WHOLE = json.dumps(tiny_data()).encode()
PACKED = gzip.compress(WHOLE, mtime=0)
NO_JSON = ("is not JSON",)
NO_GRAPH = ("must be a placewise graph",)
NO_GZIP = ("is not a complete gzip file",)
SPECIAL: Broken = {
    "NaN": (text('"nbytes": 1000', '"nbytes": NaN'), ("NaN is not a JSON number",)),
    "NaN flops": (text('"phase": "forward"', '"phase": "forward", "flops": NaN'), ("NaN is not a JSON number",)),
    "Infinity": (text("0.001", "Infinity"), ("Infinity is not a JSON number",)),
    "-Infinity": (text("0.001", "-Infinity"), ("-Infinity is not a JSON number",)),
    "infinite by exponent": (text("0.001", "1e999"), ("ops[0] 'relu'", "gpu must be a finite number")),
    "too many digits": (text("1000", "9" * 5000), NO_JSON),
    "empty": ("", NO_GRAPH),
    "white": (" \n\t", NO_GRAPH),
    "null": ("null", NO_GRAPH),
    "number": ("7", NO_GRAPH),
    "text": ('"placewise-graph"', NO_GRAPH),
    "list": ("[]", NO_GRAPH),
    "list of graphs": (f"[{json.dumps(tiny_data())}]", NO_GRAPH),
    "other dict": ("{}", NO_GRAPH),
    "cut": (WHOLE[:-1], NO_JSON),
    "cut in half": (WHOLE[: len(WHOLE) // 2], NO_JSON),
    "two": (WHOLE + WHOLE, NO_JSON),
    "single quotes": (WHOLE.replace(b'"', b"'"), NO_JSON),
    "comma at the end": (text("}]", "},]"), NO_JSON),
    "no key": ("{7: 8}", NO_JSON),
    "not UTF-8": (WHOLE.replace(b"relu", b"rel\xff"), NO_JSON),
    "UTF-16": (json.dumps(tiny_data()).encode("utf-16"), NO_GRAPH),
    "zeros": (bytes(1000), NO_GRAPH),
    "open brackets": ("[" * 100_000, NO_JSON),
    "deep lists": (text("[0]", "[" * 100_000 + "]" * 100_000), NO_JSON),
    "deep dicts": ('{"format":' * 50_000 + "1" + "}" * 50_000, NO_JSON),
    "deep but read": (text('"tiny"', "[" * 900 + "]" * 900), ("name must be text, got a list",)),
    "gzip cut": (PACKED[:-9], NO_GZIP),
    "gzip without its end": (PACKED[:-4], NO_GZIP),
    "gzip head": (PACKED[:2], NO_GZIP),
    "gzip of ten bytes": (PACKED[:10], NO_GZIP),
    "gzip garbage": (PACKED[:10] + b"\xff" * 50, NO_GZIP),
    "gzip wrong sum": (PACKED[:-8] + bytes(8), NO_GZIP),
    "gzip and more": (PACKED + b"more", NO_GZIP),
    "gzip of nothing": (gzip.compress(b""), NO_GRAPH),
    "gzip twice": (gzip.compress(PACKED), NO_GRAPH),
    "missing": (None, ("is neither a file, nor",)),
    "format": (changed("format", "placewise-plan"), ("format must be 'placewise-graph', got 'placewise-plan'",)),
    "format null": (changed("format", None), ("format must be", "null")),
    "format dict": (changed("format", {}), ("format must be", "a dict")),
    "version 2": (changed("version", 2), ("version must be 1, got 2",)),
    "version 0": (changed("version", 0), ("version must be 1, got 0",)),
    "version text": (changed("version", "1"), ("version must be 1, got '1'",)),
    "version true": (changed("version", True), ("version must be 1, got true",)),
    "version null": (changed("version", None), ("version must be 1, got null",)),
    "version huge": (changed("version", 10**400), ("version must be 1, got a whole number of",)),
    "unknown field": (changed("author", "me"), ("unknown field 'author'; the fields are format",)),
    "unknown field of a tensor": (changed("tensors.3.colour", []), ("tensors[3]", "unknown field 'colour'")),
    "unknown field of an op": (changed("ops.2.colour", 1), ("ops[2]", "unknown field 'colour'")),
    "unknown field with a line break": (changed("ops.2.a\nb", 1), ("ops[2]", "unknown field 'a\\nb'")),
    "shape without a type": (changed("tensors.3.shape", [2]), ("tensors[3]", "needs the field 'dtype'")),
    "type without a shape": (changed("tensors.3.dtype", "int8"), ("tensors[3]", "needs the field 'shape'")),
    "tensor is a number": (changed("tensors.2", 7), ("tensors[2]", "must be a dict, got 7")),
    "op is null": (changed("ops.2", None), ("ops[2]", "must be a dict, got null")),
    "unknown kind": (changed("tensors.0.kind", "weights"), ("tensors[0]", "kind must be one of input", "'weights'")),
    "unknown phase": (changed("ops.0.phase", "sideways"), ("ops[0] 'relu'", "phase must be one of forward", "'sideways'")),
    "unknown type": (
        changed("ops.0.compute", "bf16"),
        ("ops[0] 'relu'", "compute must be one of float32, tf32, bfloat16, ", "got 'bf16'"),
    ),
    "no device": (changed("ops.0.devices", []), ("ops[0] 'relu'", "devices must be a list of at least one")),
    "device is a number": (changed("ops.0.devices", ["gpu", 7]), ("ops[0] 'relu'", "devices must be a list")),
    "read before write": (changed("ops.0.reads", [4]), ("ops[0] 'relu'", "reads tensor 4 'g' before op 2 has written it")),
    "circle of ops": (changed("ops.0.reads", [5]), ("ops[0] 'relu'", 'reads tensor 5 "w\'" before op 3')),
    "reads what it writes": (changed("ops.1.reads", [3]), ("ops[1] 'mm'", "reads tensor 3 'y' before op 1")),
    "written twice": (changed("ops.2.writes", [3, 4]), ("tensors[3] 'y'", "is written by ops 1 and 2")),
    "written twice by one": (changed("ops.2.writes", [4, 4]), ("tensors[4] 'g'", "is written by ops 2 and 2")),
    "reads no tensor": (changed("ops.0.reads", [6]), ("ops[0] 'relu'", "reads names tensor 6, there are only 6")),
    "writes no tensor": (changed("ops.2.writes", [10**12]), ("ops[2]", "writes names tensor 1000000000000")),
    "output of no tensor": (changed("outputs", [3, 6]), ("outputs[1]", "names tensor 6, there are only 6")),
    "after itself": (changed("ops.3.after", [3]), ("ops[3] 'w.update'", "after names op 3, which does not come before")),
    "after a later op": (changed("ops.0.after", [1]), ("ops[0] 'relu'", "after names op 1, which does not come before")),
    "after no op": (changed("ops.3.after", [4]), ("ops[3] 'w.update'", "after names op 4, there are only 4")),
    "alias of itself": (changed("tensors.2.alias_of", 2), ("tensors[2] 'h'", "alias_of must not lead back to itself")),
    "alias of no tensor": (changed("tensors.2.alias_of", 6), ("tensors[2] 'h'", "alias_of names tensor 6")),
    "alias in a circle": (changed("tensors.1.alias_of", 5), ("tensors[1] 'w'", "alias_of must not lead back to itself")),
    "alias of a later one": (
        changed("tensors.2.alias_of", 4),
        ("tensors[2] 'h'", "memory of tensor 4, which is written later"),
    ),
    "alias in two groups": (changed("tensors.4.alias_of", 2), ("ops[2]", "in place and must be in group 0, its group is 2")),
    "update elsewhere": (changed("ops.3.group", 2), ("ops[3] 'w.update'", "must be in group 1, its group is 2")),
    "update without a home": (without("tensors.1.home"), ("ops[3] 'w.update'", "'w' to have home = 1")),
    "home of a product": (changed("tensors.3.home", 1), ("tensors[3] 'y'", "has a home, but op 1 writes it")),
    "group far too high": (changed("ops.0.group", 10**12), ("ops[0] 'relu'", "group must be", "1000000000000")),
    "group a little too high": (changed("ops.0.group", 10), ("ops[0] 'relu'", "group must be at least 0 and below 10")),
    "home far too high": (changed("tensors.0.home", 10**12), ("tensors[0] 'x'", "home must be a group")),
    "too many bytes": (changed("tensors.0.nbytes", 2**63 - 1), ("tensors[0] 'x'", "at most 2**62")),
    "too many bytes together": (changed("tensors.0.nbytes", 2**62), ("tensors", "must have at most 2**62 bytes together")),
    "too much work": (changed("ops.0.flops", 10**300), ("ops[0] 'relu'", "flops must be finite")),
    "negative time": (changed("ops.0.seconds", {"gpu": -1e-9}), ("ops[0] 'relu': seconds", "gpu must be", "-1e-09")),
    "time of a line break": (changed("ops.0.seconds", {"a\nb": -1}), ("ops[0] 'relu': seconds", "must be a finite number")),
    "name of line breaks": (text('"relu"', '"a\\nb\\u2028c", "x": 1'), ("ops[0]", "unknown field 'x'")),
    "broken op of line breaks": (changed("ops.0", {"name": "a\nb"}), ("ops[0] 'a\\nb'", "needs the field 'kind'")),
}
BROKEN = wrong_fields() | SPECIAL


def test_there_are_enough_of_them() -> None:
    assert len(BROKEN) > 200


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    content, fragments = BROKEN[case]
    path = tmp_path / "graph.json"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    before = os.listdir(tmp_path)
    line = refused(["info", str(path)], capsys)
    assert line.startswith(f"placewise: {path}: ")
    rest = line.removeprefix(f"placewise: {path}: ")
    for fragment in fragments:
        assert fragment in rest
    assert len(line) < 1000
    assert os.listdir(tmp_path) == before


@pytest.mark.parametrize("case", ["ops.0.reads.0 endless", "deep lists", "gzip cut", "circle of ops", "not UTF-8"])
def test_capture_writes_nothing_for_a_broken_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    content = BROKEN[case][0]
    assert content is not None
    (tmp_path / "graph.json").write_bytes(content.encode() if isinstance(content, str) else content)
    refused(["capture", str(tmp_path / "graph.json"), "-o", str(tmp_path / "out.json.gz")], capsys)
    assert os.listdir(tmp_path) == ["graph.json"]


@pytest.mark.parametrize("case", ["deep lists", "deep but read", "too many digits"])
def test_broken_files_in_a_process_of_their_own(tmp_path: Path, case: str) -> None:
    content, fragments = BROKEN[case]
    assert isinstance(content, str)
    path = tmp_path / "graph.json"
    path.write_text(content)
    result = subprocess.run(
        [sys.executable, "-m", "placewise", "info", str(path)], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert fragments[0] in result.stderr


def test_a_folder_is_no_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{tmp_path}: can't be read: Is a directory" in refused(["info", str(tmp_path)], capsys)
    with pytest.raises(GraphError, match="can't be read: Is a directory"):
        read_graph(tmp_path)
    with pytest.raises(GraphError, match="there is no such file"):
        read_graph(tmp_path / "none.json")


@given(data=st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_change_of_any_byte_is_read_or_refused_in_one_line(tmp_path: Path, data: st.DataObject) -> None:
    """The file with one to three of its bytes replaced, removed or inserted."""
    content = bytearray(data.draw(st.sampled_from([WHOLE, PACKED])))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    path = tmp_path / "graph.json"
    path.write_bytes(content)
    message = ""
    try:
        read_graph(path)
    except GraphError as problem:
        message = str(problem)
    assert message == "" or message.startswith(f"{path}: ")
    assert len(message.splitlines()) <= 1


@settings(max_examples=100)
@given(steps(options=True))
def test_optional_ops_survive_the_file(drawn: tuple[Step, np.random.Generator]) -> None:
    graph = drawn[0].problem.graph
    again = parse_graph(json.loads(format_graph(graph)))
    assert again.digest == graph.digest
    assert again.ops.optional.tolist() == graph.ops.optional.tolist()
    assert again.tensors.stands_for.tolist() == graph.tensors.stands_for.tolist()
