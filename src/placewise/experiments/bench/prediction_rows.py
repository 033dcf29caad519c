"""The rows of `placewise bench predictions`: a model's placements on a machine, predicted and run.

Several processes may work on different models at the same time. Loading and searching is then done side by side; profiling
and running is done by one after the other.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from placewise.core.errors import InputError, PlacewiseError, StrategyError, one_line
from placewise.search.budget import Budget

if TYPE_CHECKING:
    from placewise.core.arrays import Ints
    from placewise.core.cluster import Cluster
    from placewise.core.problem import Problem
    from placewise.core.profile import Profile
    from placewise.formats.files import Fields
    from placewise.graph_capture.capture import CapturedStep
    from placewise.machines.slices import Cut

AUTO = "auto"

OUTSIDE = "placewise.experiments.outside_models:"  # how the models begin that are functions and may be in a file

FILE_FIELDS, MACHINE_FIELDS, ROW_FIELDS = ("machines", "rows"), ("title", "cluster", "virtual"), ("model", "machines")

RECORD, PLACED = (
    ("model", "machine", "ops", "rows", "launches", "torch", "seconds"),
    ("placements", "copies", "predicted", "alone", "measured"),
)

SHORTEST, LONGEST = 1e-12, 1e9  # seconds, of a measured step

WAIT_SECONDS = 0.5  # until it is looked whether a process has died

Record = dict[str, Any]  # what is kept of a model on a machine: its rows, or why there are none


@dataclass(frozen=True)
class TableMachine:
    """A machine of a table."""

    name: str
    cluster: str  # a preset or a file
    virtual: "tuple[tuple[str, Cut], ...]" = ()
    title: str = ""

    def check(self) -> None:
        """Raises a PlacewiseError if there is no such machine."""
        from placewise.core.cluster import Cluster

        Cluster.load(self.cluster)

    @property
    def has_cpu(self) -> bool:
        """Whether other work on the processors would disturb what runs there."""
        from placewise.core.cluster import Cluster

        return any(device.kind == "cpu" for device in Cluster.load(self.cluster).devices)


@dataclass(frozen=True)
class Asked:
    """What is done for each model on each machine."""

    strategies: tuple[str, ...]
    seconds: float = 6.0  # for auto
    budget: int = 600  # evaluations for the others
    steps: int = 3
    most_seconds: float = 3.0  # for the steps of a placement: fewer, if they take longer
    busy: float = 1.0  # share of the time in which a search takes other devices on the same hardware to be busy


class Job(NamedTuple):
    """A model, and the machines that it is to run on."""

    model: str
    machines: tuple[TableMachine, ...]
    asked: Asked
    folder: str  # where processes leave what they measured of a machine for each other


def read_tables(path: str) -> tuple[list[TableMachine], list[tuple[str, tuple[str, ...]]]]:
    """Returns the machines of a file, and its models with the names of their machines, in the file's order."""
    from placewise.formats.files import Fields, describe, parse_toml, read_bytes
    from placewise.models import names_code

    top = Fields(
        path, parse_toml(path, read_bytes(path, InputError).decode("utf-8", "replace"), InputError), FILE_FIELDS, InputError
    )
    machines = []
    for name, given in top.mapping("machines").items():
        fields = Fields(f"{path}: machines.{name}", given, MACHINE_FIELDS, InputError)
        beside = Path(path).parent / fields.text("cluster")
        virtual = tuple(_cut(fields, text) for text in fields.texts("virtual", []))
        cluster = str(beside) if beside.exists() else fields.text("cluster")
        machines.append(TableMachine(name, cluster, virtual, fields.text("title", name)))
    rows = []
    for i, given in enumerate(top.entries("rows")):
        row = Fields(f"{path}: rows[{i}]", given, ROW_FIELDS, InputError)
        on = tuple(row.texts("machines"))
        if unknown := [name for name in on if name not in [machine.name for machine in machines]]:
            raise row.wrong(f"there is no machine {unknown[0]!r}; the machines are {', '.join(m.name for m in machines)}")
        model = row.text("model")
        if names_code(model) and not model.startswith(OUTSIDE):
            raise row.wrong(
                f"model {describe(model)} is code that would be imported: a file may name models of the zoo and "
                f"{OUTSIDE}NAME; measure others with CLUSTER --only MODEL"
            )
        rows.append((model, on))
    return machines, rows


def read_records(path: str) -> list[Record]:
    """Returns the records of a file, a line of JSON for each; none if it does not exist yet."""
    from placewise.formats.files import read_bytes

    if not Path(path).exists():
        return []
    return [
        _checked(f"{path}: line {number}", line) for number, line in enumerate(read_bytes(path, InputError).splitlines(), 1)
    ]


def _checked(source: str, line: bytes) -> Record:
    from placewise.formats.files import Fields, parse_json

    fields = Fields(source, parse_json(source, line, InputError), RECORD, InputError)
    for name in ("model", "machine", "torch"):
        fields.text(name)
    fields.integer("ops")
    parts = Fields(f"{source}: seconds", given := fields.mapping("seconds"), tuple(given), InputError)
    for part in given:
        parts.number(part)
    if any(seconds is not None and type(seconds) is not float for seconds in fields.entries("launches", [])):
        raise fields.wrong("launches must be the seconds of an op's launch and of a copy's, or null")
    for i, placed in enumerate(fields.entries("rows")):
        row = Fields(f"{source}: rows[{i}]", placed, PLACED, InputError)
        row.texts("placements")
        row.integer("copies", 0)
        row.number("predicted")
        row.number("alone", 0.0)
        measured = row.get("measured") if row.get("measured") is None else row.entries("measured")
        if not all(type(time) in (int, float) and SHORTEST <= time <= LONGEST for time in measured or ()):
            raise row.wrong(f"measured must be times from {SHORTEST:g} to {LONGEST:g} s")
    return dict(fields.given)


def _cut(fields: "Fields", text: str) -> "tuple[str, Cut]":
    from placewise.machines.slices import parse_cut

    name, _, cut = text.partition("=")
    try:
        return name, parse_cut(cut)
    except ValueError as wrong:
        raise fields.wrong(f"virtual: {name} {wrong}") from None


# --- several processes ---


def measure_all(jobs: Sequence[tuple[str, tuple[TableMachine, ...]]], asked: Asked, processes: int) -> Iterator[Record]:
    """Yields the record of each model on each of its machines, as it comes.

    Machines with CPU devices come last, and have the processors to themselves.
    """
    noisy = [(model, tuple(m for m in machines if not m.has_cpu)) for model, machines in jobs]
    quiet = [(model, tuple(m for m in machines if m.has_cpu)) for model, machines in jobs]
    with TemporaryDirectory() as folder:
        for part, count in ((noisy, processes), (quiet, 1)):
            todo = [Job(model, machines, asked, folder) for model, machines in part if machines]
            if count == 1 or len(todo) < 2:
                for job in todo:
                    yield from _measure_model(job, nullcontext())
            else:
                yield from _in_processes(todo, min(count, len(todo)))


def _in_processes(jobs: Sequence[Job], processes: int) -> Iterator[Record]:
    context = get_context("spawn")  # CUDA does not survive a fork
    queue, lock = context.Queue(), context.Lock()
    with ProcessPoolExecutor(processes, context, _keep, (queue, lock)) as pool:
        try:
            left: list[Future[None]] = [pool.submit(_work, job) for job in jobs]
            while left or not queue.empty():
                try:
                    yield queue.get(timeout=WAIT_SECONDS)
                except Empty:
                    for future in [future for future in left if future.done()]:
                        future.result()  # raises what ended it
                        left.remove(future)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_KEPT: dict[str, Any] = {}  # in a process of the pool: its queue and its lock


def _keep(queue: Any, lock: Any) -> None:
    import torch

    torch.set_num_threads(min(torch.get_num_threads(), 4))  # drawing weights must not take all cores
    _KEPT.update(queue=queue, lock=lock)


def _work(job: Job) -> None:
    for record in _measure_model(job, _KEPT["lock"]):
        _KEPT["queue"].put(record)


# --- one model ---


def _measure_model(job: Job, alone: AbstractContextManager[Any]) -> Iterator[Record]:
    """Yields the model's record on each machine; what uses devices happens inside of `alone`."""
    from placewise.measure.random_batch import load_with_weights

    begun = time.perf_counter()
    try:
        captured = load_with_weights(job.model)
    except PlacewiseError as problem:
        yield from ({"model": job.model, "machine": machine.name, "failure": str(problem)} for machine in job.machines)
        return
    load_seconds = time.perf_counter() - begun
    for machine in job.machines:
        stopwatch = _Stopwatch()
        stopwatch.seconds["load"] = load_seconds
        record: Record = {"model": job.model, "machine": machine.name}
        try:
            rows, launches = _rows(captured, machine, job, alone, stopwatch)
            facts = {"ops": len(captured.graph.ops), "rows": rows, "launches": launches, "torch": _version()}
            yield record | facts | {"seconds": stopwatch.rounded()}
        except PlacewiseError as problem:
            yield record | {"failure": str(problem)}
        except RuntimeError as problem:  # a device's: the other rows can be measured all the same
            yield record | {"failure": one_line(problem)}
        load_seconds = 0.0


def _rows(
    captured: "CapturedStep", machine: TableMachine, job: Job, alone: AbstractContextManager[Any], stopwatch: "_Stopwatch"
) -> tuple[list[dict[str, Any]], list[float | None]]:
    """Returns a row for each strategy: what was predicted for its placement, and what was measured.

    And the host's seconds to launch an op and a copy.
    """
    from placewise.core.cluster import Cluster
    from placewise.core.problem import Problem
    from placewise.measure.contended_schedule import schedule_together
    from placewise.measure.profiler import apply_profile
    from placewise.measure.steps import step_times
    from placewise.simulate.simulator import Simulator

    cluster, virtual = Cluster.load(machine.cluster), dict(machine.virtual)
    devices = _Alone(alone, stopwatch)
    with stopwatch.taking("profile"):
        profile = _profile(captured, cluster, machine, job.folder, devices)
    problem = Problem.of(*apply_profile(captured, cluster, profile))
    with stopwatch.taking("search"):
        searched = Problem.of(*apply_profile(captured, cluster, profile, job.asked.busy))
        found = list(_placements(searched, job.asked))
    rows: dict[bytes, dict[str, Any]] = {}
    with stopwatch.taking("measure"):
        for name, placement, order in found:
            same = placement.tobytes() + order.tobytes()
            if same in rows:
                rows[same]["placements"].append(name)
                continue
            schedule = Simulator(problem).schedule(placement, order)
            predicted = schedule_together(problem, profile, placement, order).step_seconds
            times = step_times(captured, schedule, virtual, job.asked.steps, job.asked.most_seconds, devices)
            rows[same] = {
                "placements": [name],
                "copies": len(schedule.copy_tensors),
                "predicted": predicted,
                "alone": schedule.step_seconds,
                "measured": None if times is None else times.tolist(),
            }
    return list(rows.values()), [profile.dispatch_seconds, profile.copy_dispatch_seconds]


def _profile(captured: "CapturedStep", cluster: "Cluster", machine: TableMachine, folder: str, alone: "_Alone") -> "Profile":
    """Returns a profile of the model's step; links and contention are measured once for all models."""
    from dataclasses import replace

    from placewise.formats.profile_file import read_profile, write_profile
    from placewise.measure.profiler import measure_profile

    path = Path(folder) / f"{sha256(machine.name.encode()).hexdigest()}.json"  # a table names machines as it likes
    known = read_profile(path) if path.exists() else None
    profile = measure_profile(captured, cluster, dict(machine.virtual), runs_step=True, known=known, alone=alone).profile
    if known is None:
        write_profile(replace(profile, timings={}), path)
    return profile


def _placements(problem: "Problem", asked: Asked) -> "Iterator[tuple[str, Ints, Ints]]":
    """Yields the name, placement and order of what each strategy finds; also of one that does not fit."""
    from placewise.search.driver import unless_stopped
    from placewise.search.planner import Planner
    from placewise.search.request import Request
    from placewise.simulate.simulator import Simulator

    simulator = Simulator(problem)
    for name in asked.strategies:
        request = Request(name, budget=Budget(seconds=asked.seconds) if name == AUTO else Budget(asked.budget))
        try:
            outcome = unless_stopped(Planner(problem, request).search(evaluator=simulator))
        except StrategyError:  # it does not suit the problem, or is not installed
            continue
        if outcome.placement is not None:
            yield name, outcome.placement, simulator.schedule(outcome.placement, outcome.order).order


def _version() -> str:
    import torch

    return str(torch.__version__)


class _Alone:
    """Has the devices to itself: counts the time that it waits for them, and gives their memory back afterwards."""

    def __init__(self, lock: AbstractContextManager[Any], stopwatch: "_Stopwatch") -> None:
        self._lock, self._stopwatch = lock, stopwatch

    def __enter__(self) -> None:
        with self._stopwatch.taking("wait"):
            self._lock.__enter__()

    def __exit__(self, *given: Any) -> None:
        import torch

        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
            torch.accelerator.empty_cache()
        self._lock.__exit__(*given)


class _Stopwatch:
    """The seconds that each part of the work has taken."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def taking(self, part: str) -> Iterator[None]:
        """Adds the time of the block to a part, and takes it from the part that this one is inside of."""
        begun, inside = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            own = time.perf_counter() - begun - (sum(self.seconds.values()) - inside)
            self.seconds[part] = self.seconds.get(part, 0.0) + own

    def rounded(self) -> dict[str, float]:
        """Returns the seconds of each part."""
        return {part: round(seconds, 1) for part, seconds in self.seconds.items()}
