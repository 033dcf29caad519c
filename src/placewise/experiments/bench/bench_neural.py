"""What the systems with networks learn, beside a control that learns nothing: `placewise bench neural`."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from placewise.experiments.bench import NEURAL, Benchmark, Findings, Rows, option

if TYPE_CHECKING:
    from placewise.core.arrays import Floats
    from placewise.experiments.recorded_searches import Contest

MACHINES = {"nmt:layers=2": "2xK80", "nmt:layers=4": "4xK80"}

OTHER_MACHINE = "4xK80"  # of other models

SHARE = 10  # the first and the last tenth of the samples are averaged


class Contestant(NamedTuple):
    """A strategy with settings, and what to call them."""

    strategy: str
    variant: str = "defaults"
    settings: Mapping[str, str] = {}

    @property
    def label(self) -> str:
        """What tables and pictures call it."""
        return self.strategy if self.variant == "defaults" else f"{self.strategy}, {self.variant}"


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
    *(Contestant(name) for name in ("expert", "even", "post", *NEURAL)),
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
    only: tuple[str, ...] = option("list", "strategies or variants, e.g. 'hdp,with a table'", "WORDS", default=())
    budget: int = option("positive", "evaluations of each search", default=2400)
    seeds: int = option("positive", "searches of each variant", default=5)
    run_file: str | None = option("file", "record the searches here; the same command then continues")
    plots: str | None = option("folder", "write pictures into this folder: best steps and means of the samples")
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

        chosen = [c for c in CONTESTANTS if not self.only or {c.strategy, c.variant, c.label} & set(self.only)]
        if not chosen:
            raise InputError(f"--only: none of {', '.join(self.only)} is a variant")
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
                searched: dict[str, list[Samples]] = {}
                try:
                    for contestant in chosen:
                        searched[contestant.label] = self._samples(contest, contestant)
                except KeyboardInterrupt:
                    is_complete = False
                found = [_row(model, cluster, label, samples) for label, samples in searched.items() if samples]
                rows += found
                cells = [_cells(row) for row in found]
                texts.append("\n".join(markdown_table(COLUMNS, cells)) if self.markdown else table(COLUMNS, cells))
                if self.plots is not None:
                    _draw(self.plots, f"{model} on {cluster}", searched)
                if not is_complete:
                    break
        return Findings({self.name(): rows}, "\n\n".join(texts), is_complete=is_complete)

    def _samples(self, contest: "Contest", contestant: Contestant) -> "list[Samples]":
        """Returns what each seed's search sampled; empty if the strategy can't be used."""
        from placewise.experiments.recorded_searches import judged_searches

        settings = {**contestant.settings, **({"evaluations": str(self.budget)} if contestant.strategy == "post" else {})}
        searches = judged_searches(contest, contestant.strategy, settings, self.budget, self.seeds)
        return [Samples.of(batches) for batches in searches]


class Samples(NamedTuple):
    """The samples of a search, in their order, and the notes of its last update."""

    seconds: "Floats"  # [samples], the costs
    best: "Floats"  # [samples], the best step so far
    notes: Mapping[str, Any]

    @classmethod
    def of(cls, batches: Any) -> "Samples":
        """Returns the samples of judged batches."""
        import numpy as np

        cost = np.concatenate([batch.evaluation.cost for batch in batches])
        misfits = np.concatenate([batch.evaluation.overflow_bytes for batch in batches]) > 0
        return cls(cost, np.minimum.accumulate(np.where(misfits, np.inf, cost)), batches[-1].notes)

    def mean(self, *, last: bool) -> float:
        """The mean of the last or of the first tenth."""
        tenth = max(len(self.seconds) // SHARE, 1)
        return float((self.seconds[-tenth:] if last else self.seconds[:tenth]).mean())


COLUMNS = ["model", "strategy", "best ms", "from", "to", "first samples", "last samples", "entropy", "groups", "grouper"]


def _row(model: str, cluster: str, label: str, samples: list[Samples]) -> dict[str, Any]:
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
        "first_samples": statistics.median(one.mean(last=False) for one in samples),
        "last_samples": statistics.median(one.mean(last=True) for one in samples),
        **notes,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    times = (row["median"], row["best_seconds"][0], row["best_seconds"][-1], row["first_samples"], row["last_samples"])
    kinds = (("entropy", ".2f"), ("groups_used", ".0f"), ("grouper_entropy", ".3f"))
    notes = [format(row[name], form) if name in row else "" for name, form in kinds]
    return [f"{row['model']} on {row['cluster']}", row["strategy"], *(f"{seconds * 1e3:,.0f}" for seconds in times), *notes]


def _draw(folder: str, title: str, searched: "dict[str, list[Samples]]") -> None:
    """Writes a picture: the means of the samples above the best steps, medians over the seeds."""
    import io
    import re
    from pathlib import Path

    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

    from placewise.experiments.search_figures import COLOURS, LEVEL_COLOUR, SETTINGS, STYLES
    from placewise.formats.files import write_bytes

    lines = {label: samples for label, samples in searched.items() if samples and len(samples[0].seconds) > SHARE}
    if not lines:
        return
    with matplotlib.rc_context(SETTINGS):
        figure = Figure((9.5, 6.5))
        means, bests = figure.subplots(2, 1, sharex=True)
        for number, (label, samples) in enumerate(lines.items()):
            control = label == "even"
            colour = LEVEL_COLOUR if control else COLOURS[number % len(COLOURS)]
            style = STYLES[number // len(COLOURS) % len(STYLES)]
            length = min(len(one.seconds) for one in samples)
            window = max(length // 20, 1)
            smooth = [np.convolve(one.seconds[:length], np.ones(window) / window, "valid") for one in samples]
            middle = np.median(smooth, axis=0) * 1e3
            name = f"{label} (learns nothing)" if control else label
            means.plot(np.arange(window, length + 1), middle, style, color=colour, linewidth=1.6, label=name)
            best = np.median([one.best[:length] for one in samples], axis=0) * 1e3
            bests.plot(np.arange(1, length + 1), best, style, color=colour, linewidth=1.6)
        means.set(yscale="log", ylabel=f"mean of the samples, ms\n({window} at a time)")
        bests.set(yscale="log", ylabel="best step so far, ms", xlabel="evaluations")
        for axes in (means, bests):
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.yaxis.set_minor_formatter("{x:,.0f}")
            axes.tick_params(axis="y", which="both", labelsize=8)
        means.set_title(f"{title}, median of {len(next(iter(lines.values())))} seeds", loc="left", weight="bold")
        figure.legend(*means.get_legend_handles_labels(), loc="center right", frameon=False)
        figure.subplots_adjust(left=0.1, right=0.71, top=0.94, bottom=0.08, hspace=0.12)
        output = io.BytesIO()
        figure.savefig(output, format="svg", metadata={"Date": None, "Creator": None})
    Path(folder).mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    write_bytes(Path(folder) / f"neural-{name}.svg", output.getvalue())
