"""The profiler on this machine's CPUs: signatures, values, times, links, contention and what the commands make of them."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from builders import wired
from command_line import refused
from torch import nn

import placewise as pw
from placewise.bounds.best_bound import Bound, bound
from placewise.cli import main
from placewise.core.cluster import Cluster
from placewise.core.plan import Plan
from placewise.core.problem import Problem
from placewise.core.profile import Contention, Profile, ProfiledDevice
from placewise.formats.cluster_file import parse_cluster, read_cluster
from placewise.formats.graph_file import read_graph, write_graph
from placewise.formats.profile_file import read_profile, write_profile
from placewise.graph_capture.capture import CapturedStep
from placewise.machines.presets import preset
from placewise.machines.virtual import cut_devices
from placewise.measure.clocks import Clock
from placewise.measure.contended_schedule import busy_neighbours, schedule_together
from placewise.measure.cpu_instrument import CpuInstrument
from placewise.measure.links import fit_line
from placewise.measure.ops import RunnableOp, op_calls
from placewise.measure.ops_in_steps import STEPS, op_timings_in_steps
from placewise.measure.profiler import apply_profile, measure_profile
from placewise.run.backends.cpu_threads import Cancelled
from placewise.run.devices import RealDevice, real_devices
from placewise.run.step.compiling import compile_placement
from placewise.run.step.residents import Residents
from placewise.search import planner as placing
from placewise.simulate.simulator import Simulator


def two_cpus() -> Cluster:
    cpu = {"kind": "cpu", "memory": "1GiB", "flops": 1e10, "bytes_per_second": 1e10}
    link = {"latency_seconds": 1e-5, "bytes_per_second": 1e9}
    devices = [{"name": "cpu:0", **cpu}, {"name": "cpu:1", **cpu}]
    return parse_cluster({"name": "two", "devices": devices, "default_link": link})


class Words(nn.Module):
    """Looks up words, and guesses the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.output = nn.Linear(8, 13)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.output(self.embedding(words))
        return found


def words_step() -> CapturedStep:
    model = Words()
    batch = (torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    return pw.capture(model, nn.functional.cross_entropy, torch.optim.Adam(model.parameters()), batch, name="words")


def mlp_step(batch: int = 4) -> tuple[nn.Module, Any, torch.optim.Optimizer, Any]:
    """A MODEL of the command line."""
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    batches = (torch.zeros(batch, 6), torch.zeros(batch, 3))
    return model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), batches


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def signatures_of(step: CapturedStep) -> list[str]:
    return [call.signature for call in op_calls(step.program, len(step.graph.ops))]


def test_a_signature_says_function_shapes_types_and_plain_arguments() -> None:
    found = signatures_of(pw.capture(*mlp_step()))
    assert found[0] == "aten.addmm.default(float32[5], float32[4, 6], float32[6, 5] by [1, 6])"
    assert "aten.relu.default(float32[4, 5])" in found
    assert len(found) > len(set(found)), "equal ops have equal signatures"
    assert found != signatures_of(pw.capture(*mlp_step(batch=8)))


def test_the_hosts_numbers_do_not_count() -> None:
    """Adam's divisions by numbers of the host have one signature for each shape, whatever the numbers are."""
    found = [signature for signature in signatures_of(words_step()) if "addcdiv" in signature]
    assert len(found) == 3
    assert all("value=float" in signature for signature in found)


def test_values_are_ones_that_the_ops_can_take() -> None:
    """Words of an embedding of 13 are below 13, floats are probabilities, and what runs in place is restored."""
    calls = op_calls(words_step().program, len(words_step().graph.ops))
    by_name = {call.signature.partition("(")[0]: call for call in calls}
    work = RunnableOp(by_name["aten.embedding.default"], "cpu")
    weight, words = work._args[:2]
    assert 0 <= words.min() <= words.max() < 13
    assert 0 < weight.min() <= weight.max() < 1
    in_place = RunnableOp(by_name["aten.addcdiv_.default"], "cpu")
    before = in_place._args[0].clone()
    in_place.run()
    assert in_place.changes_inputs
    assert not torch.equal(in_place._args[0], before)
    in_place.restore()
    assert torch.equal(in_place._args[0], before)


def test_every_op_gets_a_time_and_every_pair_a_link() -> None:
    step, cluster = words_step(), two_cpus()
    found = measure_profile(step, cluster)
    assert found.failures == ()
    assert found.num_signatures == len(set(signatures_of(step)))
    graph, measured = apply_profile(step, cluster, found.profile)
    problem = Problem.of(graph, measured)
    assert (problem.op_seconds > 0).all()
    assert (problem.op_seconds < 0.1).all()
    np.testing.assert_array_equal(problem.op_seconds[:, 0], problem.op_seconds[:, 1])
    assert {(link.source, link.target) for link in found.profile.links} == {("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")}
    assert all(1e6 < link.bytes_per_second < 1e13 for link in found.profile.links)
    factors = vars(found.profile.contention["cpu"])
    assert [len(factors[name]) for name in ("compute", "memory", "memory_beside_compute", "copies")] == [2, 2, 2, 1]
    assert factors["cache_bytes"] == 0
    assert graph.untimed_digest == step.graph.digest


def test_a_device_without_memory_for_whole_steps_has_no_times_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the model may have a place there."""

    def has_no_place(residents: Residents, batch: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    step, cluster = words_step(), two_cpus()
    monkeypatch.setattr(Residents, "gather", has_no_place)
    assert op_timings_in_steps(step, cluster.devices[0], real_devices(cluster)[0], signatures_of(step)) == {}


def test_ops_of_a_cpu_are_timed_in_whole_steps() -> None:
    """Every op in each of some steps; together they take what a step takes, so that one device is predicted well."""
    step = words_step()
    before = [parameter.detach().clone() for parameter in step.step.model.parameters()]
    profile = measure_profile(step, two_cpus(), runs_step=True).profile
    assert any(not torch.equal(a, b) for a, b in zip(before, step.step.model.parameters(), strict=True))
    found = Counter(signatures_of(step))
    assert {signature: timings["cpu:0"].count for signature, timings in profile.timings.items()} == {
        signature: STEPS * count for signature, count in found.items()
    }
    graph, cluster = apply_profile(step, two_cpus(), profile)
    problem = Problem.of(graph, cluster)
    predicted = Simulator(problem).schedule(np.zeros(problem.num_groups, np.int64)).step_seconds
    train_step = compile_placement(problem, np.zeros(problem.num_groups, np.int64), None, step, real_devices(two_cpus()))
    measured = np.median([timed(partial(train_step, step.step.batch)) for _ in range(9)])
    assert measured / 3 < predicted < measured * 3  # the machine may be busy with other things


def test_an_interrupted_measurement_ends_with_the_stretch_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the thread that waits; the one that measures has 100 s of work left."""
    begun, ends = Event(), []

    def interrupted(*_: object) -> None:
        begun.wait()
        raise KeyboardInterrupt

    def measure(clock: Clock) -> None:
        begun.set()
        for _ in range(10_000):
            try:
                clock.seconds(partial(time.sleep, 0.01), 1)
            except Cancelled:
                ends.append("stopped")
                return

    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        CpuInstrument().run(RealDevice("cpu:0", "cpu", "cpu", threads=1), measure)
    assert ends == ["stopped"]


def test_a_line_is_fitted_through_copies() -> None:
    """10 µs and 1 GB/s: exactly on the line; a line that begins below zero has no latency."""
    sizes = (1000, 10_000, 1_000_000)
    latency, bandwidth = fit_line(sizes, [1e-5 + size / 1e9 for size in sizes])
    assert latency == pytest.approx(1e-5)
    assert bandwidth == pytest.approx(1e9)
    assert fit_line(sizes, [1e-7, 1e-5, 1e-2])[0] == 0.0
    assert fit_line(sizes, [2e-5, 2e-5, 1e-5]) == pytest.approx((1e-5, 1e11))


# --- devices that share hardware ---


def shared(*factors: float) -> Profile:
    devices = tuple(ProfiledDevice(name, "cpu", "", "cpu:0", 2) for name in ("cpu:0", "cpu:1"))
    return Profile(devices, {}, contention={"cpu": Contention(factors, factors)})


def test_ops_side_by_side_slow_each_other_down() -> None:
    """Two ops of 2 s that nothing joins, one on each device: each takes twice as long beside the other."""
    graph = wired([], 2, seconds=[{"cpu": 2.0}, {"cpu": 2.0}])
    problem = Problem.of(graph, two_cpus())
    together, alone = np.array([0, 1]), np.array([0, 0])
    assert schedule_together(problem, shared(1.0, 2.0), together).step_seconds == pytest.approx(4.0, rel=0.05)
    assert schedule_together(problem, shared(1.0, 2.0), alone).step_seconds == pytest.approx(4.0)
    assert schedule_together(problem, shared(1.0), together).step_seconds == pytest.approx(2.0)


def test_only_the_time_side_by_side_counts() -> None:
    """An op of 3 s beside one of 1 s: it has company for a third of its time, the other one for all of it."""
    problem = Problem.of(wired([], 2, seconds=[{"cpu": 3.0}, {"cpu": 1.0}]), two_cpus())
    schedule = Simulator(problem).schedule(np.array([0, 1]))
    np.testing.assert_allclose(np.sum(busy_neighbours(schedule, shared(1.0, 2.0)), axis=0), [1 / 3, 1.0])


def test_copies_between_busy_devices_take_longer() -> None:
    """cpu:0 makes a tensor and works on while it is copied to cpu:1, which waits for it: one of the two is busy."""
    graph = wired([(0, 1)], 3, seconds=[{"cpu": 1.0}, {"cpu": 1.0}, {"cpu": 30.0}])
    cluster = two_cpus()
    links = tuple(replace(link, bytes_per_second=0.5, latency_seconds=0.0) for link in cluster.links)
    problem = Problem.of(graph, replace(cluster, links=links))
    placement = np.array([0, 1, 0])
    profile = replace(shared(1.0, 1.0), contention={"cpu": Contention(copies=(1.0, 3.0, 9.0))})
    for schedule, seconds in (
        (Simulator(problem).schedule(placement), 2.0),
        (schedule_together(problem, profile, placement), 6.0),
    ):
        assert schedule.timeline.copy_end[0] - schedule.timeline.copy_start[0] == pytest.approx(seconds, rel=0.02)


# --- devices in pieces ---


def test_a_gpu_in_four_pieces() -> None:
    whole = preset("2xK80")
    cut = cut_devices(whole, {"gpu:0": 4})
    assert cut.device_names == ("gpu:0", "gpu:1", "gpu:2", "gpu:3", "gpu:4", "cpu:0")
    assert cut.devices[3].memory_bytes == whole.devices[0].memory_bytes // 4
    assert cut.devices[4] == replace(whole.devices[1], name="gpu:4")
    assert cut.bytes_per_second[0, 1] == whole.devices[0].bytes_per_second / 2
    assert cut.bytes_per_second[2, 5] == whole.bytes_per_second[0, 2]
    assert cut.channels[0, 5] == cut.channels[3, 5] != cut.channels[4, 5], "slices share their GPU's way"
    assert cut.channels[0, 1] != cut.channels[1, 0]


def test_a_device_that_is_not_there_is_not_cut() -> None:
    with pytest.raises(pw.PlacewiseError, match="there is no device 'gpu:9' to cut"):
        cut_devices(preset("2xK80"), {"gpu:9": 2})


# --- commands ---

MODEL = "test_profile:mlp_step"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with a cluster of two CPUs, where the tests' own MODEL can be found."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    assert main(["detect", "--cpus", "2", "-o", "two.toml"]) == 0
    capsys.readouterr()
    return tmp_path


def test_a_profile_serves_all_commands(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A measured graph file, and the model with --profile, are the same problem; a plan of one holds for the other."""
    where = ["--cluster", "two.toml"]
    made = ["-o", "p.json", "--graph", "g.json.gz", "--cluster-out", "m.toml"]
    assert main(["profile", MODEL, *where, *made, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["failures"] == []
    assert facts["signatures"] < facts["ops"]
    profile = read_profile("p.json")
    assert {device.name for device in profile.devices} == {"cpu:0", "cpu:1"}
    from_file = Problem.of(read_graph("g.json.gz"), read_cluster("m.toml"))
    assert len(from_file.graph.ops.seconds) == 2
    searched = ["--strategy", "heft", "--profile", "p.json", "-o", "plan.json", "--json"]
    assert main(["place", MODEL, *where, *searched]) == 0
    step_seconds = json.loads(capsys.readouterr().out)["step_seconds"]
    assert main(["simulate", MODEL, *where, "--plan", "plan.json", "--profile", "p.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == step_seconds
    assert main(["simulate", "g.json.gz", "--cluster", "m.toml", "--plan", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == step_seconds
    together = ["--plan", "plan.json", "--profile", "p.json", "--together", "--json"]
    assert main(["simulate", MODEL, *where, *together]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] >= step_seconds * 0.999
    assert main(["bound", MODEL, *where, "--profile", "p.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bound_seconds"] <= step_seconds
    shown = ["report", "plan.json", "--graph", MODEL, *where, "-o", "page.html", "--json"]
    pages = []
    for times in ([], ["--profile", "p.json"]):
        assert main([*shown, *times]) == 0
        pages.append(json.loads(capsys.readouterr().out)["plans"][0]["step_seconds"])
    assert pages[0] != pages[1] == step_seconds


def test_the_bound_is_that_of_devices_alone(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It must hold for all placements, so the company that this one's devices keep has no part in it."""
    step = pw.capture(*mlp_step())
    slow = {"cpu": Contention((1.0, 3.0), (1.0, 3.0), (1.0, 3.0))}
    write_profile(replace(measure_profile(step, read_cluster("two.toml")).profile, contention=slow), "p.json")
    plan = ["--cluster", "two.toml", "--profile", "p.json"]
    assert main(["place", MODEL, *plan, "--strategy", "round-robin", "-o", "plan.json"]) == 0
    found: list[Problem] = []

    def keep(problem: Problem) -> Bound:
        found.append(problem)
        return bound(problem)

    monkeypatch.setattr(placing, "find_bound", keep)
    for together in ([], ["--together"]):
        assert main(["simulate", MODEL, *plan, "--plan", "plan.json", *together]) == 0
    capsys.readouterr()
    assert np.array_equal(found[0].op_seconds, found[1].op_seconds)


def test_what_was_not_measured_is_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", MODEL, "--cluster", "two.toml", "-o", "p.json"]) == 0
    assert "signatures of" in capsys.readouterr().out
    asked = ["--profile", "p.json", "--plan", "none.json"]
    assert "p.json: has no device 'gpu:0'" in refused(["bound", MODEL, "--cluster", "2xK80", "--profile", "p.json"], capsys)
    assert "there is no such file" in refused(["simulate", MODEL, "--cluster", "two.toml", *asked], capsys)
    assert "needs a --profile" in refused(
        ["simulate", MODEL, "--cluster", "two.toml", "--plan", "x.json", "--together"], capsys
    )
    assert "need --measure" in refused(["place", MODEL, "--cluster", "two.toml", "--steps", "3"], capsys)


def test_a_terminal_shows_what_is_measured(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that is written over, and in the end taken away; nothing with --json."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    command = ["profile", MODEL, "--cluster", "two.toml", "-o", "p.json"]
    assert main(command) == 0
    count = len(read_profile("p.json").timings)
    lines = [line.removesuffix("\x1b[K") for line in capsys.readouterr().err.split("\r")]
    expected = [f"{n} of {count} signatures on cpu:0" for n in range(count)]
    assert [line.partition(",")[0] for line in lines] == ["", *expected, "links", "contention", ""]
    assert lines[1] == f"0 of {count} signatures on cpu:0, 0 s"
    assert main([*command, "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_a_plan_or_a_profile_is_no_model(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where, profile = ["--cluster", "two.toml"], ["--profile", "p.json"]
    write_profile(shared(1.0), "p.json")
    Plan(("cpu:0",)).save("plan.json")
    rule = "MODEL must be a zoo name with options (nmt:layers=4), or package.module:function"
    for file, what in (("p.json", "a profile"), ("plan.json", "a plan")):
        for command in (
            ["profile", "-o", "x.json"],
            ["run", "--plan", "plan.json"],
            ["bound", *profile],
            ["place", "--measure"],
        ):
            assert refused([command[0], file, *where, *command[1:]], capsys) == f"placewise: {file}: is {what}, {rule}\n"
    write_graph(pw.capture(*mlp_step()).graph, "g.json")
    assert "g.json: is a graph file" in refused(["profile", "g.json", *where, "-o", "x.json"], capsys)


def test_nothing_is_written_for_a_machine_that_is_not_here(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    assert "has 2 GPUs, this machine has 0" in refused(["profile", MODEL, "--cluster", "2xK80", "-o", "p.json"], capsys)
    for command in (["place"], ["compare", "--strategies", "expert"]):  # before the model, which there is none of
        assert "this machine has 0" in refused([*command, "no-such-model", "--cluster", "2xK80", "--measure"], capsys)
    assert not Path("p.json").exists()


def test_detect_measures_what_it_describes(files: Path) -> None:
    assert main(["detect", "--cpus", "2", "--measure", "-o", "m.toml"]) == 0
    measured, guessed = read_cluster("m.toml"), read_cluster("two.toml")
    assert measured.device_names == guessed.device_names == ("cpu:0", "cpu:1")
    assert measured.devices[0].memory_bytes == guessed.devices[0].memory_bytes
    assert measured.devices[0].flops != guessed.devices[0].flops
    assert all(1e8 < device.flops < 1e13 and 1e8 < device.bytes_per_second < 1e13 for device in measured.devices)
