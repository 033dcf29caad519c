"""Clusters and their files: what is written reads back; every broken file is one line and exit code 2."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import mixed_cluster, tiny_cluster_data, tiny_data
from command_line import refused
from hypothesis import given
from hypothesis import strategies as st

from placewise.core.cluster import Cluster, CopyWork, Device, Link
from placewise.core.errors import ClusterError
from placewise.core.graph import COMPUTE_TYPES
from placewise.core.quantities import BYTE_UNITS
from placewise.formats.cluster_file import format_cluster, parse_cluster, read_cluster, write_cluster

# --- what is written reads back ---

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)
POSITIVE = st.floats(0, 1e18, exclude_min=True)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Draws a cluster of up to four devices, with shared channels, and with several links for a pair."""
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    memory, overhead = st.integers(0, 2**62), st.floats(0, 10)
    types = st.dictionaries(st.sampled_from(COMPUTE_TYPES[1:]), POSITIVE).map(lambda table: tuple(table.items()))
    devices = tuple(
        Device(
            name,
            draw(NAMES),
            draw(memory),
            draw(POSITIVE),
            draw(POSITIVE),
            draw(overhead),
            draw(types),
            draw(st.sampled_from(["", "a", "b"])),
        )
        for name in names
    )
    channels: st.SearchStrategy[Any] = st.none() | st.sampled_from(["", "bus", "a->b", ("a card", "b card"), ("bus",)])
    works = st.builds(CopyWork, st.floats(0, 10), st.floats(1e-9, 1e18) | st.just(np.inf))
    links = [
        Link(
            a,
            b,
            draw(POSITIVE),
            draw(st.floats(0, 10)),
            draw(channels),
            draw(st.booleans()),
            draw(works),
            draw(works),
            draw(st.floats(0, 9)),
        )
        for a in names
        for b in names
        if a != b
    ]
    more = draw(st.lists(st.sampled_from(links), max_size=2)) if links else []
    return Cluster(draw(NAMES), devices, (*links, *more), draw(st.floats(0, 1)), draw(st.just("") | NAMES))


@given(clusters())
def test_what_is_written_reads_back(cluster: Cluster) -> None:
    again = parse_cluster(tomllib.loads(format_cluster(cluster)))
    assert (again.name, again.description, again.devices, again.links) == (
        *(cluster.name, cluster.description),
        *(cluster.devices, cluster.links),
    )
    assert again.digest == cluster.digest


def test_numpy_scalars_are_written_as_plain_numbers() -> None:
    """A measured cluster has them; their repr, np.float64(1.5), is not TOML."""

    def measured(integer: Any, single: Any, double: Any) -> Cluster:
        numbers = (integer(2**30), single(2.5), double(1e11), double(1e-6), (("tf32", single(5.5)),))
        devices = (Device(name, "gpu", *numbers) for name in ("a", "b"))
        links = (Link("a", "b", double(1e9), single(0.5), "bus"), Link("b", "a", double(1e9), double(1e-5)))
        return Cluster("measured", tuple(devices), links, double(1e-6))

    assert format_cluster(measured(np.int64, np.float32, np.float64)) == format_cluster(measured(int, float, float))


def test_a_file_reads_back(tmp_path: Path) -> None:
    write_cluster(mixed_cluster(), tmp_path / "cluster.toml")
    assert read_cluster(tmp_path / "cluster.toml").digest == mixed_cluster().digest
    assert Cluster.load(str(tmp_path / "cluster.toml")).digest == mixed_cluster().digest
    assert Cluster.load("2xK80").name == "2xK80"


def test_flops_are_a_number_or_a_table_on_one_line() -> None:
    data = tiny_cluster_data()
    data["devices"][0]["flops"] = {"bfloat16": 7.5e14, "float32": 5e13, "tf32": 4e14}
    written = format_cluster(parse_cluster(data))
    assert re.findall("flops = .+", written) == [
        "flops = {float32 = 5e+13, tf32 = 4e+14, bfloat16 = 7.5e+14}",
        "flops = 1000000000000.0",
    ]
    assert parse_cluster(tomllib.loads(written)).devices == parse_cluster(data).devices


def with_memory(memory: Any) -> Cluster:
    """Returns the tiny cluster with another memory in its first device."""
    data = tiny_cluster_data()
    data["devices"][0]["memory"] = memory
    return parse_cluster(data)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [(4096, 4096), ("4096", 4096), ("1.5GiB", 3 * 2**29), ("2kB", 2000), ("1 MB", 10**6), ("0TiB", 0), (0, 0)],
)
def test_memory_is_bytes_or_text_with_a_unit(memory: Any, expected: int) -> None:
    assert with_memory(memory).devices[0].memory_bytes == expected


@pytest.mark.parametrize("unit", BYTE_UNITS)
def test_every_unit_counts(unit: str) -> None:
    cluster = with_memory(f"3{unit}")
    assert cluster.devices[0].memory_bytes == 3 * BYTE_UNITS[unit]


# --- broken files ---

GOOD = """\
format = "placewise-cluster"
version = 1
name = "tiny"
description = "two GPUs"
dispatch_seconds = 1e-6

[[devices]]
name = "gpu:0"
kind = "gpu"
memory = "1MiB"
flops = 1e12
bytes_per_second = 1e11
overhead_seconds = 1e-6

[[devices]]
name = "gpu:1"
kind = "gpu"
memory = 4096
flops = 1e12
bytes_per_second = 1e11

[[links]]
from = "gpu:0"
to = "gpu:1"
bytes_per_second = 1e6
latency_seconds = 1e-3
both = true
channel = "bus"
delay_seconds = 1e-4
source_work = {seconds = 1e-5, bytes_per_second = 1e9}
"""
DEFAULT_LINK = "\n[default_link]\nbytes_per_second = 1e6\nlatency_seconds = 1e-3\n"
WRONG_TEXT = ("7", "0.5", "true", "[]", "{}", "1979-05-27")
WRONG_NUMBER = ('"7"', "true", "[]", "{}", "-1", "nan", "inf", "-inf", "1e400", "1" + "0" * 400, "07:32:00")
HUGE = "0x" + "f" * 20_000  # Python refuses to write it out in decimals
LINES: dict[str, tuple[str, tuple[str, ...]]] = {  # a line of the file: its element, and values that are wrong there
    'name = "tiny"': ("name", WRONG_TEXT),
    'description = "two GPUs"': ("description", WRONG_TEXT),
    "dispatch_seconds = 1e-6": ("dispatch_seconds", (*WRONG_NUMBER, HUGE)),
    'name = "gpu:0"': ("devices[0]", WRONG_TEXT),
    'kind = "gpu"': ("devices[0] 'gpu:0'", WRONG_TEXT),
    'memory = "1MiB"': ("devices[0] 'gpu:0'", ("0.5", "true", "[]", "{}", "-1", "nan", "inf", HUGE, "1" + "0" * 30)),
    "flops = 1e12": ("devices[0] 'gpu:0'", (*WRONG_NUMBER, "0", "0.0", "-0.0", HUGE)),
    "bytes_per_second = 1e11": ("devices[0] 'gpu:0'", (*WRONG_NUMBER, "0")),
    "overhead_seconds = 1e-6": ("devices[0] 'gpu:0'", WRONG_NUMBER),
    'from = "gpu:0"': ("links[0]", WRONG_TEXT),
    'to = "gpu:1"': ("links[0]", WRONG_TEXT),
    "bytes_per_second = 1e6": ("links[0]", (*WRONG_NUMBER, "0")),
    "latency_seconds = 1e-3": ("links[0]", WRONG_NUMBER),
    "both = true": ("links[0]", ('"yes"', "1", "0", "[]", "{}")),
    'channel = "bus"': ("links[0]", WRONG_TEXT),
    "delay_seconds = 1e-4": ("links[0]", WRONG_NUMBER),
    "source_work = {seconds = 1e-5, bytes_per_second = 1e9}": ("links[0]", ()),
}
MEMORIES = (
    *("12 parsecs", "GiB", "1.5", "nanGiB", "infGiB", "-infTB", "1e400GiB", "12 gib", "12GiB ", "1,5GiB", ""),
    *("12GiBGiB", "0x10", "twelve", "9" * 5000, "--1GiB", "½GiB"),
)
Broken = dict[str, tuple[str | bytes, tuple[str, ...]]]


def line(old: str, new: str) -> str:
    """Returns the file with the first such line replaced."""
    assert f"\n{old}\n" in GOOD
    return GOOD.replace(f"\n{old}\n", f"\n{new}\n", 1)


MAY_BE_LEFT_OUT = ("overhead_seconds", "both", "channel", "delay_seconds", "source_work")


def wrong_fields() -> Broken:
    cases: Broken = {}
    for whole, (element, values) in LINES.items():
        field = whole.partition(" =")[0]
        for value in values:
            cases[f"{whole} -> {value[:12]}"] = (line(whole, f"{field} = {value}"), (element, f"{field} must be"))
    for whole, (element, _) in LINES.items():
        field = whole.partition(" =")[0]
        if element.startswith(("devices", "links")) and field not in MAY_BE_LEFT_OUT:
            cases[f"no {whole}"] = (line(whole, ""), (element, f"needs the field {field!r}"))
    for memory in MEMORIES:
        fragments = ("devices[0] 'gpu:0'", "memory must be bytes or text like '12GiB'")
        cases[f"memory {memory[:12]!r}"] = (line('memory = "1MiB"', f'memory = "{memory}"'), fragments)
    return cases


NO_TOML, GPU_0 = ("is not TOML",), "devices[0] 'gpu:0'"
WORK = "source_work = {seconds = 1e-5, bytes_per_second = 1e9}"
SPECIAL: Broken = {
    "work is a number": (line(WORK, "source_work = 1e-5"), ("links[0]: source_work", "must be a dict, got 1e-05")),
    "negative work": (
        line(WORK, "source_work = {seconds = -1}"),
        ("links[0]: source_work", "seconds must be"),
    ),
    "endless work": (
        line(WORK, "source_work = {bytes_per_second = 1e-310}"),
        ("source_work", "bytes_per_second must be above"),
    ),
    "work of nothing": (line(WORK, "target_work = {byte = 1}"), ("links[0]: target_work", "unknown field 'byte'")),
    "negative memory": (line('memory = "1MiB"', 'memory = "-1GiB"'), ("device 'gpu:0'", "memory must be at least 0")),
    "negative bytes": (line('memory = "1MiB"', 'memory = "-4096"'), ("device 'gpu:0'", "memory must be at least 0")),
    "too much memory": (line('memory = "1MiB"', 'memory = "1e30GiB"'), ("device 'gpu:0'", "at most 2**62 bytes")),
    "memory of 63 bits": (line("memory = 4096", f"memory = {2**63 - 1}"), ("device 'gpu:1'", "at most 2**62 bytes")),
    "empty": ("", ("needs the field 'devices'",)),
    "no devices": ("devices = []", ("devices", "a cluster needs at least one device")),
    "devices is a dict": ("[devices]\nname = 'gpu:0'", ("devices must be a list, got a dict",)),
    "devices are names": ("devices = ['gpu:0']", ("devices[0]", "must be a dict, got 'gpu:0'")),
    "links is a dict": (GOOD.replace("[[links]]", "[links]"), ("links must be a list, got a dict",)),
    "links are names": ("links = [7]\n" + GOOD[: GOOD.index("[[links]]")], ("links[0]", "must be a dict")),
    "default_link is a list": (
        GOOD + DEFAULT_LINK.replace("[default_link]", "[[default_link]]"),
        ("default_link", "a list"),
    ),
    "default_link is a number": ("default_link = 7\n" + GOOD, ("default_link", "must be a dict, got 7")),
    "default_link without latency": (GOOD + DEFAULT_LINK.replace("lat", "#"), ("default_link", "needs the field 'latency")),
    "default_link of no bandwidth": (GOOD + DEFAULT_LINK.replace("1e6", "0"), ("default_link", "bytes_per_second must be")),
    "default_link of a device": (GOOD + DEFAULT_LINK + "from = 'gpu:0'\n", ("default_link", "unknown field 'from'")),
    "default_link both": (GOOD + DEFAULT_LINK + "both = true\n", ("default_link", "unknown field 'both'")),
    "unknown field": ("cores = 7\n" + GOOD, ("unknown field 'cores'; the fields are format",)),
    "unknown field of a device": (line('kind = "gpu"', 'kind = "gpu"\ncores = 7'), ("devices[0]", "unknown field 'cores'")),
    "unknown field of a link": (GOOD + "gbps = 7\n", ("links[0]", "unknown field 'gbps'")),
    "unknown table": (GOOD + "[network]\n", ("unknown field 'network'",)),
    "format": (GOOD.replace("placewise-cluster", "placewise-graph"), ("format must be 'placewise-cluster'",)),
    "format number": (GOOD.replace('"placewise-cluster"', "1"), ("format must be 'placewise-cluster', got 1",)),
    "version": (line("version = 1", "version = 2"), ("version must be 1, got 2",)),
    "version text": (line("version = 1", "version = '1'"), ("version must be 1, got '1'",)),
    "version true": (line("version = 1", "version = true"), ("version must be 1, got true",)),
    "version huge": (line("version = 1", f"version = {HUGE}"), ("version must be 1, got a whole number of 80000 bits",)),
    "flops without float32": (line("flops = 1e12", "flops = {tf32 = 1e12}"), (GPU_0, "a table that has float32")),
    "flops of no type": (line("flops = 1e12", "flops = {float32 = 1, bf16 = 2}"), (GPU_0, "unknown type 'bf16'; the types")),
    "flops of zero": (
        line("flops = 1e12", "flops = {float32 = 1, tf32 = 0}"),
        (GPU_0, "flops: tf32 must be a finite number"),
    ),
    "flops of text": (line("flops = 1e12", "flops = {float32 = '1'}"), (GPU_0, "flops: float32 must be a finite number")),
    "flops in a table of its own": (line("flops = 1e12", "[flops]\nfloat32 = 1"), ("unknown field 'flops'",)),
    "two of a name": (GOOD.replace("gpu:1", "gpu:0"), ("device 'gpu:0'", "no two devices may have the same one")),
    "no name": (line('name = "gpu:0"', 'name = ""'), ("device ''", "name must not be empty")),
    "no kind": (line('kind = "gpu"', 'kind = ""'), ("device 'gpu:0'", "kind must not be empty")),
    "no links": (GOOD[: GOOD.index("[[links]]")], ("links", "no link from 'gpu:0' to 'gpu:1'", "no default_link")),
    "no link back": (line("both = true", "both = false"), ("links", "no link from 'gpu:1' to 'gpu:0'")),
    "link to itself": (line('to = "gpu:1"', 'to = "gpu:0"'), ("link 'gpu:0' -> 'gpu:0'", "must be different devices")),
    "link to nowhere": (line('to = "gpu:1"', 'to = "gpu:7"'), ("link 'gpu:0' -> 'gpu:7'", "no device 'gpu:7'; the devices")),
    "link from nowhere": (line('from = "gpu:0"', 'from = "cpu"'), ("link 'cpu' -> 'gpu:1'", "no device 'cpu'")),
    "names of line breaks": (
        line('name = "gpu:0"', r'name = "a\nb\u2028c"'),
        ("link 'gpu:0' -> 'gpu:1'", r"the devices are a\nb\u2028c, gpu:1"),
    ),
    "not UTF-8": (GOOD.encode().replace(b"tiny", b"tin\xff"), NO_TOML),
    "UTF-16": (GOOD.encode("utf-16"), NO_TOML),
    "zeros": (bytes(100), NO_TOML),
    "JSON": (json.dumps(tiny_cluster_data()), NO_TOML),
    "cut": (GOOD[:-6], NO_TOML),
    "field twice": (line("version = 1", "version = 1\nversion = 1"), NO_TOML),
    "no quotes": (line('name = "tiny"', "name = tiny"), NO_TOML),
    "open quotes": (line('name = "tiny"', 'name = "tiny'), NO_TOML),
    "too many digits": (line("flops = 1e12", "flops = " + "9" * 5000), NO_TOML),
    "surrogate": (line('name = "tiny"', r'name = "\ud800"'), NO_TOML),
    "deep": ("devices = " + "[" * 50_000, NO_TOML),
    "gzip cut": (b"\x1f\x8b\x08\x00", ("is not a complete gzip file",)),
}
BROKEN = wrong_fields() | SPECIAL


@pytest.fixture(scope="session")
def graph_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("good") / "graph.json"
    path.write_text(json.dumps(tiny_data()))
    return str(path)


def test_there_are_enough_of_them_and_the_file_that_they_break_is_good() -> None:
    assert len(BROKEN) > 150
    assert parse_cluster(tomllib.loads(GOOD)).num_devices == 2
    assert parse_cluster(tomllib.loads(GOOD + DEFAULT_LINK)).channel_names == ("bus",)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_one_line_and_code_2(
    tmp_path: Path, graph_file: str, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    content, fragments = BROKEN[case]
    path = tmp_path / "cluster.toml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    message = refused(["info", graph_file, "--cluster", str(path)], capsys)
    assert message.startswith(f"placewise: {path}: ")
    for fragment in fragments:
        assert fragment in message.removeprefix(f"placewise: {path}: ")
    assert len(message) < 1000
    assert os.listdir(tmp_path) == ["cluster.toml"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("9xK81", "9xK81: is neither a file nor a preset: did you mean '8xK80'?"),
        ("no/such/cluster.toml", "no/such/cluster.toml: is neither a file nor a preset"),
        ("c" * 5000, "is neither a file nor a preset"),
        ("", "cluster: must not be empty"),
        (os.path.dirname(__file__), "formats: can't be read: Is a directory"),
    ],
    ids=["unknown", "missing", "too long", "empty", "folder"],
)
def test_what_is_no_cluster_is_refused(graph_file: str, capsys: pytest.CaptureFixture[str], name: str, message: str) -> None:
    assert message in refused(["info", graph_file, "--cluster", name], capsys)


def test_broken_files_in_a_process_of_their_own(tmp_path: Path, graph_file: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(line("flops = 1e12", f"flops = {HUGE}"))
    command = [sys.executable, "-m", "placewise", "info", graph_file, "--cluster", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"placewise: {path}: devices[0] 'gpu:0': flops must be a finite number above 0, got a whole number of 80000 bits\n"
    )


def test_a_device_too_slow_to_ever_end_is_refused(
    tmp_path: Path, graph_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """1e290 flops on a device of 1e-290 flops a second would be 1e580 seconds, which no float holds."""
    data = tiny_data()
    data["ops"][1] |= {"seconds": {}, "flops": 1e290}
    (tmp_path / "graph.json").write_text(json.dumps(data))
    (tmp_path / "cluster.toml").write_text(line("flops = 1e12", "flops = 1e-290"))
    command = ["info", str(tmp_path / "graph.json"), "--cluster", str(tmp_path / "cluster.toml"), "--json"]
    assert "ops[1] 'mm' would never finish on 'gpu:0'" in refused(command, capsys)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a." * 100_000 + "a = 1", "is not TOML: a key has more than 64 parts"),
        ("[a" + ".a" * 80 + "]", "is not TOML: a key has more than 64 parts"),
        ("a = " + "[" * 100_000, "is not TOML"),
        ("x = 1\n" * 800_000, "it has 4,800,000 characters, 4,194,304 are read"),
    ],
    ids=["dots", "table", "brackets", "long"],
)
def test_what_a_parser_would_take_minutes_for_is_refused(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "cluster.toml").write_text(text)
    with pytest.raises(ClusterError, match=rule):
        read_cluster(tmp_path / "cluster.toml")


def test_too_many_devices_are_refused_before_their_links_are_made() -> None:
    device = {"name": "d", "kind": "gpu", "memory": 1, "flops": 1, "bytes_per_second": 1}
    data = {"devices": [device] * 513, "default_link": {"bytes_per_second": 1, "latency_seconds": 0}}
    with pytest.raises(ClusterError, match="a cluster has at most 512 devices, got 513"):
        parse_cluster(data)
    with pytest.raises(ClusterError, match="a cluster has at most 512 devices, got 600"):
        Cluster("many", tuple(Device(f"d{i}", "gpu", 1, 1.0, 1.0) for i in range(600)), ())
