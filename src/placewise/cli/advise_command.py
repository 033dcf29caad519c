"""placewise advise: what limits a step, and what would help."""

import argparse
from typing import TYPE_CHECKING, Any

from placewise.cli.outputs import print_json
from placewise.cli.progress import Line, Shown
from placewise.cli.shared_options import add_command, add_problem_options, count_argument, seconds_argument

if TYPE_CHECKING:
    from placewise.search.advice import Advice


def add_advise(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "advise", _advise, "say what limits a step on a machine, and what would help how much, by simulation"
    )
    add_problem_options(parser)
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=seconds_argument,
        default=3.0,
        help="for each of about 15 searches; the one for the plan itself gets three times as much (default: 3)",
    )
    parser.add_argument("--seed", metavar="N", type=count_argument, default=0, help="random seed (default: 0)")
    parser.add_argument("--quiet", action="store_true", help="print no progress")


def _advise(options: argparse.Namespace) -> None:
    from placewise.core.cluster import Cluster
    from placewise.core.errors import NothingFits
    from placewise.models import load_graph, load_training_step
    from placewise.search.advice import Adviser

    cluster = Cluster.load(options.cluster).limited(dict(options.memory))
    graph = load_graph(options.model)
    with Line(options) as line:
        adviser = Adviser(options.seconds, options.seed, lambda what: line.show(Shown(f"trying: {what}")))
        advice = adviser.advise(graph, cluster, lambda: load_training_step(options.model))
    if advice is None:
        raise NothingFits("nothing fits: `placewise place` says by how much")
    if options.json:
        print_json(_fields(advice))
    else:
        _print(advice)


def _fields(advice: "Advice") -> dict[str, Any]:
    import numpy as np

    alone = advice.alone
    return {
        "step_seconds": advice.seconds,
        "alone": None if alone is None else {"device": alone[0], "step_seconds": alone[1]},
        "limits": [{"what": limit.what, "saved": limit.saved} for limit in advice.limits],
        "changes": [
            {
                "what": change.what,
                "kind": change.kind,
                "step_seconds": change.seconds if np.isfinite(change.seconds) else None,
            }
            for change in advice.changes
        ],
        "recommendation": advice.recommendation,
    }


def _print(advice: "Advice") -> None:
    from placewise.core.quantities import format_seconds
    from placewise.report.terminal_text import bold, problem_heading, table, wrapped
    from placewise.search.advice import alone_in_words, limits_in_words

    problem = advice.schedule.problem
    used = len(set(advice.schedule.placement.tolist()))
    rows = [["this plan", format_seconds(advice.seconds), ""]]
    if advice.alone is not None:
        rows.append([f"{advice.alone[0]} alone", *_against(advice.alone[1], advice.seconds)])
    rows += [[change.what, *_against(change.seconds, advice.seconds)] for change in advice.changes]
    print(bold(f"{problem_heading(problem)}: {format_seconds(advice.seconds)} a step"), "", sep="\n")
    print(wrapped(f"one device: {alone_in_words(advice.alone, advice.seconds, used)}"))
    print(wrapped(f"what limits: {limits_in_words(advice.schedule, advice.limits)}"), "", sep="\n")
    print(table(["with", "step", "against this plan"], rows), "", sep="\n")
    print(bold(wrapped(advice.recommendation)))


def _against(changed: float, seconds: float) -> list[str]:
    """Returns a step, and how it compares with the plan's: less than 1%, which short searches can't tell, is the same."""
    import numpy as np

    from placewise.core.quantities import format_seconds

    if not np.isfinite(changed):
        return ["nothing fits", ""]
    share = changed / seconds - 1 if seconds else 0.0
    return [format_seconds(changed), f"{share:+.0%}" if abs(share) >= 0.01 else "the same"]
