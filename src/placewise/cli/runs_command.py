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
    parser.add_argument(
        "--recover", metavar="NEW.DB", help="save what can still be read of a damaged file to a new one, and list that"
    )


def _runs(options: argparse.Namespace) -> None:
    if options.recover is None:
        _list_runs(options)
    else:
        _recover(options)


def _recover(options: argparse.Namespace) -> None:
    from placewise.cli.outputs import check_writable
    from placewise.core.quantities import format_count
    from placewise.report.terminal_text import printable
    from placewise.search.recovery import recover

    check_writable(options.recover, reads=(options.run_file,))
    saved = recover(options.run_file, options.recover)
    if options.json:
        print_json({"run_file": options.recover, "runs": [run._asdict() for run in saved]})
        return
    print(f"{options.recover}: what could be saved of {options.run_file}")
    for run in saved:
        saved_evaluations = format_count(run.evaluations, "evaluation")
        print(printable(f"run {run.number}: {saved_evaluations} saved; lost: {run.lost or 'nothing'}"))


def _list_runs(options: argparse.Namespace) -> None:
    from placewise.core.quantities import format_seconds
    from placewise.report.terminal_text import table
    from placewise.search.store import RunFile

    with RunFile(options.run_file, read_only=True) as file:
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
