"""Measuring placewise itself: bench, with the options and results of the benchmarks in experiments/bench."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placewise.cli.outputs import check_folder, check_writable, how_to_continue, print_json, warn
from placewise.cli.shared_options import (
    CLUSTER_HELP,
    MODEL_HELP,
    RUN_MODEL_HELP,
    add_command,
    add_virtual_option,
    add_worker_options,
    count_argument,
    percent_argument,
    positive_argument,
    seconds_argument,
    share_argument,
)
from placewise.core.errors import InputError, PlacewiseError

if TYPE_CHECKING:
    from dataclasses import Field

    from placewise.experiments.bench import Benchmark

POSITIONAL_HELP = {"model": MODEL_HELP, "run-model": RUN_MODEL_HELP, "cluster": CLUSTER_HELP}

SHARED = {"virtual": add_virtual_option, "workers": add_worker_options}  # options that other commands have too

ARGUMENTS: dict[str, dict[str, Any]] = {  # how argparse reads other options
    "strategies": {"metavar": "A,B"},
    "list": {"metavar": "A,B"},
    "repeated": {"action": "append", "default": []},
    "positive": {"metavar": "N", "type": positive_argument},
    "count": {"metavar": "N", "type": count_argument},
    "seconds": {"metavar": "S", "type": seconds_argument},
    "percent": {"metavar": "P", "type": percent_argument},
    "share": {"metavar": "F", "type": share_argument},
}


def add_bench(commands: Any) -> None:
    """Adds the command, with a parser for each benchmark."""
    text = "measure how fast placewise is on this machine"
    more = "`placewise bench BENCHMARK --help` lists the options of a benchmark."
    parser = commands.add_parser("bench", help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=more)
    parser.add_subparsers(dest="what", metavar="BENCHMARK", required=True, parser_class=type(parser), action=_Benchmarks)


class _Benchmarks(argparse._SubParsersAction):  # type: ignore[type-arg]
    """A command for each benchmark; they are imported when argparse asks for them, not by other commands."""

    is_complete = False

    @property
    def choices(self) -> Any:
        self._complete()
        return self._name_parser_map

    @choices.setter
    def choices(self, _: Any) -> None:
        """Ignores the dict that argparse sets: `choices` returns it."""

    def _get_subactions(self) -> Any:
        self._complete()
        return super()._get_subactions()

    def _complete(self) -> None:
        if self.is_complete:
            return
        from placewise.experiments.bench import find_benchmarks

        self.is_complete = True
        for name, benchmark in find_benchmarks().items():
            parser = add_command(self, name, _bench, benchmark.summary())
            parser.set_defaults(benchmark=benchmark)
            for entry in benchmark.options():
                _add_option(parser, entry)


def _add_option(parser: argparse.ArgumentParser, entry: "Field[Any]") -> None:
    """Adds the option of a benchmark's field; what is not given is None or empty, and leaves the field's default."""
    from dataclasses import MISSING

    kind, text, metavar = (entry.metadata[name] for name in ("kind", "help", "metavar"))
    flag = f"--{entry.name.replace('_', '-')}"
    text += f" (default: {entry.default:g})" if type(entry.default) in (int, float) else ""
    if kind in ("models", "names"):
        parser.add_argument(entry.name, nargs="*", metavar=metavar or "MODEL", help=text)
    elif kind in POSITIONAL_HELP:
        is_required = entry.default is MISSING
        text = POSITIONAL_HELP[kind] + ("" if is_required or entry.default is None else f" (default: {entry.default})")
        parser.add_argument(entry.name, nargs=None if is_required else "?", metavar=entry.name.upper(), help=text)
    elif kind in SHARED:
        SHARED[kind](parser)
    elif kind == "flag":
        parser.add_argument(flag, action="store_true", help=text)
    elif kind == "choice":
        parser.add_argument(flag, choices=entry.metadata["choices"], help=f"{text} (default: {entry.default})")
    elif kind != "ray":  # `workers` has added it
        flags = ("-o", flag) if entry.name == "output" else (flag,)
        parser.add_argument(*flags, **(ARGUMENTS.get(kind, {}) | ({"metavar": metavar} if metavar else {})), help=text)


def _bench(options: argparse.Namespace) -> None:
    findings = _benchmark(options).run()
    if options.json:
        print_json(findings.data)
    else:
        print(findings.text)
    for warning in findings.warnings:
        warn(warning)
    if not findings.is_complete:
        more = f"; {how_to_continue(options)}" if hasattr(options, "run_file") else ""
        warn(f"stopped: these are the results so far{more}")
    if findings.failure:
        raise PlacewiseError(findings.failure)


def _benchmark(options: argparse.Namespace) -> "Benchmark":
    """Returns the benchmark with the options that were given; outputs that can't be written are refused."""
    values: dict[str, Any] = {}
    files: list[str] = []
    reads: list[str] = []  # words that may name files
    for entry in options.benchmark.options():
        kind, value = entry.metadata["kind"], getattr(options, entry.name)
        if value is None or value is False or value == []:
            continue
        if kind == "strategies":
            from placewise.strategies import names_of

            value = names_of(value)
        elif kind == "list":
            value = value.split(",")
        elif kind == "file":
            files.append(value)
        elif kind == "folder":
            check_folder(value)
        elif kind == "source" and not Path(value).exists():
            raise InputError(f"{value}: does not exist")
        values[entry.name] = tuple(value) if isinstance(value, list) else value
        if kind not in ("file", "folder"):
            reads += [str(one) for one in value] if isinstance(value, (list, tuple)) else [str(value)]
    check_writable(*files, reads=reads)
    benchmark: Benchmark = options.benchmark(**values)
    return benchmark
