"""Mutates files and runs the commands that read them.

    python -m tests.fuzz --minutes 5                 as long as you like; the seed is printed
    python -m tests.fuzz --mutations 100000 --seed 7
    python -m tests.fuzz --seed 7 --only 4711        one of them again, with the mutated file left in a folder

A finding is a traceback, more than one line, another exit code than 0, 2 and 3, more than 5 s, more than 1 GiB, a changed
or left file, control characters in the output, or a page with other scripts than ours.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]

from fuzz.harness import Finding, Fuzzer  # noqa: E402

PART = 500  # mutations of one process; if it crashes, the others go on


def main() -> int:
    """Runs mutations until the time or their number is over; returns 1 if there were findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Mutates every kind of file that is read.")
    parser.add_argument("--minutes", type=float, default=None, help="how long (default: 1, unless --mutations is given)")
    parser.add_argument("--mutations", type=int, default=None, help="how many")
    parser.add_argument("--seed", type=int, default=None, help="of all mutations (default: from the clock)")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--only", type=int, default=None, help="only this mutation")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else time.time_ns() % 10**6
    if options.only is not None:
        return _only(seed, options.only)
    minutes = options.minutes if options.minutes is not None or options.mutations is not None else 1.0
    say(f"seed {seed}")
    _in_a_child(seed, 0, 0, float("inf"))
    until = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    number, found, counts, codes = options.first, 0, Counter[str](), Counter[str]()
    while time.monotonic() < until and (options.mutations is None or number < options.first + options.mutations):
        part = PART if options.mutations is None else min(PART, options.first + options.mutations - number)
        lines, code = _in_a_child(seed, number, part, until)
        done = [int(line.split()[1]) for line in lines if line.startswith("done ")]
        for line in lines:
            if line.startswith("finding "):
                found += 1
                counts[line.split(": ", 1)[1][:90]] += 1
                say(line)
            elif line.startswith("codes "):
                codes.update(json.loads(line[6:]))
        if code:
            crashed = number + len(done)
            found += 1
            say(f"finding {crashed}: the process ended with {code}: python -m tests.fuzz --seed {seed} --only {crashed}")
            number = crashed + 1
        else:
            number += len(done)
            if len(done) < part:
                break
        say(f"{number - options.first:,} mutations, {found:,} findings")
    for what, count in counts.most_common(20):
        say(f"{count:6} {what}")
    ended = ", ".join(f"{count:,} with exit code {code}" for code, count in sorted(codes.items()))
    say(f"seed {seed}: {number - options.first:,} mutations, {found:,} findings; {ended}")
    return 1 if found else 0


def _in_a_child(seed: int, first: int, count: int, until: float) -> tuple[list[str], int]:
    """Returns the lines that a child prints for some mutations, and its exit status; without any it only warms up."""
    folder = tempfile.mkdtemp(prefix="placewise-fuzz-")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        with open(writer, "w", buffering=1) as report:
            fuzzer = Fuzzer(Path(folder), seed)
            if not count:
                fuzzer.warm_up()
            for number in range(first, first + count):
                if time.monotonic() >= until:
                    break
                for finding in fuzzer.run(number):
                    report.write(_line(finding, seed) + "\n")
                report.write(f"done {number}\n")
            report.write(f"codes {json.dumps(fuzzer.codes)}\n")
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8", errors="replace") as report:
        lines = report.read().splitlines()
    _, status = os.waitpid(child, 0)
    shutil.rmtree(folder, ignore_errors=True)
    return lines, status


def say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)


def _line(finding: Finding, seed: int) -> str:
    what = " ".join(finding.what.split())
    return f"finding {finding.number}: {finding.target}: {what} [{finding.command}] --seed {seed} --only {finding.number}"


def _only(seed: int, number: int) -> int:
    folder = Path(tempfile.mkdtemp(prefix="placewise-fuzz-"))
    fuzzer = Fuzzer(folder, seed)
    fuzzer.warm_up()
    findings = fuzzer.run(number)
    for finding in findings:
        say(_line(finding, seed))
    say(f"mutation {number} of seed {seed}: {len(findings)} findings; its files are in {folder}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
