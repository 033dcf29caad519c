"""What the rows of a run file hold: packed when they are written, and checked when they are read.

Anybody can have written the file, and a disk can have changed it, so every column is checked; SQLite lets a column hold any
type. An error names the file, the run or batch, and the rule.
"""

import base64
import json
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation
from placewise.core.errors import StoreError, StrategyError, one_line
from placewise.core.graph import digest_of
from placewise.core.plan import Simplicity
from placewise.formats.files import Fields, describe
from placewise.formats.plan_file import read_simplicity
from placewise.search.budget import Budget
from placewise.search.driver import JudgedBatch

Row = tuple[Any, ...]

STEP_COLUMNS = ("cost", "step_seconds", "overflow_bytes", "notes", "digest", "seconds", "placement", "launch_order")

DIGEST_BYTES = 16

MAX_PACKED_BYTES = 2**26  # of an unpacked placement or order

MAX_SECONDS = 1e11  # three thousand years


@dataclass(frozen=True)
class Specification:
    """Everything that a run's history depends on, and the names of its model and cluster."""

    model: str
    cluster: str
    problem_digest: str
    order: str
    strategy: str
    parameters: dict[str, Any]
    seed: int
    budget: Budget
    versions: dict[str, str] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)  # how placements are measured; empty: they are simulated
    simple: float = 0.0  # by how much the plan may be slower than the fastest one found, if it is simpler

    @property
    def key(self) -> str:
        """The identity of a run: all fields but the names of the model and the cluster."""
        fields = {name: value for name, value in asdict(self).items() if name not in ("model", "cluster")}
        if self.measured:
            fields["model"] = self.model  # the process that measures loads it by this name
        else:
            del fields["measured"]  # older files do not have it
        if not self.simple:
            del fields["simple"]  # as above
        return digest_of(fields)


class SimplerPlan(NamedTuple):
    """The plan that a finished run answers with, if it is not the fastest that was found."""

    placement: Ints  # [groups]
    order: Ints  # [ops]
    step_seconds: float
    simplicity: Simplicity
    fastest: tuple[Ints, Ints | None] | None = None  # the plan that is simplified; None in older files


class RunHead(NamedTuple):
    """What is recorded of a run besides its batches."""

    specification: Specification
    created: float  # seconds since 1970
    status: str  # running, or why the search ended
    finding: tuple[int, float, SimplerPlan | None] | None  # of a finished run: evaluations, seconds and answer


def pack_specification(specification: Specification) -> str:
    """Returns a specification as text."""
    return json.dumps(asdict(specification))


def unpack_head(row: Row, source: str) -> RunHead:
    """Returns the head in a row of specification, key, created, status and outcome; errors name `source`."""
    text, key, created, status, outcome = row
    specification = _unpack_specification(text, source)
    if specification.key != key:
        raise StoreError(f"{source}: is damaged: its specification is another one than was recorded")
    finding = None
    if outcome is not None:
        names = ("evaluations", "seconds", "answer")
        fields = Fields(f"{source}: outcome", _parsed(outcome, source), names, StoreError)
        answer = _answer(fields) if fields.get("answer", None) is not None else None
        finding = fields.integer("evaluations"), fields.number("seconds"), answer
    return RunHead(specification, _seconds(created, source), require_text(status, f"{source}: status"), finding)


def _unpack_specification(text: Any, source: str) -> Specification:
    given = Fields(source, _parsed(text, source), _names(Specification), StoreError)
    budget = Fields(f"{source}: budget", given.mapping("budget"), _names(Budget), StoreError)
    for name, limit in budget.given.items():
        if limit is not None and type(limit) not in (int, float):
            raise budget.wrong(f"{name} must be a number, got {describe(limit)}")
    try:
        return Specification(
            **{name: given.text(name) for name in ("model", "cluster", "problem_digest", "order", "strategy")},
            parameters=given.mapping("parameters"),
            seed=given.integer("seed"),
            budget=Budget(**budget.given),
            versions=given.mapping("versions", {}),
            measured=given.mapping("measured", {}),
            simple=given.number("simple", 0.0),
        )
    except StrategyError as rule:
        raise StoreError(f"{source}: {rule}") from None


def _answer(outcome: Fields) -> SimplerPlan:
    names = ("placement", "order", "step_seconds", "simplicity", "fastest_placement", "fastest_order")
    given = Fields(f"{outcome.element}: answer", outcome.mapping("answer"), names, StoreError)
    fastest: tuple[Ints, Ints | None] | None = None
    if given.get("fastest_placement", None) is not None:
        order = None if given.get("fastest_order", None) is None else _from_base64(given, "fastest_order", np.int32)
        fastest = _from_base64(given, "fastest_placement", np.int16), order
    return SimplerPlan(
        _from_base64(given, "placement", np.int16),
        _from_base64(given, "order", np.int32),
        given.number("step_seconds"),
        read_simplicity(given.mapping("simplicity"), f"{given.element}: simplicity", StoreError),
        fastest,
    )


def pack_finding(evaluations: int, seconds: float, answer: SimplerPlan | None = None) -> str:
    """Returns the evaluations, the seconds and the answer of a finished run as text."""
    finding: dict[str, Any] = {"evaluations": evaluations, "seconds": seconds}
    if answer is not None:
        finding["answer"] = {
            "placement": _in_base64(np.asarray(answer.placement, np.int16)),
            "order": _in_base64(np.asarray(answer.order, np.int32)),
            "step_seconds": answer.step_seconds,
            "simplicity": asdict(answer.simplicity),
        }
        if answer.fastest is not None:
            placement, order = answer.fastest
            finding["answer"]["fastest_placement"] = _in_base64(np.asarray(placement, np.int16))
            if order is not None:
                finding["answer"]["fastest_order"] = _in_base64(np.asarray(order, np.int32))
    return json.dumps(finding)


def _in_base64(column: NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(column.tobytes(), 1)).decode()


def _from_base64(given: Fields, name: str, kind: Any) -> Ints:
    try:
        packed = base64.b64decode(given.text(name), validate=True)
    except ValueError:
        raise given.wrong(f"{name} must be base64") from None
    return _unpacked(packed, kind, f"{given.element}: {name}")


def pack_batch(batch: JudgedBatch) -> Row:
    """Returns a batch as a row with STEP_COLUMNS."""
    evaluation, best = batch.evaluation, batch.best
    return (
        *(np.asarray(column, kind).tobytes() for column, kind in zip(evaluation, _KINDS, strict=True)),
        json.dumps(batch.notes, default=float),
        batch.digest,
        batch.seconds,
        None if best is None else zlib.compress(np.asarray(best[0], np.int16).tobytes(), 1),
        None if best is None or best[1] is None else zlib.compress(np.asarray(best[1], np.int32).tobytes(), 1),
    )


def unpack_batch(row: Row, source: str) -> JudgedBatch:
    """Returns the batch in a row with STEP_COLUMNS; errors name `source`."""
    cost, seconds, overflow, notes, digest, elapsed, placement, order = row
    evaluation = unpack_evaluation(cost, seconds, overflow, source)
    if type(digest) is not bytes or len(digest) != DIGEST_BYTES:
        raise StoreError(f"{source}: digest must be {DIGEST_BYTES} bytes, got {describe(digest)}")
    known = _parsed(notes, f"{source}: notes")
    if not isinstance(known, dict):
        raise StoreError(f"{source}: notes must be a dict, got {describe(known)}")
    best: tuple[Ints, Ints | None] | None = None
    if placement is not None:
        if not (evaluation.overflow_bytes == 0).any():
            raise StoreError(f"{source}: has a best placement, but none that fits")
        launches = None if order is None else _unpacked(order, np.int32, f"{source}: launch_order")
        best = _unpacked(placement, np.int16, f"{source}: placement"), launches
    return JudgedBatch(evaluation, known, digest, _seconds(elapsed, source), best)


def unpack_evaluation(cost: Any, seconds: Any, overflow: Any, source: str) -> Evaluation:
    """Returns the evaluation in three columns; errors name `source`."""
    columns = [
        _array(column, kind, f"{source}: {name}")
        for column, kind, name in zip((cost, seconds, overflow), _KINDS, STEP_COLUMNS, strict=False)
    ]
    if len({len(column) for column in columns}) != 1:
        raise StoreError(f"{source}: cost, step_seconds and overflow_bytes must be equally long")
    if not all((column >= 0).all() for column in columns):  # also if one is not a number
        raise StoreError(f"{source}: cost, step_seconds and overflow_bytes must be at least 0")
    return Evaluation(*columns)


def best_seconds(evaluation: Evaluation) -> float:
    """Returns the step seconds of the best placement that fits."""
    return float(evaluation.step_seconds[np.where(evaluation.overflow_bytes == 0, evaluation.cost, np.inf).argmin()])


def require_text(value: Any, source: str) -> str:
    """Returns a text; errors name `source`."""
    if type(value) is not str:
        raise StoreError(f"{source}: must be text, got {describe(value)}")
    return value


_KINDS: tuple[Any, ...] = (np.float64, np.float64, np.int64)  # of the columns of an Evaluation


def _names(kind: Any) -> tuple[str, ...]:
    return tuple(kind.__dataclass_fields__)


def _seconds(value: Any, source: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MAX_SECONDS:
        raise StoreError(f"{source}: must have a time of at least 0 seconds, got {describe(value)}")
    return float(value)


def _parsed(text: Any, source: str) -> Any:
    """Returns the content of a JSON text; a loss may be NaN, which Python writes and reads."""
    try:
        return json.loads(require_text(text, source))
    except (ValueError, RecursionError) as problem:
        raise StoreError(f"{source}: is not JSON: {one_line(problem)}") from None


def _array(data: Any, kind: Any, source: str) -> NDArray[Any]:
    if type(data) is not bytes or len(data) % np.dtype(kind).itemsize:
        raise StoreError(f"{source}: must be {np.dtype(kind)} in bytes, got {describe(data)}")
    return np.frombuffer(data, kind)


def _unpacked(data: Any, kind: Any, source: str) -> Ints:
    """Returns a packed column of whole numbers."""
    if type(data) is not bytes:
        raise StoreError(f"{source}: must be packed bytes, got {describe(data)}")
    stream = zlib.decompressobj()
    try:
        unpacked = stream.decompress(data, MAX_PACKED_BYTES)
    except zlib.error as problem:
        raise StoreError(f"{source}: can't be unpacked: {problem}") from None
    if not stream.eof:
        raise StoreError(f"{source}: is not complete, or unpacks to more than {MAX_PACKED_BYTES:,} bytes")
    return _array(unpacked, kind, source).astype(np.int64)
