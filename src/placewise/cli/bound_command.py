"""placewise bound: a step time that no placement can beat."""

import argparse
from typing import TYPE_CHECKING, Any

from placewise.cli.inputs import load_problem
from placewise.cli.outputs import print_json
from placewise.cli.shared_options import (
    add_command,
    add_grouping_option,
    add_problem_options,
    add_profile_options,
    seconds_argument,
)
from placewise.core.errors import PlacewiseError

if TYPE_CHECKING:
    from placewise.bounds.best_bound import Bound
    from placewise.core.problem import Problem


def add_bound(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "bound", _bound, "compute a step time that no placement can beat, and what limits it")
    add_problem_options(parser)
    add_grouping_option(parser)
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=seconds_argument,
        help="about how long to try (default: only the quick bounds); the result does not depend on the machine's speed",
    )
    parser.add_argument("--check", action="store_true", help="also check the certificates")
    add_profile_options(parser)


def _bound(options: argparse.Namespace) -> None:
    from placewise.bounds.best_bound import bound
    from placewise.bounds.certain_part import certain_part
    from placewise.bounds.check.certificates import check
    from placewise.search.advice import fastest_alone

    problem = load_problem(options)
    found = bound(problem, seconds=options.seconds)
    if options.check:
        for part in found.parts:
            try:
                check(certain_part(problem), part.name, part.seconds, part.certificate)
            except ValueError as reason:
                raise PlacewiseError(f"a bound has no proof, please report it: {reason}") from None
    single = fastest_alone(problem)
    if options.json:
        print_json(_data(problem, found, single))
    else:
        _print(problem, found, single, options.check)


def _data(problem: "Problem", found: "Bound", single: tuple[str, float] | None) -> dict[str, Any]:
    return {
        "graph": problem.graph.name,
        "cluster": problem.cluster.name,
        "grouping": problem.grouping,
        "bound_seconds": found.seconds,
        "bound": found.name,
        "limit": _limit(found),
        "bounds": {part.name: part.seconds for part in found.parts},
        "one_device": None if single is None else {"device": single[0], "step_seconds": single[1]},
        "certificate": dict(found.certificate),
    }


def _print(problem: "Problem", found: "Bound", single: tuple[str, float] | None, is_checked: bool) -> None:
    from placewise.core.quantities import format_seconds
    from placewise.report.terminal_text import printable, problem_heading, table

    limit = format_seconds(found.seconds)
    print(f"{problem_heading(problem)}: no placement has a step below {limit}\n")
    rows = [(part.name, format_seconds(part.seconds), "<- best" if part.name == found.name else "") for part in found.parts]
    print(table(("bound", "seconds", ""), rows))
    print(f"\nThe limit is {printable(_limit(found))}.")
    if single is not None:
        print(printable(_compare_one_device(single, found.seconds)))
    if is_checked:
        print("All certificates were checked.")


def _limit(found: "Bound") -> str:
    """Returns what limits the step, and why."""
    from placewise.bounds.limits import LIMITS

    return f"{LIMITS[found.name].what}: {LIMITS[found.name].why}"


def _compare_one_device(single: tuple[str, float], bound: float) -> str:
    """Returns how close the fastest single device is to the bound."""
    from placewise.core.quantities import format_percent, format_seconds

    name, step = single
    alone = f"{name} alone takes {format_seconds(step)}"
    if step <= bound * (1 + 1e-6):
        return f"{alone}: that is the bound, no other device can help."
    above = format_percent(step / bound - 1)
    return f"{alone}, {above} above the bound: all devices together can't save more than {format_seconds(step - bound)}."
