"""placewise resume: continue a recorded search."""

import argparse
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from placewise.cli.outputs import check_writable
from placewise.cli.searches import bounded_planner, finish_search, search_with_progress
from placewise.cli.shared_options import add_command, add_plan_options, add_worker_options, positive_argument
from placewise.core.errors import InputError

if TYPE_CHECKING:
    from placewise.search.store import Run


def add_resume(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "resume", _resume, "continue a recorded search that was stopped or killed")
    parser.add_argument("run", metavar="RUN", type=positive_argument, help="its number, as `placewise runs` lists it")
    parser.add_argument("--run-file", metavar="RUNS.DB", required=True, help="the file in which it is recorded")
    parser.add_argument(
        "--model", metavar="MODEL", help="the function that returns its model: needed for a measured run, which calls it"
    )
    add_plan_options(parser)
    add_worker_options(parser)


def _resume(options: argparse.Namespace) -> None:
    from placewise.search.request import requested
    from placewise.search.store import Run, RunFile

    check_writable(options.output, options.report, reads=(options.run_file,))
    with RunFile(options.run_file, create=False) as file, Run(file, options.run) as run:
        model = _trusted_model(options, run)
        problem, request = file.problem(options.run), replace(requested(run.info.specification), model=model)
        planner = bounded_planner(options, problem, request)
        outcome = search_with_progress(planner, options, record=run)
    finish_search(planner, outcome, options)


def _trusted_model(options: argparse.Namespace, run: "Run") -> str:
    """Returns the model that may be loaded to measure: what --model names, or a model of the zoo; "" if none is needed.

    A function that a file names is never called.
    """
    from placewise.models import is_zoo_model

    recorded, is_measured = run.info.specification.model, bool(run.info.specification.measured)
    if options.model is not None:
        if not is_measured:
            raise InputError(f"--model: run {run.number} is simulated, so it needs no model")
        return str(options.model)
    if not is_measured or is_zoo_model(recorded):
        return recorded
    if run.outcome() is not None:
        return ""
    raise InputError(
        f"{options.run_file}: run {run.number} measures {recorded!r}, and to resume it is to import and call that: if you "
        f"trust it, add --model {shlex.quote(recorded)}"
    )
