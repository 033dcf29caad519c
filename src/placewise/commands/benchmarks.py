"""Measuring placewise itself."""

import argparse
import sys
from pathlib import Path
from typing import Any

from placewise.commands.common import (
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
from placewise.commands.profiling import add_virtual_option
from placewise.core.errors import InputError
from placewise.report.tables import seconds, table

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

MOST_NAMES = {"start": 0, "scale": 0, "execute": 0, "curve": 2}  # of those that take no list of models


def add_bench(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "bench", _bench, "measure how fast placewise is on this machine")
    kinds = "; ".join(f"{name}: {text}" for name, text in BENCHMARKS.items())
    parser.add_argument("what", choices=tuple(BENCHMARKS), help=kinds)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="only these models")
    rows = parser.add_argument_group("rows")
    rows.add_argument("--rows", choices=("post", "hdp", "today", "all"), default="all", help="which table (all)")
    rows.add_argument("--quick", action="store_true", help="100 evaluations, 1 second")
    rows.add_argument("--seconds", metavar="S", type=seconds_argument, help="time for auto (10)")
    rows.add_argument("--budget", metavar="N", type=positive_argument, help="evaluations for all others (2400)")
    rows.add_argument("--bound-seconds", metavar="S", type=seconds_argument, help="effort for the bound (the quick ones)")
    rows.add_argument("--strategies", metavar="A,B", help="names or families (all but exact and the neural ones)")
    rows.add_argument("-o", "--output", metavar="ROWS.JSON", help="keep each result as it comes; go on where the file ends")
    rows.add_argument("--markdown", action="store_true", help="print tables for a page")
    measured = parser.add_argument_group("measured", "with --strategies, --seconds and --budget, too")
    add_virtual_option(measured)
    measured.add_argument("--plan", metavar="PLAN", action="append", default=[], help="run this plan.json too")
    measured.add_argument(
        "--measurements",
        metavar="N",
        type=count_argument,
        help="that Post has behind its search in the simulator (60)",
    )
    measured.add_argument("--cuda-graphs", action="store_true", help="run everything a second time, with CUDA graphs")
    measured.add_argument("--keep", metavar="DIR", help="write the profile, and a plan for each placement, into this folder")
    suite = parser.add_argument_group(
        "suite", "with MODEL (files too, or all), --strategies, --budget, --workers, --ray, -o"
    )
    suite.add_argument("--clusters", metavar="A,B", help="presets or files, or 'all' (2xK80,4xV100-nvlink,4090+3060)")
    suite.add_argument("--seeds", metavar="K", type=positive_argument, default=1, help="searches with each strategy (1)")
    suite.add_argument("--run-file", metavar="RUNS.DB", help="record every search, and go on with what was left")
    suite.add_argument("--plots", metavar="DIR", help="write a picture (SVG) of each problem's searches into this folder")
    add_worker_options(parser)
    scale = parser.add_argument_group("scale-out", "with MODEL CLUSTER and --budget")
    scale.add_argument("--delay", metavar="S", type=seconds_argument, help="what an evaluation takes (0.5)")
    scale.add_argument("--counts", metavar="A,B", help="how many workers to try (1,2,4,8,12)")
    scale.add_argument("--kills", metavar="N", type=count_argument, help="workers to kill in a last search (2)")


def _bench(options: argparse.Namespace) -> None:
    from placewise import bench, bench_curve, bench_learning, bench_page

    most = MOST_NAMES.get(options.what)
    if most is not None and len(options.models) > most:
        raise InputError(f"bench {options.what}: takes {most or 'no'} names, there are {len(options.models)}")
    if options.what == "rows":
        _bench_rows(options)
        return
    if options.what == "suite":
        _bench_suite(options)
        return
    if options.what == "scale-out":
        _print_rows("scale-out", _bench_scale_out(options), options)
        return
    if options.what == "measured":
        _print_rows("measured", _bench_measured(options), options)
        return
    if options.what == "execute":
        from placewise.execute.benchmark import bench_execute

        _print_rows("execute", bench_execute(), options)
        return
    module = {"learning": bench_learning, "curve": bench_curve, "page": bench_page}.get(options.what, bench)
    rows = getattr(module, f"bench_{options.what}")(tuple(options.models))
    _print_rows(options.what, rows, options)


def _print_rows(name: str, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.json:
        print_json({name: rows})
    else:
        print(table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows]))


def _bench_measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    from placewise.bench_measured import Trial, bench_measured
    from placewise.core.cluster import Cluster
    from placewise.strategies import names_of

    if len(options.models) != 2:
        raise InputError(f"bench measured: needs a model and a cluster, there are {len(options.models)} names")
    model, machine = options.models[0], Cluster.load(options.models[1])
    usual = Trial()
    trial = Trial(
        tuple(names_of(options.strategies)) if options.strategies else usual.strategies,
        tuple(options.plan),
        options.budget or usual.evaluations,
        options.seconds or usual.seconds,
        usual.measurements if options.measurements is None else options.measurements,
        virtual=dict(options.virtual),
        cuda_graphs=options.cuda_graphs,
        kept=options.keep,
    )
    if trial.cuda_graphs and all(device.kind != "gpu" for device in machine.devices):
        raise InputError(f"--cuda-graphs: cluster {machine.name!r} has no GPU")
    if options.keep:
        try:
            Path(options.keep).mkdir(parents=True, exist_ok=True)
        except OSError as trouble:
            raise InputError(f"--keep: {options.keep} can't be made a folder: {trouble.strerror}") from None
    return bench_measured(model, machine, trial, lambda line: print(line, file=sys.stderr, flush=True))


def _bench_rows(options: argparse.Namespace) -> None:
    from placewise.bench_rows import QUICK, ROWS, TABLES, Effort, bench_rows, markdown, summary
    from placewise.strategies import names_of

    check_writable(options.output)
    usual = QUICK if options.quick else Effort()
    effort = Effort(options.budget or usual.evaluations, options.seconds or usual.seconds, options.bound_seconds)
    rows = tuple(
        row for row in ROWS if options.rows in (row.table, "all") and (not options.models or row.model in options.models)
    )
    if not rows:
        raise InputError(f"no row has one of these models; the models are {', '.join(dict.fromkeys(r.model for r in ROWS))}")
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


def _bench_suite(options: argparse.Namespace) -> None:
    from placewise import bench_suite as bench
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
    if not is_complete:
        print(f"placewise: stopped: this is what there is; {how_to_go_on(options)}", file=sys.stderr)


def _show_found(judged: Any, name: str) -> None:
    """Shows what a strategy has found, on a terminal."""
    if sys.stderr.isatty():
        found = judged.found[name]
        step = found.problem or ("nothing fits" if found.median is None else seconds(found.median))
        print(f"{judged.model} on {judged.cluster}: {name} {step}, {found.search_seconds:.1f} s", file=sys.stderr)


def _bench_scale_out(options: argparse.Namespace) -> list[dict[str, Any]]:
    from placewise.bench_scale_out import Trial, bench_scale_out

    usual = Trial()
    words = options.counts.split(",") if options.counts else []
    for word in words:
        if not word.isdecimal() or not 0 < int(word) <= 1000:
            raise InputError(f"--counts: must be whole numbers from 1 to 1000, one is {word!r}")
    trial = Trial(
        tuple(map(int, words)) or usual.workers,
        options.delay or usual.delay_seconds,
        options.budget or usual.evaluations,
        usual.kills if options.kills is None else options.kills,
    )
    return bench_scale_out(trial, tuple(options.models))


def _show(row: Any, name: str, found: dict[str, Any]) -> None:
    """Shows a search that is done, on a terminal."""
    if sys.stderr.isatty():
        step = found["problem"] or seconds(found["step_seconds"])
        print(f"{row.name}: {name} {step}, {found['search_seconds']:.1f} s", file=sys.stderr)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
