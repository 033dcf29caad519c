"""Ends commands at random moments and looks at what is left.

    python -m tests.kills --kills 200 --seed 7         kill -9 at random moments; then the same command again
    python -m tests.kills --signals 3 --seed 7         Ctrl-C and SIGTERM, so many of each in each phase of each scenario
    python -m tests.kills --kills 20 --only annealing  one scenario

After a kill recorded evaluations are those of a run that nothing ended, files are whole or absent, and the next run ends
with the same evaluations and the same plan. After Ctrl-C or SIGTERM there is also one line, the usual exit code, no stray
file and no process.
"""

import argparse
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from kills.harness import Left, check_after, check_finished, check_signalled, trial, undisturbed  # noqa: E402
from kills.phases import PHASES  # noqa: E402
from kills.scenarios import SCENARIOS, Scenario  # noqa: E402

MOST_KILLS = 3  # of one command before it may end

SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


def main() -> int:
    """Ends commands; returns 1 if something was not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description="Ends commands at random moments.")
    parser.add_argument("--kills", type=int, default=0, help="how many kill -9")
    parser.add_argument("--signals", type=int, default=0, help="how many Ctrl-C and SIGTERM in each phase of each scenario")
    parser.add_argument("--seed", type=int, default=None, help="of the moments (default: from the clock)")
    parser.add_argument("--only", help="only the scenario of this name")
    options = parser.parse_args()
    scenarios = [scenario for scenario in SCENARIOS if options.only in (None, scenario.name)]
    if not scenarios:
        parser.error(f"there is no scenario {options.only!r}: it must be one of {', '.join(s.name for s in SCENARIOS)}")
    seed = options.seed if options.seed is not None else time.time_ns() % 10**6
    print(f"seed {seed}", flush=True)
    findings = kill(scenarios, options.kills, random.Random(seed)) if options.kills else 0
    findings += send(scenarios, options.signals, random.Random(seed)) if options.signals else 0
    return 1 if findings else 0


def kill(scenarios: list[Scenario], kills: int, rng: random.Random) -> int:
    """Kills so often; returns the number of findings, and prints how many kills hit each phase."""
    references: dict[str, tuple[Left, float]] = {}
    hit, spread, findings, done = Counter[str](), Counter[str](), 0, 0
    while done < kills:
        scenario = rng.choices(scenarios, [scenario.weight for scenario in scenarios])[0]
        if scenario.name not in references:
            undisturbed(scenario)  # compiles what is compiled once for a machine
            references[scenario.name] = undisturbed(scenario)
        reference, seconds = references[scenario.name]
        with trial(scenario) as run:
            before = Left((), None)
            try:
                for _ in range(rng.randint(1, MOST_KILLS)):
                    ended = run.run(kill_after=rng.uniform(0, seconds))
                    if ended.code != -signal.SIGKILL:
                        assert ended.code == 0, f"exit code {ended.code}: {ended.errors}"
                        break
                    done += 1
                    hit[ended.phase] += 1
                    spread[scenario.name] += 1
                    before = check_after(run, before, reference)
                check_finished(run, before, reference)
            except (AssertionError, ValueError) as finding:
                findings += 1
                print(f"finding: {scenario.name}: {finding}", flush=True)
        print(f"{done} kills, {findings} findings; the last of {scenario.name} in {ended.phase}", flush=True)
    print("phases:", ", ".join(f"{phase} {hit[phase]}" for phase in PHASES if hit[phase]))
    print("scenarios:", ", ".join(f"{name} {count}" for name, count in spread.most_common()))
    print(f"{done} kills, {findings} findings")
    return findings


def send(scenarios: list[Scenario], times: int, rng: random.Random) -> int:
    """Sends Ctrl-C and SIGTERM so often in each phase; returns the number of findings."""
    findings, sent = 0, Counter[tuple[str, str]]()
    for scenario in scenarios:
        with trial(scenario) as run:
            events = run.events()
        reference, _ = undisturbed(scenario)
        for phase in events:
            for number, name in list(SIGNALS.items()) * times:
                event = rng.randint(1, events[phase])
                with trial(scenario) as run:
                    try:
                        ended = run.run(f"{phase}:{int(number)}:{event}")
                        if ended.code == 0 and not ended.errors:
                            continue  # it made fewer calls this time
                        sent[name, phase] += 1
                        check_signalled(ended, number, phase)
                        assert not run.strays(), f"files are left: {run.strays()}"
                        assert not run.orphans(), f"processes are left: {run.orphans()}"
                        left = check_after(run, Left((), None), reference, may_be_part=ended.code == 0)
                        check_finished(run, left, reference)
                    except (AssertionError, ValueError) as finding:
                        findings += 1
                        print(f"finding: {scenario.name}: {name} at event {event} of {phase}: {finding}", flush=True)
        print(f"{scenario.name}: {sum(sent.values())} signals so far, {findings} findings", flush=True)
    for name in SIGNALS.values():
        print(f"{name}:", ", ".join(f"{phase} {sent[name, phase]}" for phase in PHASES if sent[name, phase]))
    print(f"{sum(sent.values())} signals, {findings} findings")
    return findings


if __name__ == "__main__":
    sys.exit(main())
