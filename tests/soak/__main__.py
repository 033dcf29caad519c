"""Works for a long time and draws what the process holds: memory, threads, file descriptors, child processes.

    python -m tests.soak --minutes 20 -o soak.svg

The verdict compares the last quarter of the rounds with the second: memory may grow by 2%, nothing else may grow at all.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).parents[1])]

from soak.work import Sample, Soak  # noqa: E402

MOST_GROWTH = 0.02  # of the median of resident bytes


def main() -> int:
    """Soaks; returns 1 if something grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Works for a long time; nothing should grow.")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (default: 20)")
    parser.add_argument("-o", "--output", help="draw the samples here")
    options = parser.parse_args()
    soak, samples, began = Soak(), list[Sample](), time.monotonic()
    while (seconds := time.monotonic() - began) < 60 * options.minutes:
        soak.round(len(samples))
        samples.append(Sample.now(seconds))
        if len(samples) % 10 == 1:
            print(f"{seconds:6.0f} s, round {len(samples)}: {describe(samples[-1])}", flush=True)
    print(f"{len(samples)} rounds, {soak.searches:,} commands, {soak.steps:,} training steps")
    if options.output:
        draw(samples, options.output)
    grown = what_grew(samples)
    print(f"it grew: {', '.join(grown)}" if grown else "nothing grew")
    return 1 if grown else 0


def describe(sample: Sample) -> str:
    """Returns a sample in words."""
    mib = sample.resident_bytes / 2**20
    return f"{mib:.0f} MiB, {sample.threads} threads, {sample.files} files, {sample.children} children"


def what_grew(samples: list[Sample]) -> list[str]:
    """Returns what the last quarter has more of than the second, in words."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[len(samples) - quarter :]
    if not quarter:
        return ["too few rounds to tell"]
    first, last = (median(sample.resident_bytes for sample in part) for part in (early, late))
    grown = [f"memory from {first / 2**20:.0f} to {last / 2**20:.0f} MiB"] if last > first * (1 + MOST_GROWTH) else []
    for name in ("threads", "files", "children"):
        before, now = (median(getattr(sample, name) for sample in part) for part in (early, late))  # some threads are ending
        grown += [f"{name} from {before:g} to {now:g}"] if now > before else []
    return grown


def draw(samples: list[Sample], path: str) -> None:
    """Draws the samples against minutes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    minutes = [sample.seconds / 60 for sample in samples]
    lines: dict[str, list[float]] = {
        "resident memory (MiB)": [sample.resident_bytes / 2**20 for sample in samples],
        "threads": [sample.threads for sample in samples],
        "open files": [sample.files for sample in samples],
        "child processes": [sample.children for sample in samples],
    }
    figure, axes = pyplot.subplots(len(lines), sharex=True, figsize=(7, 7), layout="constrained")
    for axis, (name, values) in zip(axes, lines.items(), strict=True):
        axis.plot(minutes, values, color="#0072b2", linewidth=1)
        axis.set_ylim(0, 1.2 * max(values) or 1)
        axis.set_title(name, loc="left", fontsize=9)
        axis.grid(color="#eeeeee")
    axes[-1].set_xlabel("minutes")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
