"""What a soak does again and again: searches alone and in processes, run files and pages; capture and training steps."""

import gc
import os
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
from small_steps import two_cpus, words_step

import placewise as pw
from placewise.cli import main

GRAPH = Path(__file__).parents[1] / "golden/captured.json.gz"

STRATEGIES = ("auto", "annealing", "genetic", "post", "spotlight", "m-etf", "random")

STEPS = 200  # of a round


@dataclass(frozen=True)
class Sample:
    """What the process holds after a round."""

    seconds: float  # since the soak began
    resident_bytes: int
    threads: int
    files: int  # open descriptors
    children: int

    @classmethod
    def now(cls, seconds: float) -> "Sample":
        """Returns a sample of this process; what only the collector of cycles would free is freed first."""
        gc.collect()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        files = len(os.listdir("/proc/self/fd"))
        return cls(seconds, int(status["VmRSS"].split()[0]) * 1024, int(status["Threads"]), files, len(children))


class Soak:
    """Rounds of work; one compiled step lives through all of them."""

    def __init__(self) -> None:
        self.steps, self.searches = 0, 0
        self._kept = self._compiled()

    def _compiled(self) -> object:
        step = words_step()
        return pw.place(step, two_cpus(), strategy="random", evaluations=5).compile(step, two_cpus())

    def round(self, number: int) -> None:
        """Runs each kind of work once; strategies and seeds change from round to round."""
        strategy = STRATEGIES[number % len(STRATEGIES)]
        with tempfile.TemporaryDirectory(prefix="placewise-soak-") as folder:
            files = ["--run-file", f"{folder}/runs.db", "-o", f"{folder}/plan.json", "--report", f"{folder}/page.html"]
            words = ["place", str(GRAPH), "--cluster", "2xK80", "--seed", str(number), "--budget", "40", "--quiet"]
            self._command([*words, "--strategy", strategy, *files])
            self._command([*words, "--strategy", "random", "--workers", "2"])
            self._command(["report", f"{folder}/runs.db", "1", "-o", f"{folder}/again.html"])
        self._train(self._kept)
        self._train(self._compiled())

    def _command(self, words: list[str]) -> None:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            code = main(words)
        if code:
            raise RuntimeError(f"{words} ended with {code}")
        self.searches += 1

    def _train(self, train_step: object) -> None:
        batch = (torch.randint(13, (4,)), torch.randint(13, (4,)))
        for _ in range(STEPS):
            train_step(batch)  # type: ignore[operator]
        self.steps += STEPS
