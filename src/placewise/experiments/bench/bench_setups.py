"""Training setups from many libraries, trained by placewise and by eager code, and compared: `placewise bench setups`."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from placewise.core.quantities import format_count
from placewise.experiments.bench import Benchmark, Findings, option
from placewise.report.markdown_tables import markdown_table

if TYPE_CHECKING:
    from placewise.experiments.training_setups.agreement import Agreement
    from placewise.experiments.training_setups.trials import Trial

PAGE = "docs/results/setups.md"

TITLE = "Training setups: placewise against eager PyTorch"

ABOUT = """\
    placewise bench setups -o docs/results/setups.md

writes this page. Each setup is a model as its library builds it, with a small configuration and random weights. It is
captured, its groups are placed at random on two CPU devices, and it is trained for four steps with four different batches.
The eager loop beside it is what a user would write, with PyTorch's own recipes for accumulation, autocast, clipping and
scaling. Both start from the same seed. Compared are the losses, the norms of the gradients, the model's outputs where they
were asked for, and at the end all parameters, buffers and optimizer state.

- **equal bits**: everything is the same, bit for bit.
- **equal to rounding**: differences are those of rounding. The largest one is divided by the largest element of its tensor.
  What rounding can do is measured for each tensor: the eager loop trains again, with noise of one unit in the last place on
  what every op computes. A difference counts as rounding up to three times the largest of four such runs.
- **equal to rounding, by fused attention** (or another kernel of eager code): the bits are equal once eager code computes
  with the plain kernel instead. placewise records an optimizer's update parameter by parameter.
- **refused**: placewise says in one line what it can't record.

Any other result ends the command with an error. "Captured 3 times" means that a batch or the optimizer asked for another
step, and the step was captured again, as `pw.train_step` does by itself.

Some tensors are rounding alone in eager code too: a key's bias has a gradient of 0 but for rounding, and Adam makes a step
of full size of it. They are counted as left to rounding, and have no part in the largest difference. In bfloat16 and float16
a unit in the last place is large, and a small error of ours could hide behind it. There equal bits are the proof, with eager
code's own kernels or with plain ones.

PyTorch makes a GPU's autocast only on a GPU. So eager loops with `autocast` get its casts from placewise here;
`gpt-autocast-inside` has PyTorch's own autocast for the CPU. Each op runs on one thread, because sums may depend on the
number of threads.
"""


@dataclass(frozen=True)
class TrainingSetups(Benchmark):
    """Training setups of transformers, timm, torchvision, diffusers, peft and PyTorch, compared with eager code."""

    names: tuple[str, ...] = option("names", "only these setups or libraries", "SETUP", default=())
    output: str | None = option("file", f"write the page of the docs ({PAGE})", "PAGE.MD")

    def run(self) -> Findings:
        """Tries the setups, and writes the page if none was left out."""
        from placewise.experiments.training_setups import select_setups
        from placewise.experiments.training_setups.trials import try_setups
        from placewise.formats.files import write_bytes
        from placewise.report.terminal_text import table

        setups = select_setups(self.names)
        trials, is_complete = try_setups(setups, _show)
        warnings = []
        if self.output and is_complete:
            write_bytes(self.output, ("\n".join(setups_page(trials)) + "\n").encode())
        elif self.output:
            warnings.append(f"{self.output} was not written")
        rows = [[trial.setup.name, *_result(trial.agreement)] for trial in trials]
        text = table(["setup", "result", "largest difference", "why"], rows, left=4) + f"\n\n{in_total(trials)}"
        data = {"setups": [trial.to_json() for trial in trials]}
        return Findings(data, text, tuple(warnings), is_complete, failure=_failure(trials))


def in_total(trials: "list[Trial]") -> str:
    """Returns how many setups have each result, in words."""
    results = [trial.agreement.result for trial in trials]
    counts = [f"{results.count(result)} {result}" for result in dict.fromkeys(sorted(results))]
    plain = sum(bool(trial.agreement.kernels) for trial in trials)
    more = f"; with plain kernels {plain} more have equal bits" if plain else ""
    return f"{len(trials)} setups: {', '.join(counts)}{more}"


def _failure(trials: "list[Trial]") -> str:
    """Returns which setups must not be as they are, or ''."""
    from placewise.experiments.training_setups.agreement import DIFFERENT, FAILED

    bad = [trial.setup.name for trial in trials if trial.agreement.result in (DIFFERENT, FAILED)]
    return f"these setups don't train as in eager code: {', '.join(bad)}" if bad else ""


def setups_page(trials: "list[Trial]") -> Iterator[str]:
    """Yields the lines of the docs page."""
    from placewise.experiments.training_setups import LIBRARIES

    yield f"# {TITLE}"
    yield ABOUT
    yield f"**{in_total(trials)}.**"
    header = ["setup", "model", "optimizer", "precision", "with", "result", "largest difference", "why"]
    for library in LIBRARIES:
        mine = [trial for trial in trials if trial.setup.library == library]
        if mine:
            yield ""
            yield f"## {library} {_version(library)}"
            yield ""
            yield from markdown_table(header, [_cells(trial) for trial in mine])


def _cells(trial: "Trial") -> list[str]:
    setup = trial.setup
    cells = [setup.name, setup.model, setup.optimizer.words, setup.precision, setup.extra_words, *_result(trial.agreement)]
    return [cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells]


def _result(agreement: "Agreement") -> list[str]:
    """Returns a result, its largest difference and its reason, in words."""
    size = "" if agreement.difference is None else f"{agreement.difference:.1e}"
    if agreement.where:
        size = f"{size} ({agreement.where})".strip()
    result = f"{agreement.result}, by {agreement.kernels}" if agreement.kernels else agreement.result
    count, captures = agreement.num_undetermined, agreement.num_captures
    left = f"{format_count(count, 'tensor')} left to rounding" if count else ""
    again = f"captured {captures} times" if captures > 1 else ""
    return [result, size, ", ".join(filter(None, [agreement.why, left, again]))]


def _version(library: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(library).partition("+")[0]
    except PackageNotFoundError:
        return "(not installed)"


def _show(trial: "Trial") -> None:
    """Shows a result on a terminal."""
    if sys.stderr.isatty():
        print(f"{trial.setup.name}: {trial.agreement.result}, {trial.seconds:.1f} s", file=sys.stderr)
