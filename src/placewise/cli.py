"""The command line: parsing and printing only."""

import argparse
import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from placewise import __version__
from placewise.core.errors import InputError, NothingFits

MODEL_HELP = "a zoo name with options (nmt:layers=4,batch=64), a graph file, or package.module:function"
CLUSTER_HELP = "a preset (2xK80) or a cluster.toml"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_one_line(message)} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 2 wrong input, 3 nothing fits."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may hold what the terminal can't show
    try:
        options.run(options)
        sys.stdout.flush()
        return 0
    except InputError as problem:
        print(f"placewise: {_one_line(problem)}", file=sys.stderr)
        return 2
    except NothingFits as problem:
        print(f"placewise: {_one_line(problem)}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("placewise: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _one_line(message: object) -> str:
    """Returns a message that stays one line whatever names it holds."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="placewise",
        description="Finds where each operation of a neural network's training step should run.",
        epilog="placewise COMMAND --help says more.",
    )
    parser.add_argument("--version", action="version", version=f"placewise {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for add in (_add_models, _add_clusters, _add_capture, _add_info, _add_detect, _add_bench, _add_completion):
        add(commands)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.set_defaults(run=run)
    if name != "completion":
        parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    return parser


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1, allow_nan=False))


def _check_writable(path: str | None) -> None:
    """Refuses an output file that can't be written before any work is done."""
    if path is None:
        return
    from placewise.core.files import is_special

    folder = Path(path).absolute().parent
    if os.path.isdir(path):
        raise InputError(f"{path}: can't be written: it is a folder")
    if not os.path.isdir(folder):
        raise InputError(f"{path}: can't be written: there is no folder {folder}")
    if not os.access(path if is_special(path) else folder, os.W_OK):
        raise InputError(f"{path}: can't be written: you may not write to {folder}")


def _count(text: str) -> int:
    """Returns a whole number of at least 0."""
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, it is {text!r}")
    return int(text)


# --- models ---


def _add_models(commands: Any) -> None:
    _command(commands, "models", _models, "list the models of the zoo, with their options")


def _models(options: argparse.Namespace) -> None:
    from placewise.capture import zoo
    from placewise.report.tables import bold

    if options.json:
        models = {name: {"summary": entry.summary, "options": zoo.options(name)} for name, entry in zoo.MODELS.items()}
        _print_json(models)
        return
    for name, entry in zoo.MODELS.items():
        print(f"{bold(name)}{entry.summary:>{14 - len(name) + len(entry.summary)}}")
        print(f"{'':<14}{', '.join(f'{option}={default}' for option, default in zoo.options(name).items())}")


# --- clusters ---


def _add_clusters(commands: Any) -> None:
    parser = _command(commands, "clusters", _clusters, "list the machines that have a name, or print one as a cluster.toml")
    parser.add_argument("name", nargs="?", help="print this one, to start your own file from")


def _clusters(options: argparse.Namespace) -> None:
    from placewise.core.cluster_file import format_cluster
    from placewise.core.presets import preset, preset_names
    from placewise.report.tables import table

    if options.name is not None:
        cluster = preset(options.name)
        _print_json(_cluster_json(cluster)) if options.json else print(format_cluster(cluster), end="")
        return
    clusters = [preset(name) for name in preset_names()]
    if options.json:
        _print_json({cluster.name: _cluster_json(cluster) for cluster in clusters})
    else:
        print(table(("cluster", "what it is"), [(c.name, c.description) for c in clusters], left=2))


def _cluster_json(cluster: Any) -> dict[str, Any]:
    fields = ("name", "description", "devices", "links", "dispatch_seconds")
    return {name: dataclasses.asdict(cluster)[name] for name in fields}


# --- capture ---


def _add_capture(commands: Any) -> None:
    parser = _command(commands, "capture", _capture, "record a model's training step as a graph file")
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "-o", "--output", metavar="GRAPH", required=True, help="the file to write: graph.json or graph.json.gz"
    )


def _capture(options: argparse.Namespace) -> None:
    from placewise.capture.models import load_graph
    from placewise.core.graph_file import write_graph

    _check_writable(options.output)
    graph = load_graph(options.model)
    write_graph(graph, options.output)
    facts = {"file": options.output, "name": graph.name, "digest": graph.digest}
    facts |= {"ops": len(graph.ops), "tensors": len(graph.tensors), "groups": graph.num_groups}
    if options.json:
        _print_json(facts)
    else:
        print(f"{options.output}: {len(graph.ops):,} ops, {len(graph.tensors):,} tensors, {graph.num_groups:,} groups")


# --- info ---


def _add_info(commands: Any) -> None:
    parser = _command(commands, "info", _info, "say what a graph is like: ops, flops, bytes, parallelism")
    parser.add_argument("model", metavar="GRAPH", help=MODEL_HELP)
    parser.add_argument("--cluster", metavar="C", help=f"{CLUSTER_HELP}: take its times, and show each device's")
    parser.add_argument("--kinds", type=_count, default=12, metavar="N", help="how many kinds of op to list (default 12)")


def _info(options: argparse.Namespace) -> None:
    from placewise.capture.models import load_graph
    from placewise.core.cluster import Cluster
    from placewise.core.costs import nominal_seconds
    from placewise.core.problem import Problem
    from placewise.core.statistics import describe

    cluster = None if options.cluster is None else Cluster.load(options.cluster)
    graph = load_graph(options.model)
    problem = Problem.of(graph, cluster) if cluster else None
    facts = describe(graph, nominal_seconds(graph) if problem is None else problem.fastest_seconds)
    by_device = {}
    if problem is not None:
        by_device = dict(zip(problem.cluster.device_names, problem.op_seconds.sum(axis=0).tolist(), strict=True))
    if options.json:
        _print_json({"name": graph.name, "digest": graph.digest, **dataclasses.asdict(facts), "device_seconds": by_device})
        return
    _print_info(graph.name, facts, by_device, options)


def _print_info(name: str, facts: Any, by_device: dict[str, float], options: argparse.Namespace) -> None:
    from placewise.report.tables import bold, count, nbytes, seconds, table

    where = f"each op on its fastest device of {options.cluster}" if by_device else "a device of 10 Tflop/s and 500 GB/s"
    print(bold(name or options.model))
    print(f"{facts.num_ops:,} ops in {facts.num_groups:,} groups, {facts.num_tensors:,} tensors")
    print(f"{count(facts.flops)}flop, {nbytes(facts.nbytes_moved)} moved")
    print("resident: " + (", ".join(f"{kind} {nbytes(size)}" for kind, size in facts.resident_bytes.items()) or "nothing"))
    print(f"work {seconds(facts.work_seconds)}, critical path {seconds(facts.critical_path_seconds)} ({where})")
    print(f"parallelism {facts.parallelism:.2f}: no number of such devices is faster by more")
    print(f"{facts.depth:,} levels, the widest has {facts.widest_level:,} ops\n")
    rows = [(phase, f"{n:,}", f"{count(facts.flops_by_phase[phase])}flop") for phase, n in facts.ops_by_phase.items()]
    print(table(("phase", "ops", "work"), rows) + "\n")
    kinds = list(facts.ops_by_kind.items())
    shown = [(kind, f"{n:,}") for kind, n in kinds[: options.kinds]]
    if len(kinds) > options.kinds:
        shown.append((f"{len(kinds) - options.kinds} more kinds", f"{sum(n for _, n in kinds[options.kinds :]):,}"))
    print(table(("kind", "ops"), shown))
    if by_device:
        print("\n" + table(("device", "all ops here"), [(device, seconds(time)) for device, time in by_device.items()]))


# --- detect ---


def _add_detect(commands: Any) -> None:
    parser = _command(commands, "detect", _detect, "describe this machine as a cluster.toml")
    parser.add_argument("-o", "--output", metavar="FILE", help="the file to write (default: print it)")


def _detect(options: argparse.Namespace) -> None:
    from placewise.core.cluster import Cluster
    from placewise.core.cluster_file import format_cluster, write_cluster

    _check_writable(options.output)
    cluster = Cluster.detect()
    if options.output:
        write_cluster(cluster, options.output)
    if options.json:
        _print_json(_cluster_json(cluster))
    elif options.output:
        print(f"{options.output}: {cluster.description}")
    else:
        print(format_cluster(cluster), end="")


# --- bench ---


def _add_bench(commands: Any) -> None:
    parser = _command(commands, "bench", _bench, "measure how fast placewise is on this machine")
    parser.add_argument("what", choices=("capture",), help="capture: microseconds per op for the models of the zoo")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="only these models")


def _bench(options: argparse.Namespace) -> None:
    from placewise.bench import CAPTURED, bench_capture
    from placewise.report.tables import table

    figures = bench_capture(tuple(options.models) or CAPTURED)
    if options.json:
        _print_json({"capture": figures})
        return
    rows = [
        (
            f["model"],
            f"{f['num_ops']:,}",
            f"{f['num_groups']:,}",
            f"{f['seconds']:.2f}",
            f"{f['microseconds_per_op']:.0f}",
        )
        for f in figures
    ]
    print(table(("model", "ops", "groups", "seconds", "µs per op"), rows))


# --- completion ---


def _add_completion(commands: Any) -> None:
    parser = _command(commands, "completion", _completion, "print a completion script for your shell")
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help='e.g. eval "$(placewise completion bash)"')


def _completion(options: argparse.Namespace) -> None:
    import shtab

    print(shtab.complete(_parser(), shell=options.shell))
