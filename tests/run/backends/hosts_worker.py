"""One rank of a test: trains random networks and small models with random placements, and compares with eager code.

A hundred networks and the small zoo on two ranks, then a thousand steps of one network, after which nothing may have grown:

    torchrun --nproc-per-node 2 tests/run/backends/hosts_worker.py --networks 100 --zoo --steps 1000

With --fault the last rank ends, hangs or fails in its third step, and the others print the line that they end with.
"""

import argparse
import copy
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpointed_network import network_with_buffers, some_batches
from compiled_steps import RandomNet
from eager_steps import eager_step, snapshot
from simulated import random_order, random_placements
from tiny_zoo import TINY_ZOO, randomized
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import placewise
from placewise import zoo
from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster, Device, Link
from placewise.core.errors import ExecutionError
from placewise.core.problem import Problem
from placewise.formats.profile_file import format_profile
from placewise.graph_capture.capture import CapturedStep, capture_step
from placewise.graph_capture.resolved_program import ResolvedProgram
from placewise.graph_capture.training_step import TrainingStep
from placewise.measure.all_hosts import describe_hosts
from placewise.measure.prediction_checks import check_predictions
from placewise.measure.profile_of_hosts import profile_hosts
from placewise.measure.profiler import apply_profile
from placewise.run import backends
from placewise.run.deferred_weights import DeferredWeights
from placewise.run.lower.lowering import lower
from placewise.run.lower.placed_step import PlacedStep
from placewise.run.lower.rank_part import check_parts, part_of
from placewise.run.step import compiling
from placewise.run.step.compiling import compile_part
from placewise.run.step.train_step import TrainStep

STEPS = 5


kinds = ["cpu", "cpu"]  # of each host's devices


def hosts_cluster(hosts: int) -> Cluster:
    """Returns hosts with some devices each."""
    found = [Device(f"{h}/{d}", kind, 2**40, 1e9, 1e9, host=str(h)) for h in range(hosts) for d, kind in enumerate(kinds)]
    names = [device.name for device in found]
    return Cluster("hosts", tuple(found), tuple(Link(a, b, 1e9, 1e-5) for a in names for b in names if a != b))


def random_plan(step: CapturedStep, seed: int, ranks: int) -> tuple[Problem, Ints, Ints]:
    """Returns the step on hosts with a random placement and order; random ops are on the first host, in program order."""
    problem, rng = Problem.of(step.graph, hosts_cluster(ranks)), np.random.default_rng(seed)
    placement, order = random_placements(problem, rng, 1)[0].copy(), random_order(problem, rng)
    whole = lower(problem, placement, order)
    drawing = PlacedStep(ResolvedProgram.of(step), whole, np.zeros(0, np.int64), ()).random_ops
    for op in sorted(drawing):
        placement[step.graph.ops.groups[op]] %= 2
    return problem, placement, np.arange(problem.num_ops) if drawing else order


def compare_with_eager(build: Callable[[], TrainingStep], batches: list[Any], seed: int, ranks: int) -> None:
    """Asserts that losses, parameters, buffers and state of all ranks are eager's, bit for bit."""
    eager, placed = build(), build()
    assert eager.optimizer is not None
    assert placed.optimizer is not None
    placed.model.load_state_dict(copy.deepcopy(eager.model.state_dict()))
    step = capture_step(placed)
    problem, placement, order = random_plan(step, seed, ranks)
    whole, of = lower(problem, placement, order), problem.cluster.hosts.tolist()
    check_parts({rank: part_of(whole, of, rank) for rank in range(ranks)}, of)
    train_step = compile_part(problem, placement, order, step)
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        losses = eager_step(TrainingStep(eager.model, eager.loss_fn, eager.optimizer, batch, eager.micro_batches))
        drawn = torch.get_rng_state()
        torch.manual_seed(number)
        assert torch.equal(train_step(batch), sum(losses[1:], losses[0]))
        assert torch.equal(torch.get_rng_state(), drawn)  # also where another rank has drawn the numbers
    train_step.collect()
    found, wanted = snapshot(placed.model, placed.optimizer), snapshot(eager.model, eager.optimizer)
    assert found.keys() == wanted.keys()
    differing = [key for key in wanted if not torch.equal(torch.as_tensor(found[key]), torch.as_tensor(wanted[key]))]
    assert not differing, f"seed {seed}: {differing}"
    train_step.close()


def random_network(seed: int) -> TrainingStep:
    """Returns a step of a random network."""
    torch.manual_seed(seed)
    model = RandomNet(seed, 3 + seed % 12)
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    return TrainingStep(model, nn.functional.mse_loss, torch.optim.Adam(model.parameters(), lr=0.01), batch, 1)


def drawing_network() -> TrainingStep:
    """Returns a step that draws random numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    return TrainingStep(model, nn.functional.mse_loss, torch.optim.Adam(model.parameters(), lr=0.01), batch, 1)


def compare_networks(count: int, ranks: int) -> None:
    """Compares random networks with eager code, and one that draws random numbers."""
    compare_with_eager(drawing_network, [drawing_network().batch] * 2, 0, ranks)
    for seed in range(count):
        torch.manual_seed(seed)
        batches = [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(STEPS)]
        compare_with_eager(partial(random_network, seed), batches, seed, ranks)


def compare_zoo(ranks: int) -> None:
    """Compares the zoo's models at their smallest size with eager code."""
    for seed, (name, small) in enumerate(TINY_ZOO.items()):

        def build(small: str = small) -> TrainingStep:
            torch.manual_seed(0)
            return zoo.build_step(small, device="cpu")

        batches = [randomized(build().batch, torch.Generator().manual_seed(number)) for number in range(STEPS)]
        compare_with_eager(build, batches, seed, ranks)
        if dist.get_rank() == 0:
            print(f"{name}: like eager", flush=True)


def expect_refusals(rank: int, ranks: int) -> None:
    """Asserts that ranks with other plans, and a cluster of another number of hosts, are refused on all ranks."""
    step, is_last, version = capture_step(random_network(0)), rank == ranks - 1, placewise.__version__
    problem, placement, order = random_plan(step, 0, ranks)
    expect_refusal(f"rank {ranks - 1} .* has another plan", problem, (placement + is_last) % (2 * ranks), order, step)
    expect_refusal("start one rank for each", Problem.of(step.graph, hosts_cluster(ranks + 1)), placement, order, step)
    vars(compiling)["__version__"] = "0.0.0" if is_last else version
    expect_refusal(f"rank {ranks - 1} .* has another version of placewise", problem, placement, order, step)
    vars(compiling)["__version__"] = version
    other = capture_step(random_network(1 if is_last else 0))
    problem, placement, order = random_plan(other, 0, ranks)
    expect_refusal(f"rank {ranks - 1} .* has another graph", problem, placement, order, other)


def expect_description(ranks: int) -> None:
    """Asserts that the hosts of all ranks become one cluster with links between all of them."""
    own = Cluster("detected", (Device("cpu:0", "cpu", 2**30, 1e9, 1e9),), (), description="detected: a CPU")
    found = describe_hosts(own)
    assert len({*found.host_names}) == len(found.devices) == ranks
    assert len(found.links) == ranks * (ranks - 1)
    assert all(link.bytes_per_second > 0 and link.latency_seconds >= 0 for link in found.links)


def expect_profile(ranks: int) -> None:
    """Asserts that all ranks get one profile with all devices, ops and links, whose predictions are then checked."""
    step, cluster = capture_step(random_network(7)), hosts_cluster(ranks)
    profile = profile_hosts(step, cluster, runs_step=True).profile
    graph, measured = apply_profile(step, cluster, profile)
    assert sorted(graph.ops.seconds) == sorted(cluster.device_names)
    assert not np.isnan(np.stack(list(graph.ops.seconds.values()))).any()
    assert len({device.part_of for device in profile.devices}) == ranks
    assert {(link.source, link.target) for link in profile.links} == {(link.source, link.target) for link in cluster.links}
    assert measured.link(0, len(kinds)).source_work.bytes_per_second < np.inf
    checked = check_predictions(step, cluster, profile)
    assert len(checked.checks) >= 2
    everyone = [""] * ranks
    dist.all_gather_object(everyone, format_profile(profile))
    assert len({*everyone}) == 1


def expect_refusal(words: str, problem: Problem, placement: Ints, order: Ints, step: CapturedStep) -> None:
    """Asserts that this rank's part is refused with these words."""
    with pytest.raises(ExecutionError, match=words):
        compile_part(problem, placement, order, step)


def soak(steps: int, ranks: int) -> None:
    """Runs a network for many steps and asserts that memory, threads and open files don't grow."""
    from soak.__main__ import describe, what_grew
    from soak.work import Sample

    step = capture_step(random_network(7))
    train_step, samples = compile_part(*random_plan(step, 7, ranks), step), []
    for number in range(steps):
        train_step((torch.randn(6, 4), torch.randn(6, 4)))
        if number % 10 == 9:
            samples.append(Sample.now(number))
    train_step.close()
    assert not what_grew(samples), what_grew(samples)
    print(f"rank {dist.get_rank()}: after {steps} steps {describe(samples[-1])}, nothing grew", flush=True)


def save_and_load(folder: Path, rank: int, ranks: int) -> None:
    """Saves after three steps, and compares the next three with those that another plan makes of the checkpoint."""
    batches = some_batches()
    saving, loading = part_of_network(3, ranks), part_without_values(4, ranks)
    eager = network_with_buffers(3)
    for batch in batches[:3]:
        (loss,) = eager_step(replace(eager, batch=batch))
        assert torch.equal(saving(batch), loss)
    save({"training": saving}, checkpoint_id=folder)
    losses = [float(saving(batch)) for batch in batches[3:]]
    load({"training": loading}, checkpoint_id=folder)
    assert [float(loading(batch)) for batch in batches[3:]] == losses
    print(f"rank {rank}: {json.dumps(losses)}", flush=True)


def part_of_network(seed: int, ranks: int) -> TrainStep:
    """Returns the network with buffers, placed at random, of which this rank makes its own weights only."""
    with DeferredWeights(min_bytes=0) as weights:
        network = network_with_buffers(seed)
    return part_with(network, weights, seed, ranks)


def part_without_values(seed: int, ranks: int) -> TrainStep:
    """Returns the same on the meta device, with memory for this rank's own weights only."""
    with torch.device("meta"):
        network = network_with_buffers(seed)
    return part_with(network, "empty", seed, ranks)


def part_with(network: TrainingStep, weights: DeferredWeights | str, seed: int, ranks: int) -> TrainStep:
    """Returns this rank's part; asserts that what other ranks keep has no memory here."""
    assert network.optimizer is not None
    assert all(parameter.is_meta for parameter in network.model.parameters())
    step = capture_step(replace(network, batch=(torch.zeros(6, 4), torch.zeros(6, 4))))
    train_step = compile_part(*random_plan(step, seed, ranks), step, weights)
    far = train_step.placed.far
    assert any(key == "exp_avg" for _, key in far)
    for name, parameter in network.model.named_parameters():
        assert parameter.is_meta == ((name, "") in far)
    assert not any(buffer.is_meta and (name, "") not in far for name, buffer in network.model.named_buffers())
    for name, parameter in network.model.named_parameters():
        for key, value in network.optimizer.state[parameter].items():
            assert value.is_meta == ((name, key) in far)
    with pytest.raises(ExecutionError, match="only its own part of the model"):
        train_step.collect()
    return train_step


def fail(fault: str, rank: int, ranks: int) -> None:
    """Runs steps until the last rank has this fault in its third one; the others print what they end with."""
    step = capture_step(random_network(7))
    train_step = compile_part(*random_plan(step, 7, ranks), step)
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    began = time.monotonic()
    try:
        for number in range(10):
            began = time.monotonic()
            train_step(batch if number < 2 or rank < ranks - 1 else faulty(fault, batch))
    except ExecutionError as problem:
        print(f"rank {rank} ends after {time.monotonic() - began:.1f} s: {problem}", flush=True)
    os._exit(0)  # without taking leave of the others, some of which have ended or hang


def faulty(fault: str, batch: Any) -> Any:
    """Ends or stops this process, waits for ever, or returns a batch that is refused."""
    if fault == "end":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "wait":
        time.sleep(1000)
    return batch[:1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--networks", type=int, default=0)
    parser.add_argument("--zoo", action="store_true")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--stand-in", action="store_true", help="each host's first device launches from the host")
    parser.add_argument("--fault", choices=["end", "stop", "wait", "fail"])
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("--init", default="env://")
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if options.stand_in:
        backends.BACKENDS["stand-in"] = "stand_in_accelerator:StandInAccelerator"
        kinds[0] = "stand-in"
    dist.init_process_group("gloo", options.init, timedelta(seconds=options.timeout), ranks, rank)
    if options.fault:
        fail(options.fault, rank, ranks)
    if options.checkpoint:
        save_and_load(options.checkpoint, rank, ranks)
        return
    compare_networks(options.networks, ranks)
    if options.zoo:
        compare_zoo(ranks)
    if options.steps:
        soak(options.steps, ranks)
    expect_refusals(rank, ranks)
    expect_description(ranks)
    if not options.stand_in:
        expect_profile(ranks)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank}: {options.networks} networks like eager")


if __name__ == "__main__":
    main()
