"""What the systems with networks learn, beside a control that learns nothing: `placewise bench neural`."""

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from placewise.experiments.bench import NEURAL, Benchmark, Findings, Rows, option
from placewise.experiments.bench.bench_learning import Contestant

if TYPE_CHECKING:
    from placewise.experiments.recorded_searches import Contest, SampledCosts

MACHINES = {"nmt:layers=2": "2xK80", "nmt:layers=4": "4xK80"}

OTHER_MACHINE = "4xK80"  # of other models


DEFAULTS = "defaults"

PAPER: dict[str, dict[str, str]] = {
    "colocrl": {
        "grouping": "cell",
        "max_blocks": "512",
        "first_baseline": "failing",
        "advantage": "raw",
        "exploration": "0",
    },
    "spotlight": {
        "grouping": "name-prefix:2",
        "units": "256",
        "ascent_steps": "10",
        "reward_scale": "10",
        "output_rate": "1e-4",
        "baseline_decay": "1",
        "advantage": "raw",
        "exploration": "0",
    },
    "hdp": {
        "groups": "256",
        "first_groups": "random",
        "group_confidence": "0.01",
        "learning_rate": "0.1",
        "grouper_rate": "0.1",
        "output_rate": "0.1",
        "advantage": "raw",
        "exploration": "0",
    },
}

CONTESTANTS = (
    *(Contestant(name, DEFAULTS) for name in ("expert", "even", "post", *NEURAL)),
    *(Contestant(name, "with a table", {"table_rate": "0.1"}) for name in NEURAL),
    Contestant("hdp", "coarse groups that stay", {"grouping": "fixed"}),
    Contestant("hdp", "from stretches", {"first_groups": "stretches"}),
    Contestant("hdp", "from random groups", {"first_groups": "random", "group_confidence": "0.02"}),
    Contestant("hdp", "random groups that stay", {"grouping": "fixed", "first_groups": "random"}),
    Contestant("policy-gradient", "normalised", {"advantage": "normalised"}),
    *(Contestant(name, "the paper's settings", PAPER[name]) for name in NEURAL),
)


@dataclass(frozen=True)
class NeuralSystems(Benchmark):
    """What ColocRL, Spotlight and HDP sample and find, with variants, beside a control that learns nothing."""

    models: tuple[str, ...] = option("models", "only these models", default=tuple(MACHINES))
    variants: tuple[str, ...] = option("list", "only these strategies or variants: 'hdp,with a table'", "NAMES", default=())
    budget: int = option("positive", "evaluations of each search", default=2400)
    seeds: int = option("positive", "searches of each variant", "K", default=5)
    run_file: str | None = option("file", "record the searches here; the same command then continues", "RUNS.DB")
    plots: str | None = option("folder", "write pictures into this folder: best steps and means of the samples", "DIR")
    markdown: bool = option("flag", "print Markdown tables", default=False)

    def run(self) -> Findings:
        """Returns, for each variant, the best step and the means of its first and last samples; medians over the seeds."""
        from placewise.core.cluster import Cluster
        from placewise.core.errors import InputError
        from placewise.core.problem import Problem
        from placewise.experiments.recorded_searches import Contest, recorded
        from placewise.models import load_graph
        from placewise.report.markdown_tables import markdown_table
        from placewise.report.terminal_text import table
        from placewise.simulate.simulator import Simulator

        chosen = [c for c in CONTESTANTS if not self.variants or {c.strategy, c.variant} & set(self.variants)]
        if not chosen:
            raise InputError(f"--variants: none of {', '.join(self.variants)} is a variant")
        if self.plots is not None:
            from placewise.experiments.search_figures import check_drawing

            check_drawing()
        rows: Rows = []
        texts, is_complete = [], True
        with recorded(self.run_file) as run_file:
            for model in self.models:
                cluster = MACHINES.get(model, OTHER_MACHINE)
                problem = Problem.of(load_graph(model), Cluster.load(cluster))
                contest = Contest(problem, Simulator(problem), model, cluster, run_file)
                searched: dict[str, list[SampledCosts]] = {}
                try:
                    for contestant in chosen:
                        searched[_label(contestant)] = self._samples(contest, contestant)
                except KeyboardInterrupt:
                    is_complete = False
                found = [_row(model, cluster, label, samples) for label, samples in searched.items() if samples]
                rows += found
                cells = [_cells(row) for row in found]
                texts.append("\n".join(markdown_table(COLUMNS, cells)) if self.markdown else table(COLUMNS, cells))
                if self.plots is not None:
                    from placewise.experiments.search_figures import write_samples_figure

                    write_samples_figure(self.plots, f"{model} on {cluster}", searched, control="even")
                if not is_complete:
                    break
        return Findings({self.name(): rows}, "\n\n".join(texts), is_complete=is_complete)

    def _samples(self, contest: "Contest", contestant: Contestant) -> "list[SampledCosts]":
        """Returns what each seed's search sampled; empty if the strategy can't be used."""
        from placewise.experiments.recorded_searches import SampledCosts, judged_searches

        settings = {**contestant.settings, **({"evaluations": str(self.budget)} if contestant.strategy == "post" else {})}
        searches = judged_searches(contest, contestant.strategy, settings, self.budget, self.seeds)
        return [SampledCosts.of(batches) for batches in searches]


COLUMNS = ["model", "strategy", "best ms", "from", "to", "first samples", "last samples", "entropy", "groups", "grouper"]


def _label(contestant: Contestant) -> str:
    """Returns what tables and pictures call it."""
    name, variant, _ = contestant
    return name if variant == DEFAULTS else f"{name}, {variant}"


def _row(model: str, cluster: str, label: str, samples: "list[SampledCosts]") -> dict[str, Any]:
    bests = sorted(float(one.best[-1]) for one in samples)
    notes = {
        name: statistics.median(float(one.notes[name]) for one in samples)
        for name in ("entropy", "groups_used", "grouper_entropy")
        if all(name in one.notes for one in samples)
    }
    return {
        "model": model,
        "cluster": cluster,
        "strategy": label,
        "best_seconds": bests,
        "median": statistics.median(bests),
        "first_samples": statistics.median(one.mean_of_tenth(0) for one in samples),
        "last_samples": statistics.median(one.mean_of_tenth(-1) for one in samples),
        **notes,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    times = (row["median"], row["best_seconds"][0], row["best_seconds"][-1], row["first_samples"], row["last_samples"])
    kinds = (("entropy", ".2f"), ("groups_used", ".0f"), ("grouper_entropy", ".3f"))
    notes = [format(row[name], form) if name in row else "" for name, form in kinds]
    return [f"{row['model']} on {row['cluster']}", row["strategy"], *(f"{seconds * 1e3:,.0f}" for seconds in times), *notes]
