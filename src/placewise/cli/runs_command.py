"""placewise runs: the searches recorded in a run file."""

import argparse
import time
from typing import Any

from placewise.cli.outputs import print_json
from placewise.cli.shared_options import add_command

_SHOWN = ("model", "cluster", "strategy", "parameters", "seed")


def add_runs(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "runs", _runs, "list the searches recorded in a run file")
    parser.add_argument("run_file", metavar="RUNS.DB", help="a file that --run-file wrote")


def _runs(options: argparse.Namespace) -> None:
    from placewise.core.quantities import format_seconds
    from placewise.report.terminal_text import table
    from placewise.search.store import RunFile

    with RunFile(options.run_file, create=False) as file:
        runs = file.runs()
    if options.json:
        entries = [
            {
                "run": run.number,
                "status": run.status,
                "evaluations": run.evaluations,
                "step_seconds": run.step_seconds,
                **{name: getattr(run.specification, name) for name in _SHOWN},
                "measured": run.specification.measured or None,
                "created": run.created,
            }
            for run in runs
        ]
        print_json({"runs": entries})
        return
    rows = [
        (
            run.number,
            run.specification.model,
            run.specification.cluster,
            run.specification.strategy,
            run.specification.seed,
            "unfinished" if run.status == "running" else run.status,
            f"{run.evaluations:,}",
            "-" if run.step_seconds is None else format_seconds(run.step_seconds),
            "measured" if run.specification.measured else "simulated",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created)),
        )
        for run in runs
    ]
    header = ("run", "model", "cluster", "strategy", "seed", "status", "evaluations", "best", "times", "begun")
    print(table(header, rows, left=4))
