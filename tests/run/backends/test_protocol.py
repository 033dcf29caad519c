"""A new kind of device is one class behind the protocol, and one line in the table."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled_steps import capture_with_mse, cpu_cluster, plan_by_op, small_training
from eager_steps import eager_step
from simulated import random_placements
from stand_in_accelerator import StandInAccelerator

from placewise.core.cluster import Cluster
from placewise.core.errors import ExecutionError
from placewise.core.problem import Problem
from placewise.run import backends
from placewise.run.backends.cpu_threads import CpuThreads
from placewise.run.backends.cuda import Cuda
from placewise.run.backends.protocol import Backend, StreamBackend
from placewise.run.codegen import recorded_segments
from placewise.run.devices import RealDevice, real_devices
from placewise.run.step.compiling import compile_placement

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]
STREAM_BACKENDS: list[StreamBackend] = [Cuda(), StandInAccelerator()]  # mypy compares them with the protocol
THREAD_BACKENDS: list[Backend] = [CpuThreads()]


@pytest.fixture
def new_kind(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A line in the table for kind "stand-in", before those that look at what it has claimed."""
    known = dict(backends.BACKENDS)
    backends.BACKENDS.clear()
    backends.BACKENDS.update({"stand-in": "stand_in_accelerator:StandInAccelerator", **known})
    monkeypatch.setattr(recorded_segments, "FEWEST_OPS", 2)
    yield "stand-in"
    backends.BACKENDS.clear()
    backends.BACKENDS.update(known)
    backends.backend_of.cache_clear()


def cluster_of_kinds(*kinds: str) -> Cluster:
    cluster = cpu_cluster(len(kinds))
    devices = zip(cluster.devices, kinds, strict=True)
    return replace(cluster, devices=tuple(replace(device, kind=kind) for device, kind in devices))


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_new_kind_of_device_trains_next_to_cpu_threads(new_kind: str, is_recorded: bool) -> None:
    """Two of them and a CPU, with a random placement: the losses of eager code; the allocators are asked for their peaks."""
    model, optimizer, batch = small_training()
    eager_model, eager_optimizer, _ = small_training()
    eager_model.load_state_dict(copy.deepcopy(model.state_dict()))
    step = capture_with_mse(model, optimizer, batch)
    problem = Problem.of(step.graph, cluster_of_kinds(new_kind, "cpu", new_kind))
    placement = random_placements(problem, np.random.default_rng(0), 1)[0]
    devices = tuple(replace(device, threads=1) for device in real_devices(problem.cluster))
    train_step = compile_placement(problem, placement, None, step, devices, is_recorded)
    eager = capture_with_mse(eager_model, eager_optimizer, batch).step
    for _ in range(5):
        assert torch.equal(train_step(batch), eager_step(eager)[0])
    assert (train_step.num_recorded_ops > 0) == is_recorded
    assert train_step.allocated_bytes() == {"cpu:0": 7, "cpu:2": 7}
    train_step.close()


@pytest.mark.parametrize(
    ("of_plan", "given", "is_recorded"), [(True, None, True), (True, False, False), (False, True, True)]
)
def test_a_plan_made_for_graphs_runs_with_them(
    monkeypatch: pytest.MonkeyPatch, of_plan: bool, given: bool | None, is_recorded: bool
) -> None:
    """On a stand-in for a GPU; what the caller says goes first."""
    monkeypatch.setitem(backends.BACKENDS, "gpu", "stand_in_accelerator:StandInAccelerator")
    backends.backend_of.cache_clear()
    monkeypatch.setattr(recorded_segments, "FEWEST_OPS", 2)
    model, optimizer, batch = small_training()
    step = capture_with_mse(model, optimizer, batch)
    plan = replace(plan_by_op(step, lambda name: "cpu:0"), cuda_graphs=of_plan)
    train_step = plan.compile(step, cluster_of_kinds("gpu"), cuda_graphs=given)
    for _ in range(4):
        train_step(batch)
    assert (train_step.num_recorded_ops > 0) == is_recorded
    train_step.close()
    backends.backend_of.cache_clear()


def test_cores_are_left_for_launching_on_a_new_kind_of_device(new_kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placewise.run.backends.cpu_threads.processors", lambda: [0, 1, 2])
    assert real_devices(cluster_of_kinds(new_kind, "cpu"))[1].host_cores == (2,)
    assert real_devices(cluster_of_kinds("cpu"))[0].host_cores == ()


def test_two_kinds_of_accelerators_in_one_step_are_refused(new_kind: str) -> None:
    step = capture_with_mse(*small_training())
    problem = Problem.of(step.graph, cluster_of_kinds(new_kind, "gpu"))
    devices = (*real_devices(cluster_of_kinds(new_kind)), RealDevice("cpu:1", "gpu", "cuda:0", launches_from_host=True))
    with pytest.raises(ExecutionError, match="devices of kind stand-in and gpu can't run in one step"):
        compile_placement(problem, np.zeros(problem.num_groups, np.int64), None, step, devices)


def test_every_backend_of_the_table_is_compared_with_the_protocol() -> None:
    names = {path.partition(":")[2] for path in backends.BACKENDS.values()}
    assert names <= {type(backend).__name__ for backend in (*STREAM_BACKENDS, *THREAD_BACKENDS)}


def test_only_the_cuda_backend_speaks_of_cuda() -> None:
    """Elsewhere in run/ it is the name of a user's option (`cuda_graphs`, `virtual`), or of a device of a plan."""
    folder = Path(backends.__file__).parent
    speaking = {
        path.relative_to(folder.parent).as_posix()
        for path in folder.parent.rglob("*.py")
        if "cuda" in path.read_text().lower()
    }
    assert speaking == {
        "backends/__init__.py", "backends/cuda.py", "backends/cuda_graphs.py", "backends/green_contexts.py",
        "device_map.py", "step/compiling.py",
    }  # fmt: skip
