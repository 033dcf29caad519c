"""What no placement can beat: bound."""

import argparse
from typing import TYPE_CHECKING, Any

from placewise.cli.common import CLUSTER_HELP, MODEL_HELP, command, print_json, seconds_argument
from placewise.cli.profiling import add_profile_options, load_timed

if TYPE_CHECKING:
    from placewise.bounds.best_bound import Bound
    from placewise.core.problem import Problem


def add_bound(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "bound", _bound, "say what step time no placement can beat, and why")
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--cluster", metavar="C", required=True, help=CLUSTER_HELP)
    parser.add_argument("--grouping", default="colocated", help="what is placed together (colocated); see docs/concepts.md")
    parser.add_argument(
        "--seconds", metavar="S", type=seconds_argument, help="effort: about this time, the same result always"
    )
    parser.add_argument("--check", action="store_true", help="check the certificates too")
    add_profile_options(parser)


def _bound(options: argparse.Namespace) -> None:
    from placewise.bounds.best_bound import bound
    from placewise.bounds.check.certificates import check
    from placewise.core.problem import Problem
    from placewise.report.words import fastest_alone

    graph, cluster, _ = load_timed(options)
    problem = Problem.of(graph, cluster, options.grouping)
    found = bound(problem, seconds=options.seconds)
    if options.check:
        for part in found.parts:
            check(problem, part.name, part.seconds, part.certificate)
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
    from placewise.core.quantities import seconds
    from placewise.report.text_tables import bold, table

    print(f"{bold(problem.graph.name)} on {problem.cluster.name}: no placement has a step below {seconds(found.seconds)}\n")
    rows = [(part.name, seconds(part.seconds), "<- best" if part.name == found.name else "") for part in found.parts]
    print(table(("bound", "seconds", ""), rows))
    print(f"\nThe limit is {_limit(found)}.")
    if single is not None:
        print(_beside(single, found.seconds))
    if is_checked:
        print("All certificates were checked.")


def _limit(found: "Bound") -> str:
    """Returns what limits the step, and why."""
    from placewise.bounds.words import LIMITS

    return f"{LIMITS[found.name].what}: {LIMITS[found.name].why}"


def _beside(single: tuple[str, float], bound: float) -> str:
    """Returns what the bound says of the fastest single device."""
    from placewise.core.quantities import seconds

    name, step = single
    alone = f"{name} alone takes {seconds(step)}"
    if step <= bound * (1 + 1e-6):
        return f"{alone}: that is the bound, no other device can help."
    above = 100 * (step / bound - 1)
    return f"{alone}, {above:.1f}% above the bound: all devices together can't save more than {seconds(step - bound)}."
