"""placewise resume: continue a recorded search."""

import argparse
from typing import Any

from placewise.cli.outputs import check_writable
from placewise.cli.searches import finish_search, planner_of, search_with_progress
from placewise.cli.shared_options import add_command, add_plan_options, add_worker_options, positive_argument


def add_resume(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "resume", _resume, "continue a recorded search that was stopped or killed")
    parser.add_argument("run", metavar="RUN", type=positive_argument, help="its number, as `placewise runs` lists it")
    parser.add_argument("--run-file", metavar="RUNS.DB", required=True, help="the file in which it is recorded")
    add_plan_options(parser)
    add_worker_options(parser)


def _resume(options: argparse.Namespace) -> None:
    from placewise.search.planner import find_bound
    from placewise.search.request import requested
    from placewise.search.store import Run, RunFile

    check_writable(options.output, options.report, reads=(options.run_file,))
    with RunFile(options.run_file, create=False) as file, Run(file, options.run) as run:
        problem, request = file.problem(options.run), requested(run.info.specification)
        planner = planner_of(options, problem, request, find_bound(problem))
        outcome = search_with_progress(planner, options, record=run)
    finish_search(planner, outcome, options)
