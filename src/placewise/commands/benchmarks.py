"""Measuring placewise itself."""

import argparse
from typing import Any

from placewise.commands.common import command, print_json

BENCHMARKS = {
    "capture": "microseconds per op for the models of the zoo",
    "simulate": "millions of ops x placements a second, in every form, beside plain Python",
    "start": "how long a new process takes until it has simulated, with and without compiled kernels on the disk",
    "scale": "how the simulator's time grows from 1,000 to 1,000,000 ops",
    "orders": "what the priority order gains over the program order",
    "learning": "Post's figure 2: what strategies that learn draw and find with 2,400 evaluations, five seeds",
}


def add_bench(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "bench", _bench, "measure how fast placewise is on this machine")
    kinds = "; ".join(f"{name}: {text}" for name, text in BENCHMARKS.items())
    parser.add_argument("what", choices=tuple(BENCHMARKS), help=kinds)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="only these models")


def _bench(options: argparse.Namespace) -> None:
    from placewise import bench, bench_learning
    from placewise.report.tables import table

    module = bench_learning if options.what == "learning" else bench
    rows = getattr(module, f"bench_{options.what}")(tuple(options.models))
    if options.json:
        print_json({options.what: rows})
    else:
        print(table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows]))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
