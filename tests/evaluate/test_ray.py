"""Evaluating on Ray changes no result: on two nodes, with a worker killed and with a node lost in the middle."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_cluster, tiny_graph
from evaluators import Dying, Failing, Sums, Telling, assert_same, kill, killer, simulators
from measuring import Ending
from simulated import random_order, random_placements, random_step

import placewise
from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation, Evaluator
from placewise.core.errors import InputError, PlacewiseError, ProblemError
from placewise.core.problem import Problem
from placewise.evaluate import open_evaluator
from placewise.evaluate.measured import Measurer
from placewise.evaluate.ray import RayPool
from placewise.search.budget import Budget
from placewise.search.driver import Progress
from placewise.search.planner import Planner
from placewise.search.request import Request
from placewise.simulate.simulator import Simulator

NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")

HERE = Path(__file__).parent
PATHS = os.pathsep.join(map(str, (HERE, HERE.parent, Path(placewise.__file__).parents[1])))  # so that workers run this code


@dataclass(frozen=True)
class LosingItsNode:
    """Makes evaluators that, on one node, write to a pipe that they have started and wait until the node is lost."""

    node_id: str
    pipe: Path

    def __call__(self) -> Evaluator:
        return self.evaluate

    def evaluate(self, placements: Ints, orders: Ints | None = None) -> Evaluation:
        import ray

        if ray.get_runtime_context().get_node_id() == self.node_id:
            self.pipe.write_text("here")
            threading.Event().wait()
        return Sums()(placements, orders)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of two CPUs each."""
    import ray
    from ray.cluster_utils import Cluster

    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", PATHS)
        cluster: Any = Cluster(initialize_head=True, head_node_args={**NODE, "_system_config": quick})
        cluster.add_node(**NODE)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@needs_ray
def test_the_number_of_workers_changes_nothing(cluster: Any) -> None:
    step, rng = random_step(seed=5, num_ops=40, num_devices=3, memory=120, grouping="colocated")
    placements = random_placements(step.problem, rng, 13)
    orders = np.array([random_order(step.problem, rng) for _ in range(13)])
    simulator = Simulator(step.problem)
    for workers in (1, None):
        with RayPool(simulators(step.problem), workers, cluster.address) as pool:
            assert pool.workers == (workers or 4)
            for rows in (13, 3, 0):
                assert_same(pool(placements[:rows]), simulator(placements[:rows]))
            assert_same(pool(placements, orders), simulator(placements, orders))
            assert_same(pool(placements, orders[:1]), simulator(placements, orders[:1]))
            with pytest.raises(ProblemError, match=r"placement 11 has 7 for group 0\."):
                pool(np.where(np.arange(13)[:, None] == 11, 7, placements))


@needs_ray
def test_a_killed_worker_is_replaced_and_its_part_evaluated_again(cluster: Any, tmp_path: Path) -> None:
    thread = killer(tmp_path)
    placements = np.arange(12).reshape(12, 1)
    with RayPool(Dying(tmp_path, times=2), 2, cluster.address) as pool:
        assert_same(pool(placements), Sums()(placements))
        assert len(list(tmp_path.glob("death-*"))) == 2
    with RayPool(Dying(tmp_path, times=99), 1, cluster.address, attempts=2) as pool:
        with pytest.raises(PlacewiseError, match="2 workers died evaluating placements 6 to 11 of a batch"):
            pool(placements)
        assert_same(pool(placements[:9]), Sums()(placements[:9]))
    (tmp_path / "pipe").write_text("stop")
    thread.join()


@needs_ray
def test_a_stopped_worker_is_replaced(cluster: Any, tmp_path: Path) -> None:
    thread = killer(tmp_path, end=lambda pid: os.kill(pid, signal.SIGSTOP))
    placements = np.arange(12).reshape(12, 1)
    with RayPool(Dying(tmp_path, times=1), 2, cluster.address, attempts=99, silent_seconds=1.0) as pool:
        assert_same(pool(placements), Sums()(placements))
    assert len(list(tmp_path.glob("death-*"))) == 1
    (tmp_path / "pipe").write_text("stop")
    thread.join()


@needs_ray
def test_a_recorded_search_has_the_same_history_when_workers_are_killed(cluster: Any, tmp_path: Path) -> None:
    step, _ = random_step(seed=7, num_ops=60, num_devices=3, memory=10**6, grouping="colocated")
    request = Request("hill-climb", {"neighbours": "8"}, Budget(evaluations=200), 1, "program")
    planner = Planner(step.problem, request)
    expected = planner.search(evaluator=Simulator(step.problem, "program", 1)).history
    moments = [40, 100]

    def kill_one(progress: Progress) -> None:
        if moments and progress.evaluations >= moments[0]:
            moments.pop(0)
            worker = min(tmp_path.glob("*.pid"))
            worker.unlink()
            kill(int(worker.stem))

    make = Telling(simulators(step.problem, "program"), tmp_path)
    with RayPool(make, 2, cluster.address) as pool:
        outcome = planner.search(kill_one, record=tmp_path / "runs.db", evaluator=pool)
    assert not moments
    assert outcome.history == expected
    again = planner.search(record=tmp_path / "runs.db", evaluator=Sums())  # answered from the record
    assert again.history == expected


@needs_ray
def test_an_evaluator_that_can_not_be_made(cluster: Any) -> None:
    failing = Failing(ProblemError("no such thing"))
    with RayPool(failing, 1, cluster.address) as pool, pytest.raises(ProblemError, match="no such thing"):
        pool(np.zeros((4, 1), np.int64))


@needs_ray
def test_a_lost_node(cluster: Any, tmp_path: Path) -> None:
    """Six workers on the six CPUs of three nodes: one node goes, four are left, and two replacements find no place."""
    node, pipe = cluster.add_node(**NODE), tmp_path / "pipe"
    os.mkfifo(pipe)

    def remove() -> None:
        assert pipe.read_text().startswith("here")
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=remove, daemon=True)
    thread.start()
    placements = np.arange(24).reshape(24, 1)
    with RayPool(LosingItsNode(node.node_id, pipe), 6, cluster.address) as pool:
        while thread.is_alive():  # until a worker of that node has started and has a part, and the node is lost
            assert_same(pool(placements), Sums()(placements))
        assert_same(pool(placements), Sums()(placements))


@needs_ray
def test_a_cluster_of_its_own(tmp_path: Path) -> None:
    """In a fresh process, a cluster is started, used and shut down."""
    step, rng = random_step(seed=5, num_ops=40, num_devices=3, memory=120, grouping="colocated")
    code = """
import ray
from simulated import random_placements, random_step
from placewise.evaluate import open_evaluator
step, rng = random_step(seed=5, num_ops=40, num_devices=3, memory=120, grouping="colocated")
with open_evaluator(step.problem, workers=2, ray="local") as evaluator:
    print(evaluator(random_placements(step.problem, rng, 5)).cost.tolist())
    print(ray.cluster_resources()["CPU"])
print(ray.is_initialized())
"""
    environment = {**os.environ, "PYTHONPATH": PATHS}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    expected = Simulator(step.problem)(random_placements(step.problem, rng, 5)).cost.tolist()
    assert done.stdout.splitlines() == [str(expected), "2.0", "False"], done.stderr


@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere"])
def test_an_address_without_a_cluster(address: str) -> None:
    with pytest.raises(InputError, match=f"can't connect to a Ray cluster at '{address}': ") as caught:
        RayPool(Sums, 2, address)
    assert "\n" not in str(caught.value)


def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"^Ray is not installed: pip install 'placewise\[ray\]'$"):
        RayPool(Sums)
    step, _ = random_step(seed=5, num_ops=4, num_devices=2, memory=120, grouping="colocated")
    with (
        pytest.raises(InputError, match="workers must be at least 1, there are 0"),
        open_evaluator(step.problem, workers=0, ray="auto"),
    ):
        pass


@dataclass(frozen=True)
class TellingItsMachine:
    """Makes evaluators that write to a folder which node they are on, and wait until two have."""

    folder: Path

    def __call__(self) -> Evaluator:
        return self.evaluate

    def evaluate(self, placements: Ints, orders: Ints | None = None) -> Evaluation:
        import ray

        node = ray.get_runtime_context().get_node_id()
        (self.folder / f"{node}.{os.getpid()}").touch()
        while len(list(self.folder.iterdir())) < 2:
            threading.Event().wait(0.02)
        return Sums()(placements, orders)


@needs_ray
def test_one_worker_on_each_machine(cluster: Any, tmp_path: Path) -> None:
    """The cluster has two CPUs on each of its machines, so that two workers could be on one."""
    with RayPool(TellingItsMachine(tmp_path), address=cluster.address, one_per_machine=True) as evaluate:
        assert evaluate.workers == 2
        evaluate(np.zeros((8, 3), np.int64))
    nodes = [file.name.partition(".")[0] for file in tmp_path.iterdir()]
    assert len(nodes) == len(set(nodes)) == 2
    with pytest.raises(InputError, match=r"at most one on each machine of the Ray cluster \(2\), there are 3"):
        RayPool(Sums, 3, cluster.address, one_per_machine=True)


@needs_ray
def test_measurements_on_machines_survive_what_placements_do(cluster: Any, tmp_path: Path) -> None:
    """One group on device 1 has no memory, and two end the process that measures; the machines' workers go on."""
    problem = Problem.of(tiny_graph(), tiny_cluster())
    make = Ending(tmp_path / "ran", {1: "memory", 2: "crash"})
    placements = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1]])
    there = partial(Measurer, problem, make)
    with RayPool(there, address=cluster.address, one_per_machine=True) as evaluate:
        found = evaluate(placements)
    assert found.step_seconds.tolist() == [1.0, np.inf, np.inf, 4.0, 1.0, 4.0]
    assert found.overflow_bytes.tolist() == [0, 5, 1, 0, 0, 0]
