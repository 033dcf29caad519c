"""How fast whole steps are on one device: `placewise bench speed`.

Every way to run a step has a process of its own, so that one's memory, heap and compiled code don't help or hurt another.
They all start at once: each imports, draws weights, captures and compiles. Then they take turns: while one runs a step, the
others wait.
"""

import multiprocessing
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from placewise.core.errors import InputError, ModelError, PlacewiseError, one_line
from placewise.core.suggestions import did_you_mean
from placewise.experiments.bench import Benchmark, Findings, Rows, option
from placewise.experiments.bench.speed_pages import kernels_page, speed_page
from placewise.experiments.bench.step_kernels import Kernels, differences, kernels_of

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from placewise.graph_capture.training_step import TrainingStep

EAGER, COMPILED, OURS, GRAPHS = "eager", "torch.compile", "placewise", "placewise-cuda-graphs"

FUSED, FUSED_GRAPHS = "placewise-fused", "placewise-fused-cuda-graphs"

CHECKPOINTED, ON_CPU, PLAN = "checkpointing", "save-on-cpu", "plan"

SHARDED = "fsdp-offload"  # fully_shard with CPU offload, and checkpointing where the model has blocks

MORE_WAYS = (CHECKPOINTED, ON_CPU, SHARDED, PLAN)  # that spare memory, if they are asked for

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

KERNEL_MODELS = (  # with --kernels on a GPU
    *MODELS["gpu"][:2],
    *MODELS["gpu"][3:5],
    *MODELS["gpu"][6:],
    *("rnnlm", "nmt:layers=2"),
    *(
        f"{OUTSIDE}:{name}"
        for name in (
            "densenet",
            "efficientnet_bf16",
            "swin",
            "mobilenet",
            "encoder",
            "bert_with_dropout",
            "gpt2_with_dropout",
        )
    ),
    *(f"{OUTSIDE}:{name}" for name in ("lstm", "whole_lstm", "gru", "rms_norm")),
)

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
        "checkpointing, save-on-cpu, fsdp-offload, plan",
    )
    plan: str | None = option("file", "what the way `plan` runs: a plan of the only model, with its cluster", "PLAN")
    rounds: int = option("positive", "steps of each way that are measured, after the warm-up", default=9)
    seed: int = option("count", "random seed of the weights and the batch", default=0)
    at_once: int = option(
        "positive", "models whose processes start at once; their memory must fit beside each other", default=1
    )
    kernels: bool = option(
        "flag", "instead: which kernels placewise launches more or less often than eager code", default=False
    )
    output: str | None = option("file", "write the page of the docs, again after each model", "PAGE.MD")
    kernels_output: str | None = option("file", "compare kernels too, and write that page", "PAGE.MD")

    def run(self) -> Findings:
        """Measures one model after the other."""
        from placewise.formats.files import write_bytes
        from placewise.models import check_name

        ways = (EAGER, OURS) if self.kernels else self._ways()
        if self.kernels_output is not None and not {EAGER, OURS} <= set(ways):
            raise InputError(f"--kernels-output: compares {EAGER} with {OURS}, and one of them is not among the --ways")
        models = self.models or (KERNEL_MODELS if self.kernels and self.device == "gpu" else MODELS[self.device])
        if (self.plan is not None) != (PLAN in ways) or (self.plan is not None and len(models) > 1):
            raise InputError("--plan: give the plan of one MODEL, and `plan` among the --ways")
        if self.plan is not None:
            from placewise.core.plan import Plan

            Plan.load(self.plan)  # before a process has built the model
        for model in models:
            check_name(model)
        measured, launched = list[dict[str, Any]](), list[dict[str, Any]]()
        rows = launched if self.kernels else measured
        warnings: list[str] = []
        is_complete = False
        with suppress(KeyboardInterrupt), closing(self._prepared(models, ways)) as prepared:
            for model, runners in prepared:
                if not self.kernels:
                    measured += compare_ways(model, runners, self.rounds)[0]
                if self.kernels or self.kernels_output is not None:
                    launched += compare_kernels(model, runners)
                if len(models) == 1 and all(runner.is_refused for runner in runners.values()):
                    raise ModelError(next(iter(runners.values())).problem)
                problems = _problems(model, runners)
                warnings += problems
                _tell("; ".join([f"{model}: measured", *problems]))
                by_way = kernels_page(rows) if self.kernels else speed_page(rows, self.device, self.rounds)
                for path, page in ((self.output, by_way), (self.kernels_output, kernels_page(launched))):
                    if path is not None:
                        write_bytes(path, ("\n".join(page) + "\n").encode())
            is_complete = True
        return Findings({self.name(): rows}, _table(rows), tuple(warnings), is_complete)

    def _prepared(self, models: Sequence[str], ways: Sequence[str]) -> Generator[tuple[str, dict[str, "_Runner"]]]:
        """Yields each model with a process for each way that is ready to run; they end when the next one is asked for.

        Nothing is prepared while a model is measured: on an H200 that made a step of T5 in eager code take 271 ms for 176.
        """
        count, left = min(len(models), self.at_once) * len(ways), deque(models)
        begun: deque[tuple[str, ExitStack, dict[str, _Runner]]] = deque()
        with ExitStack() as stack:
            while left or begun:
                while left and len(begun) < self.at_once:
                    model, end = left.popleft(), stack.enter_context(ExitStack())
                    how = (self.device, self.seed, self.plan, count)
                    begun.append((model, end, {way: end.enter_context(started(model, way, *how)) for way in ways}))
                for number in range(len(begun)):
                    for runner in begun[number][2].values():
                        runner.wait()
                for _ in range(len(begun)):
                    model, end, runners = begun.popleft()
                    yield model, runners
                    end.close()

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


def _tell(line: str) -> None:
    """Prints a line of progress."""
    print(line, file=sys.stderr, flush=True)


def _table(rows: Rows) -> str:
    from placewise.experiments.bench import table_of

    return table_of(rows) if rows else "nothing was measured"


# --- turns ---


def compare_ways(model: str, runners: Mapping[str, "_Runner"], rounds: int) -> tuple[Rows, list[str]]:
    """Returns a row for each way to run a model's step, and what went wrong."""
    for runner in runners.values():  # one after the other, so that no warm-up slows another one down
        runner.warm_up()
    for _ in range(rounds):
        for runner in runners.values():
            runner.step()
    for runner in runners.values():
        runner.end()
    first = runners.get(EAGER)
    return [runner.row(model, way, first) for way, runner in runners.items()], _problems(model, runners)


def _problems(model: str, runners: Mapping[str, "_Runner"]) -> list[str]:
    return [f"{model}, {way}: {runner.problem}" for way, runner in runners.items() if runner.problem]


def compare_kernels(model: str, runners: Mapping[str, "_Runner"]) -> Rows:
    """Returns the kernels that eager code and placewise launch differently often; none if something went wrong."""
    found: dict[str, Kernels] = {}
    for way in (EAGER, OURS):
        runners[way].warm_up()
        found[way] = runners[way].kernels()
    is_known = not any(runner.problem for runner in runners.values())
    return differences(model, found[EAGER], found[OURS], (EAGER, OURS)) if is_known else []


class _Runner:
    """A process that runs steps when it is asked to."""

    def __init__(self, connection: "Connection") -> None:
        self._connection = connection
        self.seconds: list[float] = []
        self.peak_bytes = self.loss = 0.0
        self.problem = ""
        self.is_refused = False  # the model is no model

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
        if kind in ("problem", "refusal"):
            self.problem, self.is_refused = value, kind == "refusal"
            return None
        return value

    def wait(self) -> None:
        """Returns when the process is ready to run steps."""
        self._ask(None)

    def warm_up(self) -> None:
        """Runs the first steps."""
        self.loss = self._ask("warm-up") or 0.0

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
def started(
    model: str, way: str, device: str, seed: int, plan: str | None, num_processes: int
) -> Iterator["_Runner"]:  # fmt: skip
    """Starts a process, one of so many, and ends it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    given = (theirs, num_processes, model, way, device, seed, plan)
    process = context.Process(target=_serve, args=given, daemon=True)
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


def _serve(
    connection: "Connection", num_processes: int, model: str, way: str, device: str, seed: int, plan: str | None
) -> None:
    """Runs steps until the other end is closed; says when it is ready, then answers each question."""
    with suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
        try:
            if device == "gpu":
                import torch

                torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_processes))
            step = prepare_way(model, way, device, seed, plan)
            losses = [float(step.run())] if way == COMPILED else []  # which compiles
            step.synchronize()
            _empty_cache(device)
            connection.send(("ready", None))
            _answer(connection, step, losses, device)
        except PlacewiseError as problem:
            connection.send(("refusal" if isinstance(problem, ModelError) else "problem", str(problem)))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as problem:
            connection.send(("problem", f"{type(problem).__name__}: {one_line(problem)}"))


def _answer(connection: "Connection", step: _Step, losses: list[float], device: str) -> None:
    while True:
        question = connection.recv()
        if question == "warm-up":
            while len(losses) < step.warm_up:
                losses.append(float(step.run()))
            step.synchronize()
            _reset_peak(device)
            connection.send(("loss", losses[0]))
        elif question == "peak":
            connection.send(("peak", _peak_bytes(device)))
        elif question == "kernels":
            connection.send(("kernels", kernels_of(step.run, step.synchronize, device)))
        else:
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
    if way == SHARDED:
        step = sharded(step, place)
    changes: dict[str, Callable[..., Any]] = {COMPILED: torch.compile, ON_CPU: partial(_saved_on_cpu, device=device)}
    run = eager_step(step, batch, place, changes.get(way), moves=way != SHARDED)
    torch.manual_seed(seed)
    return _Step(run, torch.cuda.synchronize if device == "gpu" else lambda: None, WARM_UP)


def checkpoint_blocks(model: Any) -> int:
    """Makes each block of a model compute its forward pass again in the backward pass; returns their number."""
    from torch.utils.checkpoint import checkpoint

    blocks = _blocks(model)
    if not blocks:
        raise ModelError("the model has no blocks to checkpoint: no list of modules with modules inside")
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)


def _blocks(model: Any) -> list[Any]:
    """Returns the entries of ModuleLists and Sequentials that have modules inside and are no such lists themselves."""
    from torch import nn

    lists, blocks = (nn.ModuleList, nn.Sequential), dict[Any, None]()

    def look(module: Any) -> None:
        for child in module.children():
            if isinstance(module, lists) and not isinstance(child, lists) and next(child.children(), None) is not None:
                blocks[child] = None
            else:
                look(child)

    look(model)
    return list(blocks)


def sharded(step: "TrainingStep", device: str) -> "TrainingStep":
    """Returns the step with FSDP2 on one device: weights and optimizer state in the CPU's memory, blocks checkpointed."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    mesh, blocks = init_device_mesh(device, (1,)), _blocks(step.model)
    names = {id(parameter): name for name, parameter in step.model.named_parameters()}
    if blocks:
        checkpoint_blocks(step.model)
    how: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy() if device == "cuda" else OffloadPolicy()}
    for block in blocks:
        fully_shard(block, **how)
    fully_shard(step.model, **how)
    for buffer in step.model.buffers():
        buffer.data = buffer.data.to(device)
    now = dict(step.model.named_parameters())
    optimizer: Any = step.optimizer
    groups = [{**group, "params": [now[names[id(p)]] for p in group["params"]]} for group in optimizer.param_groups]
    return replace(step, optimizer=type(optimizer)(groups))


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
    step: "TrainingStep", batch: Any, device: str, compiler: Callable[..., Any] | None = None, moves: bool = True
) -> Callable[[], Any]:
    """Returns a function that runs the step as a user's loop does; `compiler` compiles the model with its loss.

    The model goes to the device before, unless something else `moves` it.
    """
    import torch
    from torch import Tensor, nn
    from torch.utils._pytree import tree_map

    from placewise.graph_capture.capture import forward_loss
    from placewise.run.step.batches import cut_part

    optimizer, count = step.optimizer, step.micro_batches
    if optimizer is None:
        raise ModelError("the step is inference: only training steps are compared")
    if moves:
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


def _empty_cache(device: str) -> None:
    """Gives back what the GPU's allocator keeps, so that other processes can have it meanwhile."""
    if device == "gpu":
        import torch

        torch.cuda.empty_cache()


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
