"""What a compiled step does besides being right: live state, refused batches, failures, no leaks, device maps, `run`."""

import copy
import gc
import importlib
import json
import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import refused
from eager_steps import Mixture, bitwise, eager_step, snapshot, token_batches
from executed import assert_runs_like_eager, compiled, cpu_cluster
from torch import Tensor, nn

import placewise as pw
from placewise.cli import main
from placewise.core.errors import ClusterError, ExecutionError, PlacewiseError, PlanError
from placewise.core.plan import Plan
from placewise.core.problem import Problem
from placewise.experiments.bench.executor_speed import hand_overs, launches, two_branches
from placewise.formats.cluster_file import write_cluster
from placewise.graph_capture.training_step import TrainingStep
from placewise.measure.random_batch import load_with_weights, random_batch
from placewise.models import load_step
from placewise.report.measured_trace import read_measured

MODEL = "rnnlm:layers=1,hidden=8,steps=3,batch=4,vocab=11"
LOOKS_UP = """
import torch
from torch import nn


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4)

    def forward(self, words):
        return self.words(words + 100)


def step():
    model = Words()
    words = torch.zeros(4, dtype=torch.long)
    return model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), (words, words)
"""
pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]


def small(device: str = "cpu") -> tuple[nn.Sequential, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        return model, torch.optim.Adam(model.parameters(), 0.01), (torch.randn(6, 4), torch.randn(6, 3))


def captured(model: nn.Module, optimizer: Any, batch: Any, **how: Any) -> Any:
    return pw.capture(model, nn.MSELoss(), optimizer, batch, **how)


def test_state_goes_to_another_model_and_back_between_steps() -> None:
    """Two compiled steps, one eager step, three more compiled ones from a checkpoint: all as eager code does it."""
    model, optimizer, batch = small()
    twin, twin_optimizer, _ = small()
    twin.load_state_dict(model.state_dict())
    train_step = compiled(captured(model, optimizer, batch))
    eager = captured(twin, twin_optimizer, batch).step
    for _ in range(2):
        assert torch.equal(train_step(batch), eager_step(eager)[0])
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    eager_step(captured(model, optimizer, batch).step)
    assert torch.equal(train_step(batch), (eager_step(eager), eager_step(eager))[1][0])
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    twin.load_state_dict(checkpoint[0])
    twin_optimizer.load_state_dict(copy.deepcopy(checkpoint[1]))
    for _ in range(3):
        assert torch.equal(train_step(batch), eager_step(eager)[0])
    assert all(bitwise(value, snapshot(model, optimizer)[key]) for key, value in snapshot(twin, twin_optimizer).items())


def test_a_schedule_of_the_learning_rate_is_followed() -> None:
    model, optimizer, batch = small()
    twin, twin_optimizer, _ = small()
    twin.load_state_dict(model.state_dict())
    train_step, eager = compiled(captured(model, optimizer, batch)), captured(twin, twin_optimizer, batch).step
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (optimizer, twin_optimizer)]
    for _ in range(6):
        assert torch.equal(train_step(batch), eager_step(eager)[0])
        for schedule in schedules:
            schedule.step()
    assert torch.equal(next(model.parameters()), next(twin.parameters()))


class CountsLate(torch.optim.Optimizer):
    """Uses its counter on the host, and raises it in place only behind that."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["count"] = torch.ones(())
            parameter.sub_(parameter.grad * state["count"])
            state["count"].mul_(0.5)


def test_an_op_reads_the_hosts_number_of_its_own_moment() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 3)
        return model, CountsLate(model.parameters())

    assert_runs_like_eager(build, nn.MSELoss(), [(torch.randn(6, 4), torch.randn(6, 3)) for _ in range(3)])


@pytest.mark.parametrize(
    ("batch", "rule"),
    [
        (
            ((torch.zeros(5, 4)), torch.zeros(6, 3)),
            r"batch\[0\]: .* float32 of shape \[6, 4\], got float32 of shape \[5, 4\]",
        ),
        ((torch.zeros(6, 4).double(), torch.zeros(6, 3)), r"batch\[0\]: .* float32 of shape .*, got float64 of shape"),
        ((torch.zeros(6, 4),), r"batch: the step was captured with 2 entries, got 1 entries"),
        ((torch.zeros(6, 4), 3), r"batch\[1\]: .* got 3"),
        ((torch.zeros(6, 4), torch.zeros(6, 3, device="meta")), r"batch\[1\]: is on the meta device and has no values"),
        ((torch.zeros(6, 4).to_sparse(), torch.zeros(6, 3)), r"batch\[0\]: .* got sparse_coo float32 of shape \[6, 4\]"),
    ],
)
def test_another_batch_is_refused(batch: Any, rule: str) -> None:
    model, optimizer, example = small()
    train_step = compiled(captured(model, optimizer, example))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ExecutionError, match=rule):
        train_step(batch)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_words_and_numbers_of_a_batch_must_be_the_same() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scale: int, *, words: dict[str, Any] | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(x) * scale

    model = Scaled(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train_step = compiled(captured(model, optimizer, ((torch.randn(6, 4), 2), torch.randn(6, 3))))
    with pytest.raises(ExecutionError, match=r"batch\[0\]\[1\]: the step was captured with 2, got 3"):
        train_step(((torch.randn(6, 4), 3), torch.randn(6, 3)))


def test_batches_of_other_strides_give_the_same() -> None:
    """A transposed window on a larger memory, and rows of another tensor."""
    model, optimizer, example = small()
    twin, twin_optimizer, _ = small()
    twin.load_state_dict(model.state_dict())
    train_step = compiled(captured(model, optimizer, example))
    for _ in range(2):
        batch = (torch.randn(4, 60).t()[::10], torch.randn(12, 3)[6:])
        plain = TrainingStep(twin, nn.MSELoss(), twin_optimizer, tuple(t.contiguous() for t in batch))
        assert torch.equal(train_step(batch), eager_step(plain)[0])


def test_rows_that_were_one_row_at_capture_must_be_one_row() -> None:
    """An expanded example is one row in memory, and so is all that the step reads of it."""
    model, optimizer, (_, target) = small()
    train_step = compiled(captured(model, optimizer, (torch.randn(1, 4).expand(6, 4), target)))
    train_step((torch.randn(1, 4).repeat(6, 1), target))
    with pytest.raises(ExecutionError, match=r"batch\[0\]: .* all the same along dimension 0"):
        train_step((torch.randn(6, 4), target))


def test_a_model_on_the_meta_device_is_refused() -> None:
    with pytest.raises(ExecutionError, match=r"0\.weight is on the meta device and has no values"):
        compiled(captured(*small("meta")))


@pytest.mark.parametrize(("change", "now"), [(nn.Module.double, "float64"), (nn.Module.half, "float16")])
def test_a_model_of_another_type_is_refused(change: Any, now: str) -> None:
    model, optimizer, batch = small()
    step = captured(model, optimizer, batch)
    train_step = compiled(step)
    change(model[2])
    rule = f"2.weight is {now} now, the step was captured with float32: make it float32 again"
    with pytest.raises(ExecutionError, match=re.escape(rule)):
        train_step(batch)
    with pytest.raises(ExecutionError, match=re.escape(rule)):
        compiled(step)
    model.float()
    assert train_step(batch).dtype == torch.float32


def test_a_model_that_has_lost_its_values_is_refused() -> None:
    model, optimizer, batch = small()
    step = captured(model, optimizer, batch)
    train_step = compiled(step)
    model[0].to("meta")
    with pytest.raises(ExecutionError, match=r"0\.weight is on the meta device and has no values"):
        train_step(batch)
    model[0].to_empty(device="cpu")
    nn.utils.parametrizations.weight_norm(model[2])
    rule = "the model has no 2.weight any more: capture and compile the step again"
    with pytest.raises(ExecutionError, match=re.escape(rule)):
        train_step(batch)
    with pytest.raises(ExecutionError, match=re.escape(rule)):
        compiled(step)


def test_state_that_the_optimizer_has_lost_is_made_anew() -> None:
    """A checkpoint of an optimizer that has taken no step has none: eager code goes on from there, too."""
    model, optimizer, batch = small()
    twin, twin_optimizer, _ = small()
    twin.load_state_dict(model.state_dict())
    fresh = copy.deepcopy(optimizer.state_dict())
    train_step, eager = compiled(captured(model, optimizer, batch)), captured(twin, twin_optimizer, batch).step
    for number in range(4):
        if number == 2:
            optimizer.load_state_dict(fresh)
            twin_optimizer.load_state_dict(fresh)
        assert torch.equal(train_step(batch), eager_step(eager)[0])
    assert all(bitwise(value, snapshot(model, optimizer)[key]) for key, value in snapshot(twin, twin_optimizer).items())


def test_dampening_is_refused_before_the_first_step() -> None:
    model, _, batch = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(ExecutionError, match="take it in eager code"):
        compiled(captured(model, optimizer, batch))
    eager_step(captured(model, optimizer, batch).step)
    assert compiled(captured(model, optimizer, batch))(batch).isfinite()


@pytest.mark.parametrize("seed", range(4))
def test_a_failing_op_ends_the_step_and_the_next_one_runs(seed: int) -> None:
    """A token that is not in the table: IndexError, from whichever thread it comes; nobody waits for ever."""
    model = Mixture()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens, target = token_batches()[0]
    train_step = compiled(pw.capture(model, nn.CrossEntropyLoss(), optimizer, (tokens, target)), seed, devices=3)
    for _ in range(3):
        with pytest.raises(IndexError):
            train_step((tokens + 100, target))
        assert train_step((tokens, target)).isfinite()


def test_inference_returns_what_the_model_returns() -> None:
    model = Mixture().eval()
    tokens = torch.randint(11, (8, 5))
    expected = copy.deepcopy(model)(tokens)
    assert torch.equal(compiled(pw.capture_inference(model, tokens))(tokens), expected)


def test_nothing_leaks_over_a_thousand_steps() -> None:
    model, optimizer, batch = small()
    train_step = compiled(captured(model, optimizer, batch), devices=2)

    def usage() -> tuple[int, int]:
        gc.collect()
        return len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for _ in range(100):
        train_step(batch)
    objects, kilobytes = usage()
    for _ in range(1000):
        train_step(batch)
    more_objects, more_kilobytes = usage()
    assert more_objects - objects < 50
    assert more_kilobytes - kilobytes < 2000  # a thousand steps that each kept 100 numbers more would be 400 KB


def test_closing_ends_the_threads() -> None:
    import threading

    train_step = compiled(captured(*small()))
    names = {thread.name for thread in threading.enumerate()}
    assert any(name.startswith("placewise cpu:") for name in names)
    before = threading.active_count()
    del train_step
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("placewise cpu:"):
            thread.join(timeout=0.2)
    assert threading.active_count() < before


def test_a_closed_step_is_refused() -> None:
    """Its threads have ended: it would wait for them for ever."""
    model, optimizer, batch = small()
    train_step = compiled(captured(model, optimizer, batch))
    train_step(batch)
    train_step.close()
    for _ in range(2):
        with pytest.raises(ExecutionError, match="is closed"):
            train_step(batch)


# --- plans ---


def plan_of(step: Any, device_of: Any) -> Plan:
    """Returns a plan by the name of the first op of each group."""
    graph = step.graph
    names: list[str] = ["cpu:0"] * graph.num_groups
    for op in reversed(range(len(graph.ops))):
        names[graph.ops.groups[op]] = device_of(graph.ops.names[op])
    return Plan(tuple(names))


def test_a_plan_compiles() -> None:
    model, optimizer, batch = small()
    step = captured(model, optimizer, batch)
    plan = plan_of(step, lambda name: "cpu:1" if name.startswith("2") else "cpu:0")
    train_step = plan.compile(step, cpu_cluster())
    first = train_step(batch)
    assert float(train_step(batch)) < float(first)
    assert {type(s).__name__ for s in train_step.placed.instructions.sequence} == {"RunOp", "CopyTensor", "FreeTensor"}
    with pytest.raises(PlanError, match="there is no device 'cpu:1'"):
        plan.compile(step, cpu_cluster(1))
    with pytest.raises(ExecutionError, match="cuda_graphs: cluster 'cpus' has no GPU"):
        plan.compile(step, cpu_cluster(), cuda_graphs=True)


def test_a_plan_for_another_machine_says_which_machine_was_taken() -> None:
    model, optimizer, batch = small()
    step = captured(model, optimizer, batch)
    plan = replace(plan_of(step, lambda name: "cpu:7"), cluster="my own")
    with pytest.raises(PlanError, match="no cluster was given, so this machine was detected"):
        plan.compile(step)


def test_a_plan_that_was_saved_on_the_command_line_compiles_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step is called `branches:step` there, and by its class here."""
    (tmp_path / "branches.py").write_text(LOOKS_UP.replace(" + 100", ""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_cluster(cpu_cluster(), "cpus.toml")
    assert main(["place", "branches:step", "--cluster", "cpus.toml", "--budget", "1", "-o", "plan.json"]) == 0
    parts = importlib.import_module("branches").step()
    assert Plan.load("plan.json").compile(pw.capture(*parts), "cpus.toml")(parts[3]).isfinite()


def test_what_is_no_step_is_refused() -> None:
    model, optimizer, batch = small()
    step = captured(model, optimizer, batch)
    with pytest.raises(
        PlacewiseError, match=re.escape("step must be a captured step (placewise.capture) or a Graph, got a Sequential")
    ):
        pw.place(model, cpu_cluster(), evaluations=1)  # type: ignore[arg-type]
    with pytest.raises(ExecutionError, match=re.escape("step must be a captured step (placewise.capture), got a Graph")):
        pw.place(step, "laptop", evaluations=1).compile(step.graph)
    with pytest.raises(PlacewiseError, match=re.escape("model must be a torch.nn.Module, got a function")):
        pw.capture(lambda x: x, nn.MSELoss(), optimizer, batch)  # type: ignore[arg-type]
    with pytest.raises(PlacewiseError, match=re.escape("optimizer must be a torch.optim.Optimizer or None, got a type")):
        pw.capture(model, nn.MSELoss(), torch.optim.Adam, batch)  # type: ignore[arg-type]


def test_what_is_no_machine_is_refused(tmp_path: Path) -> None:
    model, optimizer, batch = small()
    step = captured(model, optimizer, batch)
    plan = plan_of(step, lambda name: "cpu:0")
    with pytest.raises(ClusterError, match="cluster must be a Cluster, or the name of a preset or a file, got a Sequential"):
        plan.compile(step, model)
    for virtual in (4, "cuda:0=4", {"cuda:0": "4"}):
        with pytest.raises(
            ExecutionError, match=re.escape('virtual must be a dict from GPUs to numbers of slices, as in {"cuda:0"')
        ):
            plan.compile(step, cpu_cluster(), virtual=virtual)  # type: ignore[arg-type]
    write_cluster(cpu_cluster(), tmp_path / "cpus.toml")
    assert plan.compile(step, tmp_path / "cpus.toml")(batch).isfinite()


def test_device_maps() -> None:
    step = captured(*small())
    by_layer = plan_of(step, lambda name: "gpu:1" if name.startswith("2") else "cpu:0")
    assert by_layer.device_map(step) == {"0": torch.device("cpu"), "1": torch.device("cpu"), "2": 1}
    whole = plan_of(step, lambda name: "gpu:0")
    assert whole.device_map(step.graph) == {"": 0}
    split = plan_of(step, lambda name: "gpu:0" if name.startswith("2.") and "backward" in name else "cpu:0")
    with pytest.raises(ExecutionError, match=r"it splits 2 \((cpu:0, gpu:0|gpu:0, cpu:0)\)"):
        split.device_map(step)
    odd = plan_of(step, lambda name: "left")
    with pytest.raises(ExecutionError, match="device 'left': Accelerate knows only gpu:0"):
        odd.device_map(step)
    with pytest.raises(PlanError, match="placement has 1 entries"):
        Plan(("gpu:0",)).device_map(step)
    with pytest.raises(PlanError, match="plan: is for another graph"):
        replace(whole, graph_digest="0123456789abcdef").device_map(step)
    with pytest.raises(PlacewiseError, match=re.escape("a captured step (placewise.capture) or a Graph, got a Sequential")):
        whole.device_map(step.step.model)


@pytest.mark.parametrize(
    ("strategy", "grouping"), [("balanced", "colocated"), ("expert", "colocated"), ("random", "module")]
)
@pytest.mark.parametrize("model", ["gpt:layers=2,hidden=16,heads=2,length=8,batch=4,vocab=13", MODEL])
def test_plans_by_module_have_device_maps_that_cover_the_model(model: str, strategy: str, grouping: str) -> None:
    step = load_step(model)
    plan = pw.place(step, pw.Cluster.load("2xK80"), strategy=strategy, grouping=grouping, evaluations=5)
    names = plan.device_map(step)
    for tensor in step.step.model.state_dict():
        assert [name for name in names if not name or tensor == name or tensor.startswith(f"{name}.")], tensor


def test_accelerate_takes_a_device_map() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, optimizer, batch = small()
    step = captured(model, optimizer, batch)
    names = plan_of(step, lambda name: "cpu").device_map(step)
    expected = model(batch[0])
    assert torch.equal(accelerate.dispatch_model(model, names)(batch[0]), expected)


# --- the command ---


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    step = load_with_weights(MODEL)
    problem = Problem.of(step.graph, cpu_cluster())
    placement = np.random.default_rng(0).integers(0, 2, problem.num_groups)
    Plan(problem.expand(placement)).save(tmp_path / "plan.json")
    write_cluster(problem.cluster, tmp_path / "cpus.toml")
    return str(tmp_path / "plan.json"), str(tmp_path / "cpus.toml")


def test_run_says_measured_beside_predicted(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, cluster = files
    trace = str(tmp_path / "trace.json")
    given = ["run", MODEL, "--cluster", cluster, "--plan", plan, "--steps", "3", "--trace", trace]
    assert main([*given, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["steps"]) == 3
    assert result["step_seconds"] > 0
    assert result["peak_bytes"] == result["predicted_peak_bytes"]
    measured = read_measured(trace, Problem.of(load_with_weights(MODEL).graph, cpu_cluster()))
    assert len(measured.ops) == sum(result["ops"].values())
    assert (measured.end >= measured.start).all()
    assert main(given) == 0
    text = capsys.readouterr().out
    assert "a step, median of 3; predicted" in text
    assert "cpu:1" in text


def test_run_refuses(files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, cluster = files
    rest = ["--cluster", cluster, "--plan", plan]
    assert "placement has" in refused(["run", "cifar-cnn:batch=2", *rest], capsys)
    assert "--together: needs a --profile" in refused(["run", MODEL, *rest, "--together"], capsys)
    with pytest.raises(SystemExit) as refusal:
        main(["run", MODEL, *rest, "--seed", "9" * 30])
    assert refusal.value.code == 2
    capsys.readouterr()
    if not torch.cuda.is_available():
        assert "has 2 GPUs, this machine has 0" in refused(["run", MODEL, "--cluster", "2xK80", "--plan", plan], capsys)


def test_an_op_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It looks up the 100th of 5 words, which only a real step finds out."""
    (tmp_path / "looks_up.py").write_text(LOOKS_UP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_cluster(cpu_cluster(), "cpus.toml")
    plan_of(load_with_weights("looks_up:step"), lambda name: "cpu:0").save("plan.json")
    given = ["looks_up:step", "--cluster", "cpus.toml"]
    message = refused(["run", *given, "--plan", "plan.json", "--trace", "trace.json"], capsys)
    assert "looks_up:step: an op of the step fails: IndexError: index out of range" in message
    assert "an op of the step fails: IndexError" in refused(["place", *given, "--measure", "-o", "found.json"], capsys)
    assert not any(map(Path.exists, map(Path, ("trace.json", "found.json"))))


def test_tokens_of_a_random_batch_are_within_the_vocabulary() -> None:
    step = load_with_weights("nmt:layers=1,hidden=8,length=6,batch=64,vocab=7")
    (source, target), labels = random_batch(step)
    for tokens in (source, target, labels):
        assert sorted(set(tokens.flatten().tolist())) == list(range(7))


def test_the_benchmark_has_a_row_for_each_comparison() -> None:
    rows = [two_branches(rounds=1), launches("cpu", rounds=2), hand_overs(rounds=2)]
    assert all(
        row["microseconds"] > 0 and row["ratio"] == pytest.approx(row["microseconds"] / row["against"]) for row in rows
    )
    assert "2,040 ops" in rows[1]["what"]
