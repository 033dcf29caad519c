"""placewise memory: what a step would cost on GPUs with less memory."""

import argparse
from typing import TYPE_CHECKING, Any

from placewise.cli.inputs import load_problem
from placewise.cli.outputs import check_writable, print_json
from placewise.cli.shared_options import (
    add_budget_options,
    add_command,
    add_grouping_option,
    add_memory_choices,
    add_order_option,
    add_problem_options,
    add_profile_options,
    count_argument,
)

if TYPE_CHECKING:
    from placewise.search.memory_curve import MemoryPoint


def add_memory(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "memory", _memory, "show the step time where the GPUs have less and less of the memory that it needs"
    )
    add_problem_options(parser)
    add_memory_choices(parser)
    add_budget_options(parser)
    parser.add_argument("--seed", metavar="N", type=count_argument, default=0, help="random seed (default: 0)")
    add_order_option(parser)
    add_grouping_option(parser)
    parser.add_argument("-o", "--output", metavar="PICTURE", help="write the curve to this picture.svg")
    add_profile_options(parser)


def _memory(options: argparse.Namespace) -> None:
    import numpy as np

    from placewise.core.errors import NothingFits
    from placewise.formats.files import write_bytes
    from placewise.report.chosen_options import describe_schedule
    from placewise.report.memory_picture import draw_memory_curve
    from placewise.report.terminal_text import problem_heading
    from placewise.search.budget import budget_of
    from placewise.search.memory_curve import memory_curve
    from placewise.search.request import DEFAULT_STRATEGY, Request

    check_writable(options.output, reads=(options.model, options.cluster, options.profile))
    budget = budget_of(DEFAULT_STRATEGY, options.budget, options.seconds)
    request = Request(DEFAULT_STRATEGY, {}, budget, options.seed, options.order, options.model, options.cluster)
    problem = load_problem(options)
    points = memory_curve(problem, request, recompute=not options.no_recompute, park=not options.no_park)[::-1]
    if all(not np.isfinite(point.step_seconds) for point in points):
        raise NothingFits("nothing fits: not even with all the memory that the step needs on the GPUs")
    words = [describe_schedule(point.schedule) for point in points]
    if options.output:
        memory, seconds = zip(*((sum(p.memory_bytes.values()), p.step_seconds) for p in points[::-1]), strict=True)
        write_bytes(options.output, draw_memory_curve(problem_heading(problem), memory, seconds).encode())
    if options.json:
        print_json({"points": [_fields(point, text) for point, text in zip(points, words, strict=True)]})
    else:
        _print(points, words, problem_heading(problem))


def _fields(point: "MemoryPoint", words: str) -> dict[str, Any]:
    fits = point.schedule is not None
    peaks = {} if point.schedule is None else dict(
        zip(point.schedule.problem.cluster.device_names, point.schedule.peak_bytes.tolist(), strict=True)
    )  # fmt: skip
    seconds = point.step_seconds if fits else None
    return {"share": point.share, "memory": point.memory_bytes, "fits": fits, "step_seconds": seconds,
            "peak_bytes": peaks, "options": words}  # fmt: skip


def _print(points: "list[MemoryPoint]", words: list[str], heading: str) -> None:
    from placewise.core.quantities import format_bytes, format_seconds
    from placewise.report.terminal_text import bold, printable, table

    first = next(point.step_seconds for point in points if point.schedule is not None)
    rows, width = [], max(map(len, words))
    for point, text in zip(points, words, strict=True):
        memory = [f"{point.share:.0%}", format_bytes(sum(point.memory_bytes.values()))]
        if point.schedule is None:
            rows.append([*memory, "nothing fits", "", " " * width])
        else:
            rows.append(
                [*memory, format_seconds(point.step_seconds), f"{point.step_seconds / first:.2f}", text.ljust(width)]
            )
    print(
        bold(printable(heading)),
        "",
        table(["share", "memory", "step", "times", "what the plan does".ljust(width)], rows),
        sep="\n",
    )
