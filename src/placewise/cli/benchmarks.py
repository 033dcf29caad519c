"""Measuring placewise itself."""

import argparse
import sys
from typing import Any

from placewise.cli.common import (
    CLUSTER_HELP,
    MODEL_HELP,
    add_worker_options,
    check_folder,
    check_writable,
    command,
    count_argument,
    how_to_go_on,
    positive_argument,
    print_json,
    seconds_argument,
)
from placewise.cli.profiling import RUN_MODEL_HELP, add_virtual_option
from placewise.core.errors import InputError
from placewise.core.quantities import seconds
from placewise.report.text_tables import table

BENCHMARKS = {
    "capture": "microseconds per op for the models of the zoo",
    "simulate": "millions of ops x placements a second, in every form, beside plain Python",
    "start": "how long a new process takes until it has simulated, with and without compiled kernels on the disk",
    "scale": "how the simulator's time grows from 1,000 to 1,000,000 ops",
    "orders": "what the priority order gains over the program order",
    "learning": "Post's figure 2: what strategies that learn draw and find with 2,400 evaluations, five seeds",
    "curve": "how fast strategies get to a good answer (a model and a machine, or nmt:layers=4 4xK80)",
    "execute": "two CPU devices against one; what a launch costs the host, beside a plain loop over the same ops",
    "measured": "predicted beside measured: MODEL CLUSTER is profiled, and what strategies find is run on this machine",
    "page": "how large a page is, how soon it can be used and how smoothly it zooms, in headless Chromium",
    "rows": "what every strategy finds for the papers' models and machines and today's, beside the bound",
    "suite": "every strategy on many models and machines with equal budgets: wins, mean ratio to the best, time to solution",
    "scale-out": "wall time of a search with slow evaluations on 1 to 12 Ray workers, some of them killed",
}


def add_bench(commands: Any) -> None:
    """Adds the command, with a parser for each benchmark."""
    text = "measure how fast placewise is on this machine"
    more = "placewise bench BENCHMARK --help says more."
    parser = commands.add_parser("bench", help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=more)
    benchmarks = parser.add_subparsers(dest="what", metavar="BENCHMARK", required=True, parser_class=type(parser))
    for name, text in BENCHMARKS.items():
        add_options, run = _PARTS.get(name, (_add_models, _bench))
        add_options(command(benchmarks, name, run, text))


def _add_no_models(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(models=[])


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="only these models")


def _add_problem(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("cluster", nargs="?", metavar="CLUSTER", help=CLUSTER_HELP)


def _bench(options: argparse.Namespace) -> None:
    from placewise.experiments.bench import common as bench
    from placewise.experiments.bench import learning as bench_learning
    from placewise.experiments.bench import page_speed as bench_page

    module = {"learning": bench_learning, "page": bench_page}.get(options.what, bench)
    _print_rows(getattr(module, f"bench_{options.what}")(tuple(options.models)), options)


def _bench_curve(options: argparse.Namespace) -> None:
    from placewise.experiments.bench.curve import bench_curve

    _print_rows(bench_curve(_names(options)), options)


def _bench_execute(options: argparse.Namespace) -> None:
    from placewise.experiments.bench.execute import bench_execute

    _print_rows(bench_execute(), options)


def _names(options: argparse.Namespace) -> tuple[str, ...]:
    """Returns the model and the cluster, as far as they are given."""
    return tuple(name for name in (options.model, options.cluster) if name is not None)


def _print_rows(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.json:
        print_json({options.what: rows})
    else:
        print(table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows]))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


# --- measured ---


def _add_effort(parser: argparse.ArgumentParser, strategies: str) -> None:
    parser.add_argument("--strategies", metavar="A,B", help=f"names or families ({strategies})")
    parser.add_argument("--seconds", metavar="S", type=seconds_argument, help="time for auto (10)")
    parser.add_argument("--budget", metavar="N", type=positive_argument, help="evaluations for all others (2400)")


def _add_measured(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=RUN_MODEL_HELP)
    parser.add_argument("cluster", metavar="CLUSTER", help=CLUSTER_HELP)
    _add_effort(parser, "gpu-only, expert, balanced, m-etf, auto, post")
    add_virtual_option(parser)
    parser.add_argument("--plan", metavar="PLAN", action="append", default=[], help="run this plan.json too")
    parser.add_argument(
        "--measurements", metavar="N", type=count_argument, help="that Post has behind its search in the simulator (60)"
    )
    parser.add_argument("--rounds", metavar="N", type=positive_argument, help="profile and run what was found so often (1)")
    parser.add_argument("--cuda-graphs", action="store_true", help="run everything a second time, with CUDA graphs")
    parser.add_argument("--keep", metavar="DIR", help="write the profile, and a plan for each placement, into this folder")


def _bench_measured(options: argparse.Namespace) -> None:
    from placewise.core.cluster import Cluster
    from placewise.experiments.bench.measured_steps import Trial, bench_measured, summary
    from placewise.strategies import names_of

    machine, usual = Cluster.load(options.cluster), Trial()
    trial = Trial(
        tuple(names_of(options.strategies)) if options.strategies else usual.strategies,
        tuple(options.plan),
        options.budget or usual.evaluations,
        options.seconds or usual.seconds,
        usual.measurements if options.measurements is None else options.measurements,
        rounds=options.rounds or usual.rounds,
        virtual=dict(options.virtual),
        cuda_graphs=options.cuda_graphs,
        kept=options.keep,
    )
    if trial.cuda_graphs and all(device.kind != "gpu" for device in machine.devices):
        raise InputError(f"--cuda-graphs: cluster {machine.name!r} has no GPU")
    check_folder(options.keep)
    rows, is_complete = bench_measured(options.model, machine, trial, lambda line: print(line, file=sys.stderr, flush=True))
    whole = summary(rows)
    if options.json:
        print_json({options.what: rows, **whole, "is_complete": is_complete})
    else:
        _print_rows(rows, options)
        print("", *(f"{name}: {'-' if value is None else f'{value:.3g}'}" for name, value in whole.items()), sep="\n")
    if not is_complete:
        print("placewise: stopped: this is what there is", file=sys.stderr)


# --- rows ---


def _add_rows(parser: argparse.ArgumentParser) -> None:
    _add_models(parser)
    parser.add_argument("--rows", choices=("post", "hdp", "today", "all"), default="all", help="which table (all)")
    parser.add_argument("--quick", action="store_true", help="100 evaluations, 1 second")
    _add_effort(parser, "all but exact and the neural ones")
    parser.add_argument("--bound-seconds", metavar="S", type=seconds_argument, help="effort for the bound (the quick ones)")
    parser.add_argument("-o", "--output", metavar="ROWS.JSON", help="keep each result at once; go on where the file ends")
    parser.add_argument("--markdown", action="store_true", help="print tables for a page")


def _bench_rows(options: argparse.Namespace) -> None:
    from placewise.experiments.bench.rows import QUICK, ROWS, TABLES, Effort, bench_rows, markdown, summary
    from placewise.strategies import names_of

    check_writable(options.output)
    usual = QUICK if options.quick else Effort()
    effort = Effort(options.budget or usual.evaluations, options.seconds or usual.seconds, options.bound_seconds)
    rows = tuple(
        row for row in ROWS if options.rows in (row.table, "all") and (not options.models or row.model in options.models)
    )
    if not rows:
        known = dict.fromkeys(row.model for row in ROWS if options.rows in (row.table, "all"))
        raise InputError(f"no row has one of these models; the models of --rows {options.rows} are {', '.join(known)}")
    names = names_of(options.strategies) if options.strategies else ()
    results = bench_rows(rows, effort, names, options.output, _show)
    if options.json:
        print_json({"rows": results})
    elif options.markdown:
        print(*markdown(results), sep="\n")
    else:
        for name in TABLES:
            if here := [result for result in results if result["table"] == name]:
                print(name, table(*summary(here)), "", sep="\n")


def _show(row: Any, name: str, found: dict[str, Any]) -> None:
    """Shows a search that is done, on a terminal."""
    if sys.stderr.isatty():
        step = found["problem"] or seconds(found["step_seconds"])
        print(f"{row.name}: {name} {step}, {found['search_seconds']:.1f} s", file=sys.stderr)


# --- suite ---


def _add_suite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="zoo names or files, or 'all' (six of the zoo)")
    parser.add_argument("--clusters", metavar="A,B", help="presets or files, or 'all' (2xK80,4xV100-nvlink,4090+3060)")
    parser.add_argument("--strategies", metavar="A,B", help="names or families (all but exact and the neural ones)")
    parser.add_argument("--budget", metavar="N", type=positive_argument, help="evaluations of each search (240)")
    parser.add_argument("--seeds", metavar="K", type=positive_argument, default=1, help="searches with each strategy (1)")
    parser.add_argument("--run-file", metavar="RUNS.DB", help="record every search, and go on with what was left")
    parser.add_argument("-o", "--output", metavar="SUITE.JSON", help="write all that was found")
    parser.add_argument("--plots", metavar="DIR", help="write a picture (SVG) of each problem's searches into this folder")
    parser.add_argument("--markdown", action="store_true", help="print tables for a page")
    add_worker_options(parser)


def _bench_suite(options: argparse.Namespace) -> None:
    from placewise.experiments.bench import suite as bench
    from placewise.strategies import names_of

    check_writable(options.output, options.run_file)
    check_folder(options.plots)
    usual, clusters = bench.Suite(), tuple((options.clusters or "").split(","))
    suite = bench.Suite(
        bench.ALL_MODELS if options.models == ["all"] else tuple(options.models) or usual.models,
        usual.clusters if not options.clusters else bench.ALL_CLUSTERS if clusters == ("all",) else clusters,
        names_of(options.strategies) if options.strategies else usual.strategies,
        options.budget or usual.evaluations,
        options.seeds,
    )
    done, is_complete = bench.bench_suite(
        suite, run_file=options.run_file, workers=options.workers, ray=options.ray, on_found=_show_found
    )
    if options.output:
        bench.write_results(suite, done, is_complete, options.output)
    if options.plots:
        bench.write_pictures(suite, done, options.plots)
    if options.json:
        print_json(bench.to_json(suite, done, is_complete))
    elif options.markdown:
        print(*bench.markdown(suite, done), sep="\n")
    else:
        print(table(*bench.score_table(bench.scores(suite, done))))
    troubles = {name: found.problem for judged in done for name, found in judged.found.items() if found.problem}
    for name, why in troubles.items():
        print(f"placewise: {name}: {why}", file=sys.stderr)
    if not is_complete:
        print(f"placewise: stopped: this is what there is; {how_to_go_on(options)}", file=sys.stderr)


def _show_found(judged: Any, name: str) -> None:
    """Shows what a strategy has found, on a terminal."""
    if sys.stderr.isatty():
        found = judged.found[name]
        step = found.problem or ("nothing fits" if found.median is None else seconds(found.median))
        print(f"{judged.model} on {judged.cluster}: {name} {step}, {found.search_seconds:.1f} s", file=sys.stderr)


# --- scale-out ---


def _add_scale_out(parser: argparse.ArgumentParser) -> None:
    _add_problem(parser)
    parser.add_argument("--budget", metavar="N", type=positive_argument, help="evaluations of each search (48)")
    parser.add_argument("--delay", metavar="S", type=seconds_argument, help="what an evaluation takes (0.5)")
    parser.add_argument("--counts", metavar="A,B", help="how many workers to try (1,2,4,8,12)")
    parser.add_argument("--kills", metavar="N", type=count_argument, help="workers to kill in a last search (2)")


def _bench_scale_out(options: argparse.Namespace) -> None:
    from placewise.experiments.bench.scale_out import Trial, bench_scale_out

    usual = Trial()
    words = options.counts.split(",") if options.counts else []
    for word in words:
        if not word.isdecimal() or len(word) > 4 or not 0 < int(word) <= 1000:
            raise InputError(f"--counts: must be whole numbers from 1 to 1000, one is {word!r}")
    trial = Trial(
        tuple(map(int, words)) or usual.workers,
        options.delay or usual.delay_seconds,
        options.budget or usual.evaluations,
        usual.kills if options.kills is None else options.kills,
    )
    _print_rows(bench_scale_out(trial, _names(options)), options)


_PARTS = {  # the options that each takes, and what carries it out; the others take models, and `_bench` does
    "start": (_add_no_models, _bench),
    "scale": (_add_no_models, _bench),
    "curve": (_add_problem, _bench_curve),
    "execute": (_add_no_models, _bench_execute),
    "measured": (_add_measured, _bench_measured),
    "rows": (_add_rows, _bench_rows),
    "suite": (_add_suite, _bench_suite),
    "scale-out": (_add_scale_out, _bench_scale_out),
}
