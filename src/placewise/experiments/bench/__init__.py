"""Benchmarks that anyone can repeat: `placewise bench NAME`.

Benchmarks are discovered automatically: every file `bench_NAME.py` in this folder is one. It has a frozen dataclass that
derives from `Benchmark`: its docstring is the summary, its fields are the options, and `run` measures. `placewise bench
--help` imports all of these files, so they load heavy packages only inside functions. The other files are shared.
"""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

PREFIX = "bench_"

NEURAL = ("colocrl", "spotlight", "hdp")  # slow: searched only if they are named

FAST = "default: all but exact and the neural ones"  # in words, for help

Rows = list[dict[str, Any]]  # figures by name; every row has the same names

Kind = Literal[  # what an option takes
    "names",  # any number of names; positional, as the next four
    "models",  # any number of models
    "model",  # a model, or a graph file
    "run-model",  # a model that can be run
    "cluster",
    "strategies",  # names or families, separated by commas
    "list",  # words, separated by commas
    "repeated",  # a word; the option may be given several times
    "choice",  # one of the words in `choices`
    "positive",  # a whole number above 0
    "count",  # a whole number, 0 too
    "seconds",
    "percent",  # a share below a half
    "share",  # from 0 to 1
    "flag",
    "file",  # that is written
    "folder",  # that is written into
    "source",  # a file or a folder that is read
    "virtual",  # slices of a GPU
    "workers",  # processes that evaluate
    "ray",  # a Ray cluster that evaluates
]


@dataclass(frozen=True)
class Findings:
    """What a benchmark found."""

    data: Mapping[str, Any]  # what --json prints
    text: str  # what people read
    warnings: tuple[str, ...] = ()
    is_complete: bool = True  # False: Ctrl-C was pressed
    failure: str = ""  # if not empty, the command ends with this line and an error


class Benchmark(ABC):
    """A benchmark with its options."""

    @classmethod
    def name(cls) -> str:
        """Returns the name on the command line: scale-out for bench_scale_out.py."""
        return cls.__module__.rpartition(".")[2].removeprefix(PREFIX).replace("_", "-")

    @classmethod
    def summary(cls) -> str:
        """Returns one line on what is measured, without a capital and a full stop."""
        line = (cls.__doc__ or "").partition("\n")[0].rstrip(".")
        return line[:1].lower() + line[1:]

    @classmethod
    def options(cls) -> "list[Field[Any]]":
        """Returns the fields that can be set on the command line."""
        return [entry for entry in fields(cls) if "kind" in entry.metadata]  # type: ignore[arg-type]

    @abstractmethod
    def run(self) -> Findings:
        """Measures; wrong options raise an InputError before any work is done."""

    def findings(self, rows: Rows) -> Findings:
        """Returns rows as JSON under the benchmark's name, and as a table."""
        return Findings({self.name(): rows}, table_of(rows))


def option(kind: Kind, help_text: str = "", metavar: str = "", default: Any = None, choices: tuple[str, ...] = ()) -> Any:
    """Returns a field that can be set on the command line; its help gets the default if that is a number."""
    return field(default=default, metadata={"kind": kind, "help": help_text, "metavar": metavar, "choices": choices})


def required(kind: Kind) -> Any:
    """Returns a field that must be given on the command line."""
    return field(metadata={"kind": kind, "help": "", "metavar": "", "choices": ()})


def find_benchmarks() -> dict[str, type[Benchmark]]:
    """Returns the benchmarks of this folder by name."""
    found = {}
    for entry in pkgutil.iter_modules(__path__):
        if entry.name.startswith(PREFIX):
            module = importlib.import_module(f"{__name__}.{entry.name}")
            (benchmark,) = (one for one in Benchmark.__subclasses__() if one.__module__ == module.__name__)
            found[benchmark.name()] = benchmark
    return found


def fast_strategies() -> tuple[str, ...]:
    """Returns the strategies that are compared unless others are named."""
    from placewise.strategies import STRATEGIES

    return tuple(name for name, entry in STRATEGIES.items() if entry.family != "exact" and name not in NEURAL)


def table_of(rows: Rows) -> str:
    """Returns rows as a table for a terminal."""
    from placewise.report.terminal_text import table

    return table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
