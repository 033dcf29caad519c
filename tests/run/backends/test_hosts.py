"""Steps over hosts: ranks of torch.distributed on this machine, compared with eager code; parts that would never end."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpointed_network import network_with_buffers, some_batches
from compiled_steps import cpu_cluster, one_thread_each
from eager_steps import eager_step, snapshot
from simulated import random_placements
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from placewise.core.errors import ExecutionError, PlanError
from placewise.core.problem import Problem
from placewise.graph_capture.capture import CapturedStep, capture_step
from placewise.run.backends.hosts import joined_ranks
from placewise.run.lower.instructions import CopyTensor, Instructions, RunOp
from placewise.run.lower.rank_part import check_parts, part_of
from placewise.run.step.compiling import compile_placement
from placewise.run.step.train_step import TrainStep

WORKER = Path(__file__).with_name("hosts_worker.py")


@pytest.mark.parametrize(("ranks", "networks", "options"), [(2, 10, ()), (4, 3, ()), (2, 4, ("--stand-in",))])
def test_random_networks_over_hosts_are_like_eager(
    ranks: int, networks: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    """Five steps of random networks with random placements and orders; other plans are refused on every rank."""
    outputs = run_ranks(ranks, ranks, tmp_path, "--networks", str(networks), *options)
    for rank, output in enumerate(outputs):
        assert f"rank {rank}: {networks} networks like eager" in output, output


FAULTS = {
    "end": r"rank {} \(host '{}'\) ended or hangs, so the step can't go on",
    "stop": r"rank {} \(host '{}'\) ended or hangs, so the step can't go on",
    "wait": r"rank {} \(host '{}'\) did not come to the step in time",
    "fail": r"rank {} \(host '{}'\) failed: .*",
}


def test_a_rank_with_a_fault_ends_the_others_with_its_name(tmp_path: Path) -> None:
    """The last rank ends, is stopped, waits for its batch or fails; the first ones say so and end. All at the same time:
    they mostly wait."""
    with ExitStack() as stack:
        started = []
        for fault in FAULTS:
            (tmp_path / fault).mkdir()
            ranks = 3 if fault == "stop" else 2
            options = ("--fault", fault, "--timeout", "15")
            started.append(stack.enter_context(start_ranks(ranks, ranks - 1, tmp_path / fault, *options)))
        for (fault, line), outputs in zip(FAULTS.items(), started, strict=True):
            for rank, output in enumerate(found := outputs()):
                named = line.format(len(found), len(found))
                assert re.fullmatch(rf"rank {rank} ends after [0-9.]+ s: {named}", output.strip()), (fault, output)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled.*single process")
def test_a_checkpoint_of_ranks_goes_on_on_one_machine_and_in_plain_pytorch(tmp_path: Path) -> None:
    """Two ranks with two plans go on with the same losses; so do a plan for one machine, and eager PyTorch."""
    outputs = run_ranks(2, 2, tmp_path, "--checkpoint", str(tmp_path / "saved"))
    losses = json.loads(outputs[0].removeprefix("rank 0: "))
    assert outputs[1] == f"rank 1: {json.dumps(losses)}\n"
    batches = some_batches()[3:]

    placed = network_with_buffers(5)
    assert placed.optimizer is not None
    train_step = place_at_random(capture_step(placed), 0)
    load({"training": train_step}, checkpoint_id=tmp_path / "saved")
    assert [float(train_step(batch)) for batch in batches] == losses

    eager = network_with_buffers(6)
    assert eager.optimizer is not None
    model_state, optimizer_state = get_state_dict(eager.model, eager.optimizer)
    state = {"training": {"model": model_state, "optimizer": optimizer_state}}
    load(state, checkpoint_id=tmp_path / "saved")
    set_state_dict(eager.model, eager.optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert [float(sum(eager_step(replace(eager, batch=batch)))) for batch in batches] == losses
    assert snapshot(placed.model, placed.optimizer).keys() == snapshot(eager.model, eager.optimizer).keys()
    assert all(torch.equal(a, b) for a, b in zip(placed.model.parameters(), eager.model.parameters(), strict=True))

    dcp_to_torch_save(tmp_path / "saved", tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)["training"]
    network_with_buffers(0).model.load_state_dict(saved["model"])
    assert saved["optimizer"]["state"].keys() == dict(eager.model.named_parameters()).keys()


def test_a_checkpoint_of_another_model_is_refused() -> None:
    """What the model does not have is named."""
    train_step = place_at_random(capture_step(network_with_buffers(0)), 0)
    state = train_step.state_dict()
    with pytest.raises(ExecutionError, match=r"the checkpoint has other\.weight, the model has not"):
        train_step.load_state_dict({**state, "model": {"other.weight": torch.zeros(1)}})
    optimizer = {**state["optimizer"], "state": {"other.weight": {}}}
    with pytest.raises(ExecutionError, match=r"optimizer state of other\.weight, the model has no such parameter"):
        train_step.load_state_dict({**state, "optimizer": optimizer})


def place_at_random(step: CapturedStep, seed: int) -> TrainStep:
    """Returns the step on two CPU devices of this machine, which one process runs."""
    problem = Problem.of(step.graph, cpu_cluster())
    placement = random_placements(problem, np.random.default_rng(seed), 1)[0]
    return compile_placement(problem, placement, None, step, one_thread_each(problem.cluster))


def run_ranks(ranks: int, count: int, folder: Path, *options: str) -> list[str]:
    """Starts the ranks of the worker, and returns what the first of them have printed when they have ended."""
    with start_ranks(ranks, count, folder, *options) as outputs:
        return outputs()


@contextmanager
def start_ranks(ranks: int, count: int, folder: Path, *options: str) -> Iterator[Callable[[], list[str]]]:
    """Starts the ranks of the worker, and gives what waits for the end of the first of them; all are killed then."""
    command = [sys.executable, str(WORKER), *options, "--init", f"file://{folder / 'store'}"]
    environments = [{**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)]
    workers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for environment in environments
    ]
    try:
        yield lambda: [worker.communicate(timeout=120)[0] for worker in workers[:count]]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_parts_that_wait_for_each_other_are_refused() -> None:
    """Rank 0 sends tensor 0 and then receives 1; if rank 1 also sends first what it makes of 0, neither goes on."""
    there, back = CopyTensor(0, 0, 1), CopyTensor(1, 1, 0)
    whole = Instructions(("a", "b"), (RunOp(0, 0), there, RunOp(1, 1), back, RunOp(2, 0)))
    parts = {rank: part_of(whole, [0, 1], rank) for rank in (0, 1)}
    assert parts[0].sequence == (RunOp(0, 0), there, back, RunOp(2, 0))
    assert parts[1].sequence == (there, RunOp(1, 1), back)
    check_parts(parts, [0, 1])
    swapped = Instructions(whole.device_names, (back, there, RunOp(1, 1)))
    with pytest.raises(PlanError, match="wait for each other forever"):
        check_parts({0: parts[0], 1: swapped}, [0, 1])
    with pytest.raises(PlanError, match="wait for each other forever"):
        check_parts({0: parts[0], 1: Instructions(whole.device_names, (there, RunOp(1, 1)))}, [0, 1])
    with pytest.raises(PlanError, match="is on a device of rank 0"):
        check_parts({0: parts[0], 1: whole}, [0, 1])


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"RANK": "abc"}, "RANK must be a whole number, got 'abc'"),
        ({"RANK": "0"}, "WORLD_SIZE must be a whole number, got ''"),
        ({"RANK": "2", "MASTER_PORT": "9"}, "RANK must be below WORLD_SIZE, got 2 and 2"),
        ({"MASTER_PORT": "65536"}, "MASTER_ADDR and MASTER_PORT are no address: '127.0.0.1', 65536"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR and MASTER_PORT are no address: '', 9"),
        ({"MASTER_ADDR": "a..b"}, "nothing answers at a..b:9 .*; rank 0 must run there"),
        ({}, "nothing answers at 127.0.0.1:9 .*Connection refused.*; rank 0 must run there"),
    ],
)
def test_ranks_that_can_not_meet_are_one_line(
    environment: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Torch prints a stack of C++ calls where nothing answers; rank 1 is refused before torch tries."""
    usual = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name in usual:
        monkeypatch.delenv(name, raising=False)
    for name, value in (environment if line.startswith("WORLD_SIZE") else usual | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ExecutionError, match=f"^can't join the other ranks: {line}$"), joined_ranks(0.2):
        pass
    assert capfd.readouterr().err == ""
