"""Why a claim does not hold here, measured: how much slower copies or launches must be for it to hold.

`placewise reproduce PAPER --what-if` shows it.

Only columns that answer at once are computed, so this takes minutes. A claim on a system that searches is checked with the
best of these columns in its place: what it finds with its budget is at most a little better than that, and often worse.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from placewise.core.problem import Problem
from placewise.experiments.papers.claims import CLAIMS, Claim
from placewise.experiments.papers.reported_results import HEFT_EXPECTS, Paper, PaperRow
from placewise.experiments.papers.reproduction import Effort, Machines, extra_columns, rows_of
from placewise.experiments.recorded_searches import Contest, Found, find
from placewise.models import load_graph
from placewise.search.planner import find_bound
from placewise.simulate.simulator import Simulator

FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # times as long as copies take

LAUNCHES = (1e-4, 3e-4, 1e-3)  # seconds that the host takes for each launch

AT_ONCE = ("gpu-only", "cpu-only", "expert", "metis", "scotch", "mincut", "heft")

BEST_RULE = "the best rule"  # in place of a column that searches

MOST_EVALUATIONS = 16  # of a strategy that answers at once


@dataclass(frozen=True)
class ClaimRatios:
    """A claim's ratio in one row for each machine; None where a column can't be computed."""

    claim: Claim
    row: PaperRow
    of: str
    ratios: tuple[float | None, ...]  # by factor of copies
    launch_ratios: tuple[float | None, ...]  # by time of a launch
    least_ratio: float | None  # that any placement could have at the first factor: the bound / the claim's second column

    @property
    def holds_from(self) -> float | None:
        """The lowest factor from which on the claim holds; None if it does not for the last."""
        return self._from(self.ratios, FACTORS)

    @property
    def holds_from_launch(self) -> float | None:
        """The shortest launch from which on the claim holds; None if it does not for the last."""
        return self._from(self.launch_ratios, LAUNCHES)

    def _from(self, ratios: tuple[float | None, ...], values: tuple[float, ...]) -> float | None:
        holding = [ratio is not None and self.claim.least <= ratio < self.claim.below for ratio in ratios]
        first = len(holding)
        while first and holding[first - 1]:
            first -= 1
        return values[first] if first < len(holding) else None


def what_if(
    paper: Paper,
    effort: Effort,
    families: tuple[str, ...] = (),
    machines: Machines = Machines(),  # noqa: B008 - frozen
    on_row: Callable[[PaperRow], None] = lambda row: None,
) -> list[ClaimRatios]:
    """Returns the ratios of the paper's claims on each machine, in the order of claims and rows.

    Claims between two systems that search have none, and are left out.
    """
    changed = [replace(machines, slower_links=machines.slower_links * factor) for factor in FACTORS]
    changed += [replace(machines, launch_seconds=seconds) for seconds in LAUNCHES]
    found: dict[tuple[str, int], dict[str, float]] = {}
    bounds: dict[str, float | None] = {}
    rows = rows_of(paper, effort, families)
    for row in rows:
        graph = load_graph(row.model)
        for number, machine in enumerate(changed):
            problem = Problem.of(graph, machine.named(row.cluster))
            found[row.label, number] = _at_once(paper, row, problem, effort.seeds)
            if not number:
                limit = find_bound(problem)
                bounds[row.label] = None if limit is None else limit.seconds
        on_row(row)
    answers = [
        _claim_ratios(claim, row, [found[row.label, number] for number in range(len(changed))], bounds[row.label])
        for claim in CLAIMS
        if claim.paper == paper.name
        for row in rows
        if not claim.families or row.family in claim.families
    ]
    return [answer for answer in answers if any(ratio is not None for ratio in answer.ratios)]


def _at_once(paper: Paper, row: PaperRow, problem: Problem, seeds: int) -> dict[str, float]:
    """Returns the median seconds of each column that answers at once, and the least of those on GPUs."""
    with TemporaryDirectory(prefix="placewise-") as folder:
        contest = Contest(problem, Simulator(problem), row.model, problem.cluster.name, Path(folder) / "runs.db")
        found: dict[str, Found] = {
            column.name: find(contest, column.strategy, column.settings, MOST_EVALUATIONS, seeds)
            for column in paper.columns
            if column.strategy in AT_ONCE and row.has(column)
        }
        found.update(extra_columns(contest))
    medians = {name: result.median for name, result in found.items()}
    times = {name: seconds for name, seconds in medians.items() if seconds is not None}
    rules = [seconds for name, seconds in times.items() if name not in ("CPU only", "single GPU", HEFT_EXPECTS)]
    return times | ({BEST_RULE: min(rules)} if rules else {})


def _claim_ratios(claim: Claim, row: PaperRow, found: list[dict[str, float]], bound: float | None) -> ClaimRatios:
    of = claim.of if any(claim.of in times for times in found) else BEST_RULE
    ratios = tuple(times[of] / times[claim.to] if of in times and times.get(claim.to) else None for times in found)
    first = found[0].get(claim.to)
    least = bound / first if bound and first else None
    return ClaimRatios(claim, row, of, ratios[: len(FACTORS)], ratios[len(FACTORS) :], least)


def what_if_table(answers: list[ClaimRatios]) -> tuple[list[str], list[list[str]]]:
    """Returns a line for each claim and row: the ratio on each machine, from where on it holds, and the least possible."""
    launches = [f"{seconds * 1e3:g} ms" for seconds in LAUNCHES]
    header = ["claim", "row", "of", *(f"{factor:g}x" for factor in FACTORS), *launches, "holds from", "no placement below"]
    lines = [
        [
            answer.claim.text,
            answer.row.label,
            answer.of,
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in (*answer.ratios, *answer.launch_ratios)),
            _holds_from(answer),
            "-" if answer.least_ratio is None else f"{answer.least_ratio:.2f}",
        ]
        for answer in answers
    ]
    return header, lines


def _holds_from(answer: ClaimRatios) -> str:
    factor, launch = answer.holds_from, answer.holds_from_launch
    found = [] if factor is None else [f"{factor:g}x"]
    found += [] if launch is None else [f"{launch * 1e3:g} ms"]
    return " or ".join(found) or "-"
