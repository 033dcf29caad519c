"""Commands that are killed: all kinds of strategies, worker processes, Ray, measuring, capture, pages and training steps."""

from dataclasses import dataclass
from pathlib import Path

GRAPH = Path(__file__).parents[1] / "golden/captured.json.gz"

MODEL = "rnnlm:layers=2,hidden=8,steps=3,batch=4,vocab=11"

TWO_CPUS = """name = "two"
default_link = {latency_seconds = 1e-5, bytes_per_second = 1e9}
devices = [
  {name = "cpu:0", kind = "cpu", memory = "1GiB", flops = 1e10, bytes_per_second = 1e10},
  {name = "cpu:1", kind = "cpu", memory = "1GiB", flops = 1e10, bytes_per_second = 1e10},
]
"""


@dataclass(frozen=True)
class Scenario:
    """A command that runs in a folder of its own; files that it may write are named in it."""

    name: str
    arguments: tuple[str, ...]
    is_exact: bool = True  # it proposes and finds the same every time
    weight: int = 4  # how often it is drawn
    orphan_seconds: float = 20.0  # by when all processes that it started are gone


def placed(name: str, options: str, *, model: str = str(GRAPH), cluster: str = "2xK80", **more: object) -> Scenario:
    """Returns a recorded search that writes a plan and a page."""
    files = "--run-file runs.db -o plan.json --report page.html"
    return Scenario(name, ("place", model, "--cluster", cluster, *options.split(), *files.split()), **more)  # type: ignore[arg-type]


SCENARIOS = (
    *(
        placed(strategy, f"--strategy {strategy} --budget {budget}")
        for strategy, budget in {
            "auto": 150,
            "random": 1500,
            "annealing": 1500,
            "genetic": 1000,
            "post": 600,
            "spotlight": 40,
            "hdp": 40,
            "colocrl": 40,
            "m-etf": 20,
        }.items()
    ),
    placed("post in 2 processes", "--strategy post --budget 600 --workers 2"),
    placed("random in 2 processes", "--strategy random --budget 2000 --workers 2", weight=8),
    placed("random on Ray", "--strategy random --budget 600 --ray local", weight=1, orphan_seconds=90.0),
    placed("captured", "--strategy annealing --budget 400", model=MODEL),
    placed("measured", "--strategy random --budget 8 --measure --steps 2", model=MODEL, cluster="two.toml", is_exact=False),
    Scenario(
        "run",
        ("run", MODEL, "--cluster", "two.toml", "--plan", "given.json", "--steps", "30", "--trace", "trace.json"),
        False,
    ),
)


def prepare(folder: Path) -> None:
    """Writes what the commands read."""
    (folder / "two.toml").write_text(TWO_CPUS)


PLAN_FOR_RUN = ("place", MODEL, "--cluster", "two.toml", "--strategy", "random", "--budget", "20", "-o", "given.json")
