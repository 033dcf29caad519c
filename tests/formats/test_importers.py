"""Others' graphs become ours: by hand on the smallest files, and on all of those that they published."""

import gzip
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placewise.core.cluster import Cluster
from placewise.core.costs import predict_op_seconds
from placewise.core.errors import ClusterError, GraphError
from placewise.core.graph import PHASES, Graph
from placewise.formats.cluster_file import format_cluster
from placewise.formats.graph_file import format_graph, read_graph, write_graph
from placewise.formats.importers import (
    dnn_partitioning_cluster,
    pipedream_cluster,
    read_any_graph,
    read_dnn_partitioning,
    read_pipedream,
)
from placewise.simulate import reference

ROOT = Path(__file__).parents[2]
SHARED = ROOT / ".." / "shared"
PARTITIONING = sorted((SHARED / "data" / "dnn-partitioning").glob("*-inputs/*/*.json"))
PROFILES = sorted(path for path in (SHARED / "data" / "pipedream").glob("*.txt") if path.name != "LICENSE.txt")


def files(paths: list[Path]) -> pytest.MarkDecorator:
    """Parametrises a test over the published files; one visible skip where the folder is absent."""
    missing = pytest.param(None, marks=pytest.mark.skip(reason="../shared/data is absent"))
    names = ["/".join(path.parts[-3:]) for path in paths]
    return pytest.mark.parametrize("path", paths or [missing], ids=names or None)


def simulate(graph: Graph, cluster: Cluster, placement: list[str]) -> dict[str, Any]:
    """Returns the step of a placement by the reference simulator, through the files of the graph and the cluster."""
    return reference.simulate(json.loads(format_graph(graph)), tomllib.loads(format_cluster(cluster)), placement)


def node(identity: int, cpu: float, fpga: float, size: float, **others: Any) -> dict[str, Any]:
    fields = {"id": identity, "cpuLatency": cpu, "fpgaLatency": fpga, "size": size}
    return {**fields, "supportedOnFpga": 1, "isBackwardNode": False, **others}


def edge(tail: int, head: int, cost: float, size: float) -> dict[str, Any]:
    return {"sourceId": tail, "destId": head, "cost": cost, "size": size}


def small_partitioning() -> dict[str, Any]:
    """Three nodes, the last one first: 1 -> 2, 1 -> 3, 2 -> 3. Node 2 runs on a CPU only; 1 and 3 are one color."""
    nodes = [
        node(3, 40, 4, 700, isBackwardNode=True, colorClass=5, name="Conv3", layerId=9),
        node(1, 10, 1, 3000, colorClass=5),
        node(2, 20, 2, 0, supportedOnFpga=False),
    ]
    edges = [edge(1, 2, 2.0, 2000.0), edge(1, 3, 2.0, 2000.0), edge(2, 3, 0.5, 500.0)]
    return {"maxFPGAs": 2, "maxCPUs": 1, "maxSizePerFPGA": 5000.0, "nodes": nodes, "edges": edges}


def layer(name: str, description: str, forward: str, backward: str, activation: str, parameters: str) -> str:
    times = f"forward_compute_time={forward}, backward_compute_time={backward}"
    return f"{name} -- {description} -- {times}, activation_size={activation}, parameter_size={parameters}"


SMALL_PROFILE = f"""\
{layer("node4", "Add(inplace)", "1.000", "1.000", "10.0", "0.000")}
{layer("node1", "Input", "1.000", "0.000", "100.000", "0.000")}
{layer("node2", "LSTM(4 -- 8)", "2.000", "4.000", "[150.0; 50.0]", "1000.000")}
{layer("node3", "ReLU()", "0.500", "0.250", "200.000", "0.000")} -- stage_id=1
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
\tnode2 -- node4
"""


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def names(graph: Graph, tensors: Any) -> list[str]:
    return [graph.tensors.names[t] for t in tensors]


def test_partitioning_by_hand(tmp_path: Path) -> None:
    """Milliseconds become seconds, edges tensors, colors groups; 2000 bytes in 2 ms are 1 MB/s.

    Node 1 holds 3000 bytes, 2000 of them its output, so 1000 are resident; node 3 has no output, all 700 are. Node 2's
    size, 0, has no room for its output of 500: it comes and goes, and only node 1's output stays to the end.
    """
    graph = read_dnn_partitioning(write(tmp_path / "small.json", small_partitioning()))
    ops, tensors = graph.ops, graph.tensors
    assert graph.name == "small"
    assert ops.names == ("node1", "node2", "Conv3")
    assert ops.kinds == ("node", "node", "Conv")
    assert [PHASES[phase] for phase in ops.phases] == ["forward", "forward", "backward"]
    assert ops.groups.tolist() == [0, 1, 0]
    assert ops.devices == (("cpu", "gpu"), ("cpu",), ("cpu", "gpu"))
    np.testing.assert_allclose(ops.seconds["cpu"], [0.010, 0.020, 0.040])
    np.testing.assert_allclose(ops.seconds["gpu"], [0.001, np.nan, 0.004])
    assert dict(zip(tensors.names, tensors.nbytes.tolist(), strict=True)) == {
        "node1": 2000,
        "node2": 500,
        "Conv3.size": 700,
        "node1.size": 1000,
    }
    assert tensors.home.tolist() == [-1, -1, 0, 0]
    assert [names(graph, row) for row in ops.reads] == [["node1.size"], ["node1"], ["node1", "node2", "Conv3.size"]]
    assert [names(graph, row) for row in ops.writes] == [["node1"], ["node2"], []]
    assert names(graph, graph.outputs) == ["node1"]


def test_partitioning_machine_by_hand(tmp_path: Path) -> None:
    """2 accelerators of 5000 bytes and a core; 1 MB/s to and from host memory, half of it between accelerators."""
    cluster = dnn_partitioning_cluster(write(tmp_path / "small.json", small_partitioning()))
    assert cluster.device_names == ("gpu:0", "gpu:1", "cpu:0")
    assert cluster.memory_bytes.tolist() == [5000, 5000, 2**40]
    np.testing.assert_allclose(cluster.bytes_per_second, [[np.inf, 5e5, 1e6], [5e5, np.inf, 1e6], [1e6, 1e6, np.inf]])
    assert not cluster.latency_seconds.any()
    assert len(cluster.channel_names) == 6


def test_partitioning_step_by_hand(tmp_path: Path) -> None:
    """Node 1 takes 1 ms, the copy to the CPU 2, node 2 20, the copy back 0.5, node 3 4: 27.5 ms.

    The accelerator holds 1700 resident bytes, node 1's output and the copy of node 2's: 4200; the CPU 2000 + 500.
    """
    path = write(tmp_path / "small.json", small_partitioning())
    step = simulate(read_dnn_partitioning(path), dnn_partitioning_cluster(path), ["gpu:0", "cpu:0"])
    assert step["step_seconds"] == pytest.approx(0.0275)
    assert step["peak_bytes"] == {"gpu:0": 4200, "gpu:1": 0, "cpu:0": 2500}


def test_cost_decides_over_size(tmp_path: Path) -> None:
    """An edge without size and one of cost 0: 1 MB/s from the third, so 3 ms are 3000 bytes and 0 ms are 0 bytes.

    The two edges of node 1 differ in cost, which makes two tensors.
    """
    data = small_partitioning()
    data["edges"] = [edge(1, 2, 3.0, 0.0), edge(1, 3, 2.0, 2000.0), edge(2, 3, 0.0, 500.0)]
    del data["edges"][0]["size"]
    graph = read_dnn_partitioning(write(tmp_path / "small.json", data))
    assert [graph.tensors.nbytes[row].tolist() for row in graph.ops.writes] == [[3000, 2000], [0], []]


def test_bandwidth_when_no_edge_says_it_and_when_it_is_given(tmp_path: Path) -> None:
    """No sizes: 2 GiB/s, so 1 ms is 2147484 bytes; a given bandwidth goes before the file's."""
    data = small_partitioning()
    data["edges"] = [{"sourceId": 1, "destId": 2, "cost": 1.0}]
    path = write(tmp_path / "small.json", data)
    assert read_dnn_partitioning(path).tensors.nbytes[0] == 2147484
    assert dnn_partitioning_cluster(path).bytes_per_second[0, 2] == 2**31
    assert dnn_partitioning_cluster(path, bytes_per_second=7.0).bytes_per_second[0, 2] == 7


def test_ties_go_to_the_lowest_position(tmp_path: Path) -> None:
    """Without edges, the order is the file's."""
    data = {**small_partitioning(), "edges": []}
    assert read_dnn_partitioning(write(tmp_path / "small.json", data)).ops.names == ("Conv3", "node1", "node2")


def test_profile_merged_by_hand(tmp_path: Path) -> None:
    """A layer is an op: 1 + 0, 2 + 4, 0.5 + 0.25 and 1 + 1 ms, 9.75 in all; the LSTM's sizes are summed."""
    graph = read_pipedream(write(tmp_path / "small.txt", SMALL_PROFILE), merged=True)
    assert graph.ops.names == ("node1", "node2", "node3", "node4")
    assert graph.ops.kinds == ("Input", "LSTM", "ReLU", "Add")
    assert graph.ops.groups.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(graph.ops.seconds["gpu"], [0.001, 0.006, 0.00075, 0.002])
    assert graph.ops.devices == (("gpu",),) * 4
    assert graph.tensors.nbytes.tolist() == [100, 200, 200, 10, 1000]
    assert graph.tensors.home.tolist() == [-1, -1, -1, -1, 1]
    assert graph.ops.reads.lists() == [[], [0, 4], [1], [2, 1]]
    assert graph.ops.writes.lists() == [[0], [1], [2], [3]]


def test_profile_by_hand(tmp_path: Path) -> None:
    """Forward 1 2 3 4, backward 4 3 2: the input has no backward, and no gradient is written for it.

    The LSTM's backward reads what node 4 and node 3 wrote for it, its input and its parameters; it writes the gradient
    of its 1000 bytes of parameters, which is what the step leaves behind.
    """
    graph = read_pipedream(write(tmp_path / "small.txt", SMALL_PROFILE))
    ops = graph.ops
    assert ops.names == ("node1", "node2", "node3", "node4", "node4.backward", "node3.backward", "node2.backward")
    assert ops.groups.tolist() == [0, 1, 2, 3, 3, 2, 1]
    np.testing.assert_allclose(ops.seconds["gpu"], [0.001, 0.002, 0.0005, 0.001, 0.001, 0.00025, 0.004])
    assert [names(graph, row) for row in ops.reads][4:] == [
        ["node4", "node3", "node2"],
        ["node3.grad.node4", "node2"],
        ["node2.grad.node3", "node2.grad.node4", "node1", "node2.parameters"],
    ]
    assert [names(graph, row) for row in ops.writes][4:] == [
        ["node3.grad.node4", "node2.grad.node4"],
        ["node2.grad.node3"],
        ["node2.parameters.grad"],
    ]
    assert graph.tensors.nbytes[graph.ops.writes[4]].tolist() == [200, 200]
    assert names(graph, graph.outputs) == ["node2.parameters.grad"]


@pytest.mark.parametrize(("queue", "channels"), [("device", 3), ("sender", 3), ("pair", 6)])
def test_comparison_machine_by_hand(queue: str, channels: int) -> None:
    """A million bytes take 134 + 175.4 µs; 3 GPUs have 3 channels when each sends on its own, else 6."""
    cluster = pipedream_cluster(3, queue=queue)
    seconds = cluster.latency_seconds[0, 1] + 1e6 / cluster.bytes_per_second[0, 1]
    assert seconds == pytest.approx(309.4e-6)
    assert len(cluster.channel_names) == channels


def test_profile_step_by_hand(tmp_path: Path) -> None:
    """Merged, the ReLU on a second GPU, copies of 1 ms + 1 ms for each 100 bytes.

    Input and LSTM end at 7 ms, the copy of 200 bytes at 10, the ReLU at 10.75, the copy back at 13.75, Add at 15.75.
    """
    graph = read_pipedream(write(tmp_path / "small.txt", SMALL_PROFILE), merged=True)
    cluster = pipedream_cluster(2, latency_seconds=0.001, seconds_per_byte=1e-5)
    step = simulate(graph, cluster, ["gpu:0", "gpu:0", "gpu:1", "gpu:0"])
    assert step["step_seconds"] == pytest.approx(0.01575)


def test_read_any_graph_goes_by_content(tmp_path: Path) -> None:
    """Three formats behind one name, gzipped or not; ours read back has the same digest."""
    path = tmp_path / "model"
    contents = [json.dumps(small_partitioning()), SMALL_PROFILE]
    for content in contents:
        path.write_text(content)
        graph = read_any_graph(path)
        path.write_bytes(gzip.compress(content.encode()))
        assert read_any_graph(path).digest == graph.digest
        write_graph(graph, path)
        assert read_any_graph(path).digest == graph.digest


@files(PARTITIONING)
def test_published_partitioning(path: Path, tmp_path: Path) -> None:
    """An op for each node, the file's total times, each edge's size and cost, and every node's memory."""
    data = json.loads(path.read_text())
    graph, cluster = read_any_graph(path), dnn_partitioning_cluster(path)
    nodes, edges = data["nodes"], data["edges"]
    assert len(graph.ops) == len(nodes)
    assert graph.ops.seconds["gpu"].sum() * 1000 == pytest.approx(sum(row["fpgaLatency"] for row in nodes))
    assert graph.ops.seconds["cpu"].sum() * 1000 == pytest.approx(sum(row["cpuLatency"] for row in nodes))
    assert cluster.num_devices == data["maxFPGAs"] + data["maxCPUs"]
    _, _, tensors = graph.edges
    sizes = np.array([row["size"] for row in edges])
    assert sorted(graph.tensors.nbytes[tensors]) == sorted(np.rint(sizes))
    copy_seconds = graph.tensors.nbytes[tensors].sum() / cluster.bytes_per_second[0, -1]
    assert copy_seconds * 1000 == pytest.approx(sum(row["cost"] for row in edges))
    stays = (graph.producer < 0) | np.isin(np.arange(len(graph.tensors)), graph.outputs)
    assert graph.tensors.nbytes[stays].sum() == sum(row["size"] for row in nodes)
    write_graph(graph, tmp_path / "graph.json.gz")
    assert read_graph(tmp_path / "graph.json.gz").digest == graph.digest


@files(PARTITIONING)
def test_published_colors_are_groups(path: Path) -> None:
    """As many groups as colors and nodes without one."""
    rows = json.loads(path.read_text())["nodes"]
    colors = {row["colorClass"] for row in rows if "colorClass" in row}
    assert read_dnn_partitioning(path).num_groups == len(colors) + sum("colorClass" not in row for row in rows)


@files(PROFILES)
@pytest.mark.parametrize("merged", [True, False])
def test_published_profiles(path: Path, merged: bool, tmp_path: Path) -> None:
    """An op for each layer, and one more for its backward unless it is an input; the file's total time."""
    text = path.read_text()
    num_layers = len(re.findall(r"^node", text, re.M))
    num_inputs = num_layers - len(set(re.findall(r"^\t.* -- (node\d+)$", text, re.M)))
    milliseconds = sum(map(float, re.findall(r"compute_time=([\d.]+)", text)))
    graph = read_pipedream(path, merged=merged)
    assert len(graph.ops) == (num_layers if merged else 2 * num_layers - num_inputs)
    assert graph.num_groups == num_layers
    assert graph.ops.seconds["gpu"].sum() * 1000 == pytest.approx(milliseconds)
    write_graph(graph, tmp_path / "graph.json")
    assert read_graph(tmp_path / "graph.json").digest == graph.digest


@files([path for path in PROFILES if path.name == "inception_v3.txt"])
def test_inception_on_one_device(path: Path) -> None:
    """The file's times add up to 710.738 ms; the comparison has 710.8 for one device, 0.06 more than the file."""
    graph, cluster = read_pipedream(path, merged=True), pipedream_cluster(4)
    milliseconds = predict_op_seconds(graph, cluster)[:, 0].sum() * 1000
    assert milliseconds == pytest.approx(710.738)
    assert milliseconds == pytest.approx(710.8, abs=0.1)
    step = simulate(graph, cluster, ["gpu:0"] * graph.num_groups)
    assert step["step_seconds"] * 1000 == pytest.approx(milliseconds)
    assert step["fits"]


def changed(where: str, index: int, **fields: Any) -> dict[str, Any]:
    """Returns the small graph with fields of one node or edge changed; None takes a field away."""
    data = small_partitioning()
    row = data[where][index]
    row.update(fields)
    data[where][index] = {key: value for key, value in row.items() if value is not None}
    return data


BROKEN_PARTITIONING = {
    "missing id": (changed("nodes", 1, id=None), r"nodes\[1\]: needs the field 'id'"),
    "missing time": (changed("nodes", 1, cpuLatency=None), "node 1: needs the field 'cpuLatency'"),
    "negative time": (changed("nodes", 1, fpgaLatency=-1.0), "node 1: fpgaLatency must be a finite number at least 0"),
    "text for a time": (changed("nodes", 1, cpuLatency="2"), "node 1: cpuLatency must be a finite number"),
    "NaN": (json.dumps(changed("nodes", 1, cpuLatency=float("nan"))), "is not JSON: NaN"),
    "huge time": (json.dumps(small_partitioning()).replace("40", "1e999", 1), "node 3: cpuLatency must be a finite"),
    "huge size": (changed("nodes", 1, size=1e30), r"node 1: size must be at most 2\*\*62"),
    "huge copy": (changed("edges", 0, size=1e80, cost=1e-250), r"node 'node1': its output must be at most 2\*\*62"),
    "flag": (changed("nodes", 1, supportedOnFpga=2), "node 1: supportedOnFpga must be true, false, 1 or 0, got 2"),
    "name": (changed("nodes", 1, name=7), "node 1: name must be text"),
    "same id": (changed("nodes", 1, id=3), r"node 3: nodes\[0\] and nodes\[1\] have the same id"),
    "unknown head": (changed("edges", 2, destId=8), r"edges\[2\]: destId names node 8, which does not exist"),
    "negative cost": (changed("edges", 2, cost=-0.5), r"edges\[2\]: cost must be"),
    "missing cost": (changed("edges", 2, cost=None), r"edges\[2\]: needs the field 'cost'"),
    "cycle": (changed("edges", 1, sourceId=3, destId=1), "node '(node1|node2|Conv3)': is part of a cycle"),
    "self": (changed("edges", 1, destId=1), "node 'node1': is part of a cycle"),
    "no edges": ({"nodes": []}, "needs the field 'edges'"),
    "nodes no list": ({"nodes": 3, "edges": []}, "nodes must be a list, got 3"),
    "node no dict": ({"nodes": [3], "edges": []}, r"nodes\[0\]: must be a dict, got 3"),
    "cut off": (json.dumps(small_partitioning())[:-9], "is not JSON"),
    "other JSON": ({"cpus": [], "fpgas": []}, "must be a placewise graph"),
    "a list": ([1], "must be a placewise graph"),
}
BROKEN_PROFILE = {
    "missing field": (
        SMALL_PROFILE.replace("forward_compute_time=2.000, ", ""),
        "line 3: 'node2': needs the field 'forw",
    ),
    "unknown field": (SMALL_PROFILE.replace("parameter_size=1", "size=1"), "line 3: 'node2': unknown field 'size'"),
    "twice": (SMALL_PROFILE.replace("backward_compute_time=4", "forward_compute_time=4"), "line 3: .* is given twice"),
    "NaN": (SMALL_PROFILE.replace("=4.000", "=nan"), "line 3: 'node2': backward_compute_time must be a finite number"),
    "negative": (SMALL_PROFILE.replace("; 50.0", "; -50.0"), "line 3: 'node2': activation_size must be .* got -50.0"),
    "no number": (SMALL_PROFILE.replace("=1000.000", "=many"), "parameter_size must be .* got 'many'"),
    "open list": (SMALL_PROFILE.replace("50.0]", "50.0"), "line 3: 'node2': activation_size must be"),
    "huge": (SMALL_PROFILE.replace("=1000.000", "=1e30"), r"parameter_size must be at most 2\*\*62 bytes"),
    "same layer": (SMALL_PROFILE.replace("node3 -- R", "node2 -- R"), "line 4: 'node2' is already the layer in line 3"),
    "unknown layer": (SMALL_PROFILE.replace("\tnode3", "\tnode9"), "line 7: the edge names 'node9'"),
    "edge of three": (SMALL_PROFILE + "\tnode1 -- node2 -- node3\n", "line 9: a line that starts with a tab"),
    "short line": (SMALL_PROFILE + "node5 -- ReLU\n", "line 9: must be `node -- layer -- times and sizes`"),
    "cycle": (SMALL_PROFILE + "\tnode4 -- node2\n", "layer 'node[234]': is part of a cycle"),
    "edges alone": ("\tnode1 -- node2\n", "must have at least one layer"),
    "prose": ("A network with three layers.\n", "must be a placewise graph"),
    "empty": ("", "must be a placewise graph"),
}
BROKEN = {
    **{f"dnn-partitioning: {name}": case for name, case in BROKEN_PARTITIONING.items()},
    **{f"pipedream: {name}": case for name, case in BROKEN_PROFILE.items()},
}


@pytest.mark.parametrize(("content", "rule"), BROKEN.values(), ids=BROKEN)
def test_broken_files(tmp_path: Path, content: Any, rule: str) -> None:
    """One line that names the file, the element and the rule."""
    path = write(tmp_path / "broken", content)
    with pytest.raises(GraphError, match=rule) as error:
        read_any_graph(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"\xff\xfe -- \x00", b'{"nodes": "\xff"}', b"\x1f\x8bnot gzip", b"\x00\x01"])
def test_bytes_that_are_no_text(tmp_path: Path, content: bytes) -> None:
    """Neither is a file that is not text a traceback."""
    path = tmp_path / "broken"
    path.write_bytes(content)
    with pytest.raises(GraphError, match=re.escape(str(path))):
        read_any_graph(path)


def test_no_such_file(tmp_path: Path) -> None:
    """A file that is not there, by each of the ways to read one."""
    for read in (read_any_graph, read_dnn_partitioning, dnn_partitioning_cluster, read_pipedream):
        with pytest.raises(GraphError, match="there is no such file"):
            read(tmp_path / "absent")


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"maxFPGAs": None}, "maxFPGAs must be a whole number"),
        ({"maxFPGAs": 0, "maxCPUs": 0}, r"maxFPGAs \+ maxCPUs must be from 1 to 1000, got 0"),
        ({"maxFPGAs": 10**6}, r"maxFPGAs \+ maxCPUs must be from 1 to 1000"),
        ({"maxSizePerFPGA": -1}, "maxSizePerFPGA must be a finite number"),
    ],
)
def test_broken_machines(tmp_path: Path, fields: dict[str, Any], rule: str) -> None:
    """The machine's fields are checked when the machine is asked for."""
    path = write(tmp_path / "broken.json", {**small_partitioning(), **fields})
    with pytest.raises(GraphError, match=rule):
        dnn_partitioning_cluster(path)


def test_wrong_bandwidth(tmp_path: Path) -> None:
    """A bandwidth that is given must be one."""
    path = write(tmp_path / "small.json", small_partitioning())
    with pytest.raises(ClusterError, match=r"small\.json: link .*bytes_per_second must be a finite number above 0"):
        dnn_partitioning_cluster(path, bytes_per_second=0.0)
