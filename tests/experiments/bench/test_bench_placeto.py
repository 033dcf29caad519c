"""`placewise bench placeto` with a simulator of two lines in the place of Placeto's."""

from pathlib import Path

import pytest

from placewise.core.errors import InputError
from placewise.experiments.bench import bench_placeto
from placewise.experiments.bench.bench_placeto import PlacetoSimulator, placeto_machine

WORK_OF_THE_BUSIEST = """
class ImportantOpsSimulator:
    def __init__(self, metagraph, memory, profile, devices):
        self.devices = devices
        self.costs = {node.node_name: node.all_end_rel_micros for node in profile.dev_stats[0].node_stats}
        names = [node.name for node in metagraph.graph_def.node]
        assert sorted(self.costs) == sorted(names) == sorted(entry.node for entry in memory)
        sizes = {entry.node: entry.op_memory.output_memory for entry in memory}
        for position, node in enumerate(metagraph.graph_def.node):
            for source, _, output in (name.partition(":") for name in node.input if name[0] != "^"):
                assert names.index(source) < position
                assert sizes[source][int(output)] >= 0

    def simulate(self, placement):
        return max(sum(self.costs[n] for n, where in placement.items() if int(where) == d) for d in range(len(self.devices)))
"""


def test_a_placement_in_both_simulators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sim" / "tf_placement_sim"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "tf_pl_simulator.py").write_text(WORK_OF_THE_BUSIEST)
    monkeypatch.setattr(bench_placeto, "STRATEGIES", ("gpu-only", "heft"))
    found = PlacetoSimulator(models=("random-step:1",), checkout=str(tmp_path), seconds=0.05).run()
    rows = {row["strategy"]: row for row in found.data["placeto"]}
    assert list(rows) == ["gpu-only", "heft", "graph-policy", "graph-policy, greedy", "auto"]
    assert rows["gpu-only"]["placeto ms"] == pytest.approx(rows["gpu-only"]["ours ms"])  # all the work, and no copies
    assert "20 random placements of" in found.text


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--checkout must name a copy of Placeto's code"):
        PlacetoSimulator().run()
    with pytest.raises(InputError, match="is no copy of aravic/generalizable-device-placement"):
        PlacetoSimulator(checkout=str(tmp_path / "nothing")).run()


def test_the_machine_has_the_links_of_the_simulator() -> None:
    machine = placeto_machine(3)
    assert machine.device_names == ("gpu:0", "gpu:1", "gpu:2")
    assert machine.copy_seconds(7.6e9)[0, 1] == pytest.approx(1 + 25e-6)
    assert machine.channels[0, 1] == machine.channels[0, 2] != machine.channels[1, 0]
