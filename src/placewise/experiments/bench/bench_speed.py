"""How fast whole steps are on one device: `placewise bench speed`.

Every way to run a step has a process of its own, so that one's memory, heap and compiled code don't help or hurt another.
The processes take turns: while one runs a step, the others wait.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from placewise.core.errors import CaptureError, InputError, ModelError, PlacewiseError, one_line
from placewise.core.suggestions import did_you_mean
from placewise.experiments.bench import Benchmark, Findings, Rows, option
from placewise.experiments.bench.step_kernels import Kernels, differences, kernels_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from placewise.graph_capture.training_step import TrainingStep

EAGER, COMPILED, OURS, GRAPHS = "eager", "torch.compile", "placewise", "placewise-cuda-graphs"

FUSED, FUSED_GRAPHS = "placewise-fused", "placewise-fused-cuda-graphs"

CHECKPOINTED, ON_CPU, PLAN = "checkpointing", "save-on-cpu", "plan"

MORE_WAYS = (CHECKPOINTED, ON_CPU, PLAN)  # that spare memory, if they are asked for

WAYS = {  # by kind of device
    "cpu": (EAGER, COMPILED, OURS, FUSED),
    "gpu": (EAGER, COMPILED, OURS, GRAPHS, FUSED, FUSED_GRAPHS),
}

OUTSIDE = "placewise.experiments.outside_models"  # of transformers and torchvision

MODELS = {
    "cpu": ("gpt:batch=1,length=128", "resnet:batch=4", "inception-v3:batch=4", "rnnlm:batch=16"),
    "gpu": (
        *(f"{OUTSIDE}:{name}" for name in ("wide_llama_in_bf16", "wide_llama_bf16", "wide_llama")),
        *("resnet:batch=128", "inception-v3:batch=128", "gpt:batch=32,length=512,micro_batches=8"),
        *(f"{OUTSIDE}:{name}" for name in ("wide_bert_bf16", "vit_bf16", "t5_bf16", "convnext_bf16", "unet_bf16")),
    ),
}

WARM_UP = 3  # steps: torch.compile compiles in the first one, and libraries choose their kernels

NO_FIGURE = "-"


@dataclass(frozen=True)
class StepSpeed(Benchmark):
    """Whole steps on one device: eager PyTorch, torch.compile and placewise, in turns."""

    models: tuple[str, ...] = option(
        "models", "default: some of the zoo, and on a GPU of transformers and torchvision", default=()
    )
    device: str = option("choice", "where the steps run", default="cpu", choices=("cpu", "gpu"))
    ways: tuple[str, ...] = option(
        "list",
        "only these of eager, torch.compile, placewise, placewise-fused and both with -cuda-graphs; also "
        "checkpointing, save-on-cpu, plan",
    )
    plan: str | None = option("file", "what the way `plan` runs: a plan of the only model, with its cluster", "PLAN")
    rounds: int = option("positive", "steps of each way that are measured, after the warm-up", default=9)
    seed: int = option("count", "random seed of the weights and the batch", default=0)
    kernels: bool = option(
        "flag", "instead: which kernels placewise launches more or less often than eager code", default=False
    )

    def run(self) -> Findings:
        """Measures one model after the other."""
        ways = self._ways()
        models = self.models or MODELS[self.device]
        if (self.plan is not None) != (PLAN in ways) or (self.plan is not None and len(models) > 1):
            raise InputError("--plan: give the plan of one MODEL, and `plan` among the --ways")
        for model in models:
            _check(model)
        rows: Rows = []
        warnings: list[str] = []
        try:
            for model in models:
                if self.kernels:
                    found, problems = compare_kernels(model, self.device, self.seed)
                else:
                    found, problems = compare_ways(model, ways, self.device, self.rounds, self.seed, self.plan)
                rows += found
                warnings += problems
        except KeyboardInterrupt:
            return Findings({self.name(): rows}, _table(rows), tuple(warnings), is_complete=False)
        return Findings({self.name(): rows}, _table(rows), tuple(warnings))

    def _ways(self) -> tuple[str, ...]:
        known = (*WAYS[self.device], *MORE_WAYS)
        for way in self.ways or ():
            if way not in known:
                raise InputError(f"--ways: there is no way {way!r} on a {self.device}: {did_you_mean(way, known)}")
        if self.device == "gpu":
            import torch

            if not torch.cuda.is_available():
                raise InputError("--device gpu: PyTorch finds no GPU here")
        return tuple(self.ways or (*WAYS[self.device], *([] if self.plan is None else [PLAN])))


def _check(model: str) -> None:
    """Refuses what is no model; one that can't be captured may still run in eager code."""
    from placewise.models import load_step

    with suppress(CaptureError):
        load_step(model)


def _table(rows: Rows) -> str:
    from placewise.experiments.bench import table_of

    return table_of(rows) if rows else "nothing was measured"


# --- turns ---


def compare_ways(
    model: str, ways: Sequence[str], device: str, rounds: int, seed: int = 0, plan: str | None = None
) -> tuple[Rows, list[str]]:
    """Returns a row for each way to run a model's step, and what went wrong."""
    with ExitStack() as stack:
        runners: dict[str, _Runner] = {}
        for way in ways:  # one after the other, so that no warm-up slows another one down
            runners[way] = stack.enter_context(_started(model, way, device, seed, plan))
            runners[way].wait()
        for _ in range(rounds):
            for runner in runners.values():
                runner.step()
        for runner in runners.values():
            runner.end()
    first = runners.get(EAGER)
    rows = [runner.row(model, way, first) for way, runner in runners.items()]
    return rows, [f"{model}, {way}: {runner.problem}" for way, runner in runners.items() if runner.problem]


def compare_kernels(model: str, device: str, seed: int = 0) -> tuple[Rows, list[str]]:
    """Returns the kernels that eager code and placewise launch differently often, and what went wrong."""
    found: dict[str, Kernels] = {}
    for way in (EAGER, OURS):
        with _started(model, way, device, seed, None) as runner:
            runner.wait()
            found[way] = runner.kernels()
            if runner.problem:
                return [], [f"{model}, {way}: {runner.problem}"]
    return differences(model, found[EAGER], found[OURS], (EAGER, OURS)), []


class _Runner:
    """A process that runs steps when it is asked to."""

    def __init__(self, connection: "Connection") -> None:
        self._connection = connection
        self.seconds: list[float] = []
        self.peak_bytes = self.loss = 0.0
        self.problem = ""

    def _ask(self, question: str | None) -> Any:
        """Returns the answer; None after a problem, whether it is the process's own end or the step's."""
        if self.problem:
            return None
        try:
            if question is not None:
                self._connection.send(question)
            kind, value = self._connection.recv()
        except (EOFError, OSError):
            kind, value = "problem", "its process ended; perhaps there is too little memory"
        if kind == "problem":
            self.problem = value
            return None
        return value

    def wait(self) -> None:
        """Returns when the warm-up is over."""
        self.loss = self._ask(None) or 0.0

    def step(self) -> None:
        """Runs a step."""
        seconds = self._ask("step")
        if seconds is not None:
            self.seconds.append(seconds)

    def end(self) -> None:
        """Asks for the peak of all steps."""
        self.peak_bytes = self._ask("peak") or 0.0

    def kernels(self) -> "Kernels":
        """Asks for what a step launches."""
        return self._ask("kernels") or {}

    def row(self, model: str, way: str, eager: "_Runner | None") -> dict[str, Any]:
        """Returns the figures, also as parts of eager code's."""
        row: dict[str, Any] = {"model": model, "way": way}
        names = ("ms", "peak MiB", "time / eager", "memory / eager", "first loss")
        if self.problem:
            return row | dict.fromkeys(names, NO_FIGURE)
        ratios: list[Any] = [NO_FIGURE, NO_FIGURE]
        if eager is not None and not eager.problem:
            ratios = [statistics.median(self.seconds) / statistics.median(eager.seconds)]
            ratios.append(self.peak_bytes / eager.peak_bytes if eager.peak_bytes else NO_FIGURE)
        values = (statistics.median(self.seconds) * 1e3, self.peak_bytes / 2**20, *ratios, self.loss)
        return row | dict(zip(names, values, strict=True))


@contextmanager
def _started(model: str, way: str, device: str, seed: int, plan: str | None) -> "Iterator[_Runner]":
    """Starts a process, and ends it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, model, way, device, seed, plan), daemon=True)
    process.start()
    theirs.close()
    try:
        yield _Runner(ours)
    finally:
        process.terminate()
        process.join()
        ours.close()


# --- in the process ---


class _Step(NamedTuple):
    """A step that can be run."""

    run: Callable[[], Any]  # returns the loss
    synchronize: Callable[[], None]
    warm_up: int


def _serve(connection: "Connection", model: str, way: str, device: str, seed: int, plan: str | None) -> None:
    """Runs steps until the other end is closed; sends the first loss, then answers each question."""
    with suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
        try:
            _answer(connection, prepare_way(model, way, device, seed, plan), device)
        except PlacewiseError as problem:
            connection.send(("problem", str(problem)))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as problem:
            connection.send(("problem", f"{type(problem).__name__}: {one_line(problem)}"))


def _answer(connection: "Connection", step: _Step, device: str) -> None:
    losses = [float(step.run()) for _ in range(step.warm_up)]
    step.synchronize()
    _reset_peak(device)
    connection.send(("loss", losses[0]))
    while True:
        question = connection.recv()
        if question == "peak":
            connection.send(("peak", _peak_bytes(device)))
            continue
        if question == "kernels":
            connection.send(("kernels", kernels_of(step.run, step.synchronize, device)))
            continue
        begin = time.perf_counter()
        step.run()
        step.synchronize()
        connection.send(("seconds", time.perf_counter() - begin))


def prepare_way(model: str, way: str, device: str, seed: int, plan: str | None = None) -> _Step:
    """Returns a model's step, to be run in this way."""
    import torch

    if way in (OURS, GRAPHS):
        return _placed(model, device, seed, is_recorded=way == GRAPHS)
    if way in (FUSED, FUSED_GRAPHS):
        return _placed(f"fused:{model}", device, seed, is_recorded=way == FUSED_GRAPHS)
    if plan is not None and way == PLAN:
        return _planned(model, plan, seed)
    from placewise.measure.random_batch import random_batch
    from placewise.models import load_step

    torch.manual_seed(seed)
    captured = load_step(model, device="cpu")
    step, batch = captured.step, random_batch(captured, seed)
    del captured
    place = "cuda" if device == "gpu" else "cpu"
    if way == CHECKPOINTED:
        checkpoint_blocks(step.model)
    changes: dict[str, Callable[..., Any]] = {COMPILED: torch.compile, ON_CPU: partial(_saved_on_cpu, device=device)}
    run = eager_step(step, batch, place, changes.get(way))
    torch.manual_seed(seed)
    return _Step(run, torch.cuda.synchronize if device == "gpu" else lambda: None, WARM_UP)


def checkpoint_blocks(model: Any) -> int:
    """Makes each block of a model compute again in the backward pass what it made in the forward pass; returns their number.

    A block is an entry of a ModuleList or a Sequential that has modules inside; one of these lists is none.
    """
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    lists, blocks = (nn.ModuleList, nn.Sequential), dict[Any, None]()

    def look(module: Any) -> None:
        for child in module.children():
            if isinstance(module, lists) and not isinstance(child, lists) and next(child.children(), None) is not None:
                blocks[child] = None
            else:
                look(child)

    look(model)
    if not blocks:
        raise ModelError("the model has no blocks to checkpoint: no list of modules with modules inside")
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)


def _saved_on_cpu(loss_of: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Returns the function that keeps on the CPU all that autograd saves."""
    import torch

    def compute(part: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=device == "gpu"):
            return loss_of(part)

    return compute


def _planned(model: str, path: str, seed: int) -> _Step:
    """Returns the step as a plan places it."""
    import torch

    from placewise.core.plan import Plan
    from placewise.measure.random_batch import load_with_weights, random_batch

    step = load_with_weights(model, seed)
    train_step = Plan.load(path).compile(step)
    batch = train_step.bring_home(random_batch(step, seed))
    torch.manual_seed(seed)
    return _Step(lambda: _loss(train_step(batch)), train_step.synchronize, max(WARM_UP, train_step.warm_up_steps))


def _placed(model: str, device: str, seed: int, is_recorded: bool) -> _Step:
    """Returns the step with all ops on one device."""
    import numpy as np
    import torch

    from placewise.core.cluster import Cluster, Device
    from placewise.core.problem import Problem
    from placewise.measure.random_batch import load_with_weights, random_batch
    from placewise.run.devices import real_devices
    from placewise.run.step.compiling import compile_placement

    step = load_with_weights(model, seed)
    cluster = Cluster("speed", (Device(f"{device}:0", device, 2**50, 1e12, 1e11),), ())
    problem = Problem.of(step.graph, cluster)
    placement = np.zeros(problem.num_groups, np.int64)
    train_step = compile_placement(problem, placement, None, step, real_devices(cluster), is_recorded)
    batch = train_step.bring_home(random_batch(step, seed))
    torch.manual_seed(seed)
    return _Step(lambda: _loss(train_step(batch)), train_step.synchronize, max(WARM_UP, train_step.warm_up_steps))


def _loss(result: Any) -> Any:
    return getattr(result, "loss", result)


def eager_step(
    step: "TrainingStep", batch: Any, device: str, compiler: Callable[..., Any] | None = None
) -> Callable[[], Any]:
    """Returns a function that runs the step as a user's loop does; `compiler` compiles the model with its loss."""
    import torch
    from torch import Tensor, nn
    from torch.utils._pytree import tree_map

    from placewise.graph_capture.capture import forward_loss
    from placewise.run.step.batches import cut_part

    optimizer, count = step.optimizer, step.micro_batches
    if optimizer is None:
        raise ModelError("the step is inference: only training steps are compared")
    step.model.to(device)
    batch = tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, batch)
    parts = [
        tree_map(lambda v, n=number: cut_part(v, n, count) if isinstance(v, Tensor) and v.dim() else v, batch)
        for number in range(count)
    ]
    scaler = step.grad_scaler if step.scales_loss else None

    def loss_of(part: Any) -> Any:
        return forward_loss(step, part)[0]

    compute = loss_of if compiler is None else compiler(loss_of)

    def casts() -> Any:
        if isinstance(step.autocast, torch.dtype):
            return torch.autocast(device, step.autocast)
        return nullcontext() if step.autocast is None else step.autocast

    def run() -> Any:
        optimizer.zero_grad()
        losses = []
        for part in parts:
            with casts():
                loss = compute(part)
            loss = loss / count if count > 1 else loss
            torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
            losses.append(loss.detach())
        if scaler is not None:
            scaler.unscale_(optimizer)
        if step.clip_grad_value is not None:
            nn.utils.clip_grad_value_(step.model.parameters(), step.clip_grad_value)
        if step.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(step.model.parameters(), step.clip_grad_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        return sum(losses[1:], losses[0])

    return run


# --- memory ---


def _reset_peak(device: str) -> None:
    """Begins to count the peak again: of the GPU's allocator, or of the process as Linux counts it."""
    if device == "gpu":
        import torch

        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")


def _peak_bytes(device: str) -> int:
    """Returns the peak; 0 if it is unknown."""
    if device == "gpu":
        import torch

        return torch.cuda.max_memory_allocated()
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:")), 0)
    return 0
